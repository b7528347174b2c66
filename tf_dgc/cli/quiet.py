"""TensorFlow's C++ log, kept out of what commands print."""

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
    """Load TensorFlow within, without its log; what ends the process is shown.

    `TF_CPP_MIN_LOG_LEVEL` says that only what ends it is written. But TensorFlow reads
    the variable after it has written some lines, as a library is loaded: these are left
    out by another process, which passes on the rest even if this one is aborted.

    Nothing is left out if the user has set the variable, or TensorFlow is loaded.
    """
    if VARIABLE in os.environ or "tensorflow" in sys.modules:
        yield
        return
    os.environ[VARIABLE] = "3"
    read, written = os.pipe()
    process = os.fork()
    if not process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends after the other one
        os.close(written)
        _pass_on(read)
    os.close(read)
    sys.stderr.flush()
    before = os.dup(_STDERR)
    os.dup2(written, _STDERR)
    os.close(written)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, _STDERR)
        os.close(before)
        os.waitpid(process, 0)


def _pass_on(descriptor: int) -> None:
    """Write to standard error what is read and is no log; then end the process."""
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
