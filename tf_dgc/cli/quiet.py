"""Hides TensorFlow's C++ log from the output of commands."""

import codecs
import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from tf_dgc.multiworker.launch.output import LogPiece, LogSeparator

VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
_STDERR = 2
_CHUNK = 1 << 16


@contextlib.contextmanager
def without_tensorflow_log() -> Iterator[None]:
    """Hide TensorFlow's log while it is loaded in this context, except fatal errors."""
    # `TF_CPP_MIN_LOG_LEVEL=3` hides other lines, but TensorFlow writes some while a
    # library is loaded, before it reads the variable. Another process filters these
    # from standard error, and passes on the rest even if this process is aborted.
    if VARIABLE in os.environ or "tensorflow" in sys.modules:
        yield
        return
    os.environ[VARIABLE] = "3"
    read_end, write_end = os.pipe()
    process = os.fork()
    if not process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ends after this process
        os.close(write_end)
        _pass_on(read_end)
    os.close(read_end)
    sys.stderr.flush()
    stderr = os.dup(_STDERR)
    os.dup2(write_end, _STDERR)
    os.close(write_end)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, _STDERR)
        os.close(stderr)
        os.waitpid(process, 0)


def _pass_on(descriptor: int) -> None:
    """Copy input to standard error without log lines, then end the process."""
    separator = LogSeparator()
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    try:
        while data := os.read(descriptor, _CHUNK):
            _write(separator.feed(decode(data)))
        _write(separator.close())
    finally:
        os._exit(0)


def _write(pieces: list[LogPiece]) -> None:
    for text, severity in pieces:
        if severity is None:
            os.write(_STDERR, text.encode())
        elif severity == "F":
            os.write(_STDERR, f"{text}\n".encode())
