"""What workers print: all of it to a file each, and what is asked for to the user."""

import codecs
import collections
import fcntl
import os
import pathlib
import re
import selectors
import termios
import threading
import time
from collections.abc import Callable, Iterable
from typing import TextIO

from tf_dgc.launch.display import Display, final_state
from tf_dgc.launch.log_records import Piece, Separator
from tf_dgc.launch.tracebacks import InterruptFilter

_ERROR = re.compile(r"(?:\w+\.)*\w+(?:Error|Exception|Exit): ")  # ends a traceback
# What TensorFlow's log has as an error on every machine without a GPU.
_HARMLESS = re.compile(r"failed call to cuInit|oneDNN supports DT_\w+ only")
_TAIL_LINES = 20
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16
_POLL_SECONDS = 0.2
_REDRAWN_SECONDS = 30.0  # from line to line of a progress bar that takes long


class WorkerOutput:
    """What one worker prints.

    Args:
        log: file for all of it, a line at a time.
        show: function of every finished line of the program; None shows none.
        pass_on: function of the program's text as it comes instead, unfinished lines
            and control characters included.
    """

    def __init__(
        self,
        log: Display,
        show: Callable[[str], None] | None = None,
        pass_on: Callable[[str], None] | None = None,
    ):
        self._log, self._show, self._pass_on = log, show, pass_on
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._separator = Separator()
        self._line = ""  # the program's, unfinished
        self._unseen: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._shown = time.monotonic()
        self._interrupts: InterruptFilter | None = None
        self._passed_on = ""  # of an unfinished line, when that ended
        self._last_error = self._last_line = ""

    def feed(self, data: bytes) -> None:
        """Take what the worker printed next."""
        for piece in self._separator.feed(self._decode(data)):
            self._take(piece)

    def close(self) -> None:
        """Take what was printed last as finished."""
        for piece in self._separator.close():
            self._take(piece)
        if self._line:
            self._finish(self._line)
            self._line = ""
        if self._interrupts is not None:
            self._show_lines(self._interrupts.close())
        self._log.close()

    def show_progress(self) -> None:
        """Show the state of a line that is written over and over, if it is time."""
        late = time.monotonic() - self._shown > _REDRAWN_SECONDS
        if late and self._show is not None and "\r" in self._line:
            self._show(final_state(self._line).rstrip())
            self._shown = time.monotonic()

    def leave_out_interrupts(self, show: Callable[[str], None]) -> None:
        """Show no traceback of an interrupt from now on, as this worker gets one.

        Args:
            show: function of every finished line, in place of `pass_on`.
        """
        self._interrupts = InterruptFilter()
        if self._pass_on is not None:
            self._passed_on = self._line
            self._show, self._pass_on = show, None

    def unseen(self) -> list[str]:
        """Return the last lines that were not shown, errors of TensorFlow's log too."""
        return list(self._unseen)

    def last_error(self, code: int) -> str:
        """Return the line that says which error ended the program, or "".

        Args:
            code: its exit code. With 1 that may be its last line, as `sys.exit` takes
                a text.
        """
        return self._last_error or (self._last_line if code == 1 else "")

    def _take(self, piece: Piece) -> None:
        if piece.severity is not None:
            self._log.line(piece.text)
            if piece.severity in "EF" and not _HARMLESS.search(piece.text):
                self._unseen.append(piece.text)
            return
        if self._pass_on is not None:
            self._pass_on(piece.text)
        *finished, line = (self._line + piece.text).split("\n")
        for text in finished:
            self._finish(text)
        if len(line) > _LONGEST_LINE:
            self._finish(line)
            line = ""
        start, redrawn, end = line.rpartition("\r")
        self._line = redrawn + end if end else final_state(start) + redrawn

    def _finish(self, line: str) -> None:
        text = final_state(line).rstrip()
        self._log.line(text)
        self._last_line = text or self._last_line
        if _ERROR.match(text):
            self._last_error = text
        seen, self._passed_on = self._passed_on, ""
        if seen and line == seen:
            return
        filtered = self._interrupts
        self._show_lines([text] if filtered is None else filtered.feed(text))

    def _show_lines(self, lines: Iterable[str]) -> None:
        for text in lines:
            if self._show is not None:
                self._show(text)
                self._shown = time.monotonic()
            elif self._pass_on is None:
                self._unseen.append(text)


class Reader:
    """Reads what all workers print, in one thread, so that lines stay whole."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)

    def add(self, output: WorkerOutput, descriptor: int) -> None:
        """Read from a file descriptor, and close it at its end; before `start`."""
        self._selector.register(descriptor, selectors.EVENT_READ, output)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Read what there is until all ends are closed, or for so many seconds."""
        self._deadline = time.monotonic() + seconds
        if self._thread.ident is not None:
            self._thread.join()

    def _read(self) -> None:
        with self._selector as selector:
            while selector.get_map() and time.monotonic() < self._deadline:
                for key, _ in selector.select(_POLL_SECONDS):
                    if data := _read_some(key.fd):
                        key.data.feed(data)
                    else:
                        self._end(key)
                for key in selector.get_map().values():
                    key.data.show_progress()
            for key in list(selector.get_map().values()):
                self._end(key)

    def _end(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fd)
        os.close(key.fd)
        key.data.close()


def _read_some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _CHUNK)
    except OSError:  # how a pseudo-terminal says that nobody writes to it any more
        return b""


def open_channel(terminal: TextIO | None = None) -> tuple[int, int]:
    """Return file descriptors to read from and to write to.

    Args:
        terminal: stream to a terminal; if given, what is written to is a terminal of
            the same size, so that programs draw and colour as they do without us.
    """
    if terminal is None:
        return os.pipe()
    read, write = os.openpty()
    modes = termios.tcgetattr(write)
    modes[1] &= ~termios.OPOST  # the other terminal makes line ends
    termios.tcsetattr(write, termios.TCSANOW, modes)
    size = fcntl.ioctl(terminal.fileno(), termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(write, termios.TIOCSWINSZ, size)
    return read, write


def open_log(directory: pathlib.Path, name: str, attempt: int) -> Display:
    """Return the file for all that a worker prints; later attempts are appended."""
    path = directory / f"{name.replace(' ', '-')}.log"
    log = Display(path.open("a" if attempt > 1 else "w", encoding="utf-8"))
    if attempt > 1:
        log.say(f"attempt {attempt}")
    return log
