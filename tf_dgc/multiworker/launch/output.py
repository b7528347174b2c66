"""What workers print: all of it to a file each, and what is asked for to the user."""

import codecs
import collections
import contextlib
import fcntl
import os
import pathlib
import re
import selectors
import termios
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, TextIO

# --- TensorFlow's C++ log: told apart from what a program prints to the same place.

_HEAD = re.compile(
    r"""
    (?P<severity>[IWEF])\d{4}[ ]\d\d:\d\d:\d+\.\d+ [ ]+\d+[ ] \S+\.(?:cc|cpp|h|cu|inc):\d+\]
    | \d{4}-\d\d-\d\d[ ]\d\d:\d\d:\d\d\.\d+:[ ](?P<older>[IWEF])[ ]\S+\.(?:cc|h):\d+\]
    | WARNING:[ ]All[ ]log[ ]messages[ ]before[ ]absl::InitializeLog
    """,  # noqa: E501
    re.VERBOSE,
)
# Lines after the first one of a record. A traceback may hold the same, so that they
# count only where a record comes directly before.
_REST = re.compile(
    r"To enable the following instructions:|/job:\w+/|\t \[\[|:\{|:UNKNOWN:"
    r"|Additional GRPC error|RPC: /tensorflow\.|The error could be from a previous"
    r"|The (?:tasks have crashed|following tasks)"
)


class LogPiece(NamedTuple):
    """Text of the program, as it came, or a whole line of the log.

    `severity` is the log's: one of I, W, E and F; None for the program's.
    """

    text: str
    severity: str | None = None


class LogSeparator:
    """Separates the lines of the log from a program's text, which comes in pieces.

    A line of the log may begin within a line of the program's, such as an unfinished
    progress bar.
    """

    def __init__(self) -> None:
        self._held = ""  # a line of the log that has not ended
        self._severity: str | None = None  # of the line directly before

    def feed(self, text: str) -> list[LogPiece]:
        """Return what can be told apart by now; the rest is held back."""
        text, self._held = self._held + text, ""
        pieces: list[LogPiece] = []
        while text:
            text = self._take(text, pieces)
        return pieces

    def close(self) -> list[LogPiece]:
        """Return what was held back."""
        held, self._held = self._held, ""
        return [LogPiece(held, self._severity)] if held else []

    def _take(self, text: str, pieces: list[LogPiece]) -> str:
        """Add the first piece of a text; return what comes after it."""
        head = _HEAD.match(text)
        if head is None and not (self._severity and _REST.match(text)):
            self._severity = None
            later = _HEAD.search(text)
            stop = later.start() if later else len(text)
            pieces.append(LogPiece(text[:stop]))
            return text[stop:]
        if head is not None:
            self._severity = head["severity"] or head["older"] or "I"
        line, newline, rest = text.partition("\n")
        if newline:
            pieces.append(LogPiece(line, self._severity))
        else:
            self._held = line
        return rest


# --- Where text of several sources goes: a terminal, a pipe or a file.

_COLOR = re.compile(r"\x1b\[[\d;]*m")
_OTHER_CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-ln-z]|\x08")
_RANK_COLORS = (36, 33, 35, 32, 34, 31)  # ISO 6429: cyan, yellow, magenta, ...


class Display:
    """A text stream that takes what it can, and never fails.

    What its encoding lacks becomes a question mark. When nobody reads any more, or the
    disk is full, the rest is dropped: neither is a reason to end training.
    """

    def __init__(self, stream: TextIO):
        self.terminal = stream.isatty()
        self.colors = self.terminal and "NO_COLOR" not in os.environ
        self._stream = stream
        self._encoding = stream.encoding or "utf-8"
        self._lock = threading.Lock()
        self._within_line = False

    def write(self, text: str) -> None:
        """Write text as it is."""
        with self._lock:
            self._write(text)

    def line(self, text: str) -> None:
        """Write a line of its own, without the control characters it does not take."""
        text = _OTHER_CONTROL.sub("", text)
        if not self.colors:
            text = _COLOR.sub("", text)
        with self._lock:
            self._write(f"\n{text}\n" if self._within_line else f"{text}\n")

    def ranked(self, rank: int | None, text: str) -> None:
        """Write a line behind a worker's rank; None for a server."""
        mark = "[server]" if rank is None else f"[{rank}]"
        if self.colors and rank is not None:
            color = _RANK_COLORS[rank % len(_RANK_COLORS)]
            mark = f"\x1b[{color}m{mark}\x1b[0m"
        self.line(f"{mark} {text}")

    def say(self, message: str) -> None:
        """Write a line of the launcher's own."""
        self.line(f"[tf-dgc] {message}")

    def close(self) -> None:
        """Close the stream; what is written afterwards is dropped."""
        with contextlib.suppress(OSError):
            self._stream.close()

    def _write(self, text: str) -> None:
        self._within_line = not text.endswith("\n")
        text = text.encode(self._encoding, "replace").decode(self._encoding)
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # Else Python itself would fail when it ends.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


def final_terminal_state(line: str) -> str:
    """Return what is left to see of a line that carriage returns wrote over."""
    return next((part for part in reversed(line.split("\r")) if part.strip("\b ")), "")


# --- Tracebacks in what a program prints: those of interrupts are left out.

_BEGIN = "Traceback (most recent call last):"
_BEFORE = re.compile(
    r"Exception ignored |Exception in thread |Error in sys\.excepthook"
)
_BETWEEN = re.compile(
    r"During handling of the above exception|Original exception was:"
    r"|The above exception was the direct cause"
)
_INTERRUPT = re.compile(r"(?:\w+\.)*KeyboardInterrupt\b")


class InterruptFilter:
    """Leaves out tracebacks that end with `KeyboardInterrupt`, of a program's lines.

    Several in a row, as of an error while another one was handled, are one: what the
    last one ends with counts. They are held back until that is known. One without an
    end is left out too: the program was killed while it printed that.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._ended = False  # the last line that is not empty is an exception
        self._interrupted = False  # and that is `KeyboardInterrupt`

    def feed(self, line: str) -> list[str]:
        """Return the lines that can be shown by now, with the next one."""
        begins = line == _BEGIN or bool(_BEFORE.match(line))
        if not self._held:
            self._held = [line] if begins else []
            return [] if begins else [line]
        if begins or _BETWEEN.match(line):
            self._ended = self._interrupted = False
        elif line and not line.startswith(" "):
            if self._ended:  # the program goes on
                return [*self.close(), line]
            self._ended = True
            self._interrupted = bool(_INTERRUPT.match(line))
        self._held.append(line)
        return []

    def close(self) -> list[str]:
        """Return what is held back and no interrupt's."""
        held = self._held if self._ended and not self._interrupted else []
        self._held, self._ended, self._interrupted = [], False, False
        return held


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
        self._separator = LogSeparator()
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
            self._show(final_terminal_state(self._line).rstrip())
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

    def _take(self, piece: LogPiece) -> None:
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
        self._line = redrawn + end if end else final_terminal_state(start) + redrawn

    def _finish(self, line: str) -> None:
        text = final_terminal_state(line).rstrip()
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


class OutputReader:
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
