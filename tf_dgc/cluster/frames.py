"""Where in the user's program a thread is."""

import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from types import FrameType, TracebackType


def of_main_thread() -> FrameType | None:
    """Return what the main thread executes, or None if it has ended."""
    identity = threading.main_thread().ident
    return None if identity is None else sys._current_frames().get(identity)


def place(frame: FrameType | None) -> str:
    """Return where in the user's program a stack is, past all libraries."""
    while frame is not None and not _is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return _describe(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def place_of_error(trace: TracebackType | None) -> str:
    """Return where in the user's program an error came from; "" if nowhere in it."""
    stack = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(trace)
    ]
    return place_in(reversed(stack))


def place_in(stack: Iterable[tuple[str, int, str]]) -> str:
    """Return the user's place in a stack that was recorded; "" if there is none.

    Args:
        stack: file, line and function of each frame, the innermost first.
    """
    own = (where for where in stack if _is_of_user(where[0]))
    return next((_describe(*where) for where in own), "")


def source_line(place: str) -> str:
    """Return the text of the line that `place` returned; "" if it cannot be read."""
    path, _, rest = place.partition(" in ")[0].rpartition(":")
    line = linecache.getline(path, int(rest)) if rest.isdecimal() else ""
    return line.strip()


def _is_of_user(path: str) -> bool:
    """Whether a file is the user's, and not generated for a function being traced."""
    return not path.startswith(_LIBRARIES) and _AUTOGRAPH not in path


def _describe(path: str, line: int, function: str) -> str:
    return f"{path}:{line} in {function}"


_AUTOGRAPH = "__autograph_generated_file"
_LIBRARIES = (
    *(sysconfig.get_path(kind) for kind in ("stdlib", "platlib", "purelib")),
    os.path.dirname(os.path.dirname(__file__)),  # the package
    "<",  # code without a file
)
