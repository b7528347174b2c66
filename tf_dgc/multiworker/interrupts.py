"""Ctrl-C in a worker: `KeyboardInterrupt` even while it waits for another worker.

Python raises it when the main thread next runs Python code. In a collective that
another worker never joins, that is never. And if TensorFlow creates an error at that
moment, pybind11 turns both into a `RuntimeError`.
"""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import tensorflow as tf

from tf_dgc.multiworker import coordination

_SECONDS = 1.0  # in which a step ends if no worker is missing
_ERRORS_MODULE = tf.errors.OpError.__init__.__code__.co_filename
_raised = threading.Event()


def deliver_keyboard_interrupts() -> None:
    """Make Ctrl-C end this process's collectives, unless the program has a handler."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if before != -1:  # an event loop, which handles signals itself
        signal.set_wakeup_fd(before)
        return
    signal.signal(signal.SIGINT, _raise)
    threading.Thread(target=_listen, args=[read], daemon=True).start()


def _listen(descriptor: int) -> None:
    """End this worker's collectives if its main thread does not handle a signal."""
    while number := os.read(descriptor, 1):
        if number[0] != signal.SIGINT or signal.getsignal(signal.SIGINT) is not _raise:
            continue
        if not _raised.wait(_SECONDS):
            coordination.abort_collectives("tf_dgc: interrupted (KeyboardInterrupt)")
        _raised.clear()


def _raise(number: int, frame: FrameType | None) -> None:
    _raised.set()
    if frame is None or frame.f_code.co_filename != _ERRORS_MODULE or sys.gettrace():
        raise KeyboardInterrupt
    # TensorFlow is creating an error: interrupt the frame that receives it.
    while frame is not None and frame.f_code.co_filename == _ERRORS_MODULE:
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    frame.f_trace = _raise_instead
    sys.settrace(lambda *_: None)


def _raise_instead(frame: FrameType, event: str, argument: Any) -> None:
    sys.settrace(None)
    frame.f_trace = None
    raise KeyboardInterrupt
