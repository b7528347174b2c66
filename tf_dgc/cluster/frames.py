"""Where in the user's program a thread is."""

import os
import sys
import sysconfig
import threading
from types import FrameType


def of_main_thread() -> FrameType | None:
    """Return what the main thread executes, or None if it has ended."""
    identity = threading.main_thread().ident
    return None if identity is None else sys._current_frames().get(identity)


def place(frame: FrameType | None) -> str:
    """Return where in the user's program a stack is, past all libraries."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


_LIBRARIES = (
    *(sysconfig.get_path(kind) for kind in ("stdlib", "platlib", "purelib")),
    os.path.dirname(os.path.dirname(__file__)),  # the package
    "<",  # code without a file
)
