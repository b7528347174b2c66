"""Ctrl-C in a worker: `KeyboardInterrupt` even while it waits for another worker.

Python raises it when the main thread next runs Python. In a collective to which some
other worker does not come any more, that would be never; and where TensorFlow makes an
error just then, pybind11 turns both into a `RuntimeError`.
"""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import tensorflow as tf

from tf_dgc.multiworker import coordination

_SECONDS = 1.0  # in which a step that nobody keeps waiting comes to its end
_ERRORS = tf.errors.OpError.__init__.__code__.co_filename
_raised = threading.Event()


def deliver_keyboard_interrupts() -> None:
    """Let Ctrl-C end what this process waits for in TensorFlow.

    A handler of the program's own is left alone. Does nothing outside of the main
    thread, which alone may set handlers.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    numbers, written = os.pipe()
    os.set_blocking(written, False)
    before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    if before != -1:  # an event loop, which ends its waiting itself
        signal.set_wakeup_fd(before)
        return
    signal.signal(signal.SIGINT, _raise)
    threading.Thread(target=_listen, args=[numbers], daemon=True).start()


def _listen(numbers: int) -> None:
    """End collectives of this worker if its main thread does not notice a signal."""
    while number := os.read(numbers, 1):
        if number[0] != signal.SIGINT or signal.getsignal(signal.SIGINT) is not _raise:
            continue
        if not _raised.wait(_SECONDS):
            coordination.abort_collectives("tf_dgc: interrupted (KeyboardInterrupt)")
        _raised.clear()


def _raise(number: int, frame: FrameType | None) -> None:
    _raised.set()
    if frame is None or frame.f_code.co_filename != _ERRORS or sys.gettrace():
        raise KeyboardInterrupt
    # Here TensorFlow makes an error: to be raised where that error arrives.
    while frame is not None and frame.f_code.co_filename == _ERRORS:
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    frame.f_trace = _raise_instead
    sys.settrace(lambda *_: None)


def _raise_instead(frame: FrameType, event: str, argument: Any) -> None:
    sys.settrace(None)
    frame.f_trace = None
    raise KeyboardInterrupt
