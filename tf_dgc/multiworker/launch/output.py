"""Output of workers: all of it goes to a file each, and a selection to the user."""

import codecs
import collections
import contextlib
import fcntl
import itertools
import os
import pathlib
import re
import selectors
import termios
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TextIO

# The first line of a record of TensorFlow's C++ log
_HEAD = re.compile(
    r"""
    (?P<severity>[IWEF])\d{4}[ ]\d\d:\d\d:\d+\.\d+ [ ]+\d+[ ] \S+\.(?:cc|cpp|h|cu|inc):\d+\]
    | \d{4}-\d\d-\d\d[ ]\d\d:\d\d:\d\d\.\d+:[ ](?P<older>[IWEF])[ ]\S+\.(?:cc|h):\d+\]
    | WARNING:[ ]All[ ]log[ ]messages[ ]before[ ]absl::InitializeLog
    """,  # noqa: E501
    re.VERBOSE,
)
# Later lines of a record. A traceback may contain the same text, so these count only
# directly after a record.
_REST = re.compile(
    r"To enable the following instructions:|/job:\w+/|\t \[\[|:\{|:UNKNOWN:"
    r"|Additional GRPC error|RPC: /tensorflow\.|The error could be from a previous"
    r"|The (?:tasks have crashed|following tasks)"
)


class LogPiece(NamedTuple):
    """Text of the program in any pieces, or a whole line of TensorFlow's log."""

    text: str
    severity: str | None = None


class LogSeparator:
    """Separates the lines of TensorFlow's log from a program's text."""

    def __init__(self) -> None:
        self._unfinished = ""  # line of the log
        self._severity: str | None = None  # of the previous line

    def feed(self, text: str) -> list[LogPiece]:
        """Return the pieces that are complete."""
        text, self._unfinished = self._unfinished + text, ""
        pieces: list[LogPiece] = []
        while text:
            text = self._take(text, pieces)
        return pieces

    def close(self) -> list[LogPiece]:
        """Return the unfinished line."""
        line, self._unfinished = self._unfinished, ""
        return [LogPiece(line, self._severity)] if line else []

    def _take(self, text: str, pieces: list[LogPiece]) -> str:
        """Append the first piece of a text to `pieces`; return the rest."""
        head = _HEAD.match(text)
        if head is None and not (self._severity and _REST.match(text)):
            self._severity = None
            next_head = _HEAD.search(text)
            stop = next_head.start() if next_head else len(text)
            pieces.append(LogPiece(text[:stop]))
            return text[stop:]
        if head is not None:
            self._severity = head["severity"] or head["older"] or "I"
        line, newline, rest = text.partition("\n")
        if newline:
            pieces.append(LogPiece(line, self._severity))
        else:
            self._unfinished = line
        return rest


_COLOR = re.compile(r"\x1b\[[\d;]*m")
_OTHER_CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-ln-z]|\x08")
_RANK_COLORS = (36, 33, 35, 32, 34, 31)  # ISO 6429: cyan, yellow, magenta, ...


class Display:
    """A text stream, such as a terminal, a pipe or a file, that never fails."""

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
        """Write a line, without control characters and unsupported colors."""
        text = _OTHER_CONTROL.sub("", text)
        if not self.colors:
            text = _COLOR.sub("", text)
        with self._lock:
            self._write(f"\n{text}\n" if self._within_line else f"{text}\n")

    def ranked(self, rank: int | None, text: str) -> None:
        """Write a line after a worker's rank; None for a server."""
        mark = "[server]" if rank is None else f"[{rank}]"
        if self.colors and rank is not None:
            color = _RANK_COLORS[rank % len(_RANK_COLORS)]
            mark = f"\x1b[{color}m{mark}\x1b[0m"
        self.line(f"{mark} {text}")

    def say(self, message: str) -> None:
        """Write a message of the launcher."""
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
            # Otherwise Python itself would fail when it ends.
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)


def final_terminal_state(line: str) -> str:
    """Return what a terminal finally shows of a line with carriage returns."""
    return next((part for part in reversed(line.split("\r")) if part.strip("\b ")), "")


# Tracebacks

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
    """Removes tracebacks that end with `KeyboardInterrupt` from a program's lines."""

    # Several in a row count as one: the last exception decides. Lines are held back
    # until it is known. A traceback without an end is removed too: the program was
    # killed.

    def __init__(self) -> None:
        self._traceback: list[str] = []
        self._ended = False  # whether the last line that is not empty is an exception
        self._interrupted = False  # whether that is `KeyboardInterrupt`

    def feed(self, line: str) -> list[str]:
        """Take the next line; return the lines that can be shown now."""
        begins = line == _BEGIN or bool(_BEFORE.match(line))
        if not self._traceback:
            self._traceback = [line] if begins else []
            return [] if begins else [line]
        if begins or _BETWEEN.match(line):
            self._ended = self._interrupted = False
        elif line and not line.startswith(" "):
            if self._ended:  # the program continues
                return [*self.close(), line]
            self._ended = True
            self._interrupted = bool(_INTERRUPT.match(line))
        self._traceback.append(line)
        return []

    def close(self) -> list[str]:
        """Return the lines that are held back, unless they end with an interrupt."""
        lines = self._traceback if self._ended and not self._interrupted else []
        self._traceback, self._ended, self._interrupted = [], False, False
        return lines


# The last line of a traceback, or what absl's flags and argparse say.
_ERROR = re.compile(
    r"(?:(?:\w+\.)*\w+(?:Error|Exception|Exit)|FATAL Flags parsing error|\S+: error): "
)
_OP_NODES = "\t [[{{node "  # begins the line after the message of a graph error
# Errors in TensorFlow's log that are not shown: those on every machine without a GPU,
# of oneDNN, and of collectives, which repeat the error that the program prints.
_LEFT_OUT = re.compile(
    r"failed call to cuInit|oneDNN supports DT_\w+ only"
    r"|(?:base_collective_executor|ring_alg)\.cc:\d+\]"
)
_MAX_ERROR_LINES = 500
_TAIL_LINES = 20
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16
_POLL_SECONDS = 0.2
_REDRAW_SECONDS = 30.0  # between lines of a progress bar


class WorkerOutput:
    """The output of one worker, to a log and to `show` (lines) or `pass_on` (text)."""

    def __init__(
        self,
        log: Display,
        show: Callable[[str], None] | None = None,
        pass_on: Callable[[str], None] | None = None,
    ):
        self._log, self._show, self._pass_on = log, show, pass_on
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._separator = LogSeparator()
        self._line = ""  # unfinished line of the program
        self._unseen: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._last_shown = time.monotonic()
        self._interrupt_filter: InterruptFilter | None = None
        self._passed_on = ""  # of the unfinished line when `pass_on` was replaced
        self._error: list[str] = []  # lines of the last error, and what follows it
        self._last_line = ""
        self._is_left_out = False  # whether the last record of the log is

    def feed(self, data: bytes) -> None:
        """Take the next bytes that the worker printed."""
        for piece in self._separator.feed(self._decode(data)):
            self._take(piece)

    def close(self) -> None:
        """Finish the last line."""
        for piece in self._separator.close():
            self._take(piece)
        if self._line:
            self._finish(self._line)
            self._line = ""
        if self._interrupt_filter is not None:
            self._show_lines(self._interrupt_filter.close())
        self._log.close()

    def show_progress(self) -> None:
        """Show the state of a line that is redrawn repeatedly, from time to time."""
        late = time.monotonic() - self._last_shown > _REDRAW_SECONDS
        if late and self._show is not None and "\r" in self._line:
            self._show(final_terminal_state(self._line).rstrip())
            self._last_shown = time.monotonic()

    def leave_out_interrupts(self, show: Callable[[str], None]) -> None:
        """Show no traceback of an interrupt from now on; `show` replaces `pass_on`."""
        self._interrupt_filter = InterruptFilter()
        if self._pass_on is not None:
            self._passed_on = self._line
            self._show, self._pass_on = show, None

    def unseen(self) -> list[str]:
        """Return the last lines that were not shown, including errors in the log."""
        return list(self._unseen)

    def last_error(self, code: int) -> str:
        """Return one line that says which error ended the program, or ""."""
        # With exit code 1 it may be the last line, because `sys.exit` takes a text.
        if self._error:
            return error_line(self._error)
        return self._last_line if code == 1 else ""

    def _take(self, piece: LogPiece) -> None:
        if piece.severity is not None:
            self._log.line(piece.text)
            if _HEAD.match(piece.text):
                self._is_left_out = bool(_LEFT_OUT.search(piece.text))
            if piece.severity in "EF" and not self._is_left_out:
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
        start, carriage_return, end = line.rpartition("\r")
        if end:
            self._line = carriage_return + end
        else:
            self._line = final_terminal_state(start) + carriage_return

    def _finish(self, line: str) -> None:
        text = final_terminal_state(line).rstrip()
        self._log.line(text)
        self._last_line = text or self._last_line
        if _ERROR.match(text):
            self._error = [text]
        elif self._error and len(self._error) < _MAX_ERROR_LINES:
            self._error.append(text)
        passed_on, self._passed_on = self._passed_on, ""
        if passed_on and line == passed_on:
            return
        if self._interrupt_filter is None:
            self._show_lines([text])
        else:
            self._show_lines(self._interrupt_filter.feed(text))

    def _show_lines(self, lines: Iterable[str]) -> None:
        for text in lines:
            if self._show is not None:
                self._show(text)
                self._last_shown = time.monotonic()
            elif self._pass_on is None:
                self._unseen.append(text)


def error_line(lines: Sequence[str]) -> str:
    """Return what the first line of an error says, with details from the next lines.

    A first line that ends with a colon, such as "Graph execution error:" or "in user
    code:", does not say what happened.
    """
    first, *rest = lines
    if not first.endswith(":"):
        return first
    kind = first.partition(": ")[0]
    nodes = next((i for i, line in enumerate(rest) if line.startswith(_OP_NODES)), 0)
    if nodes:
        blank = max((i for i, line in enumerate(rest[:nodes]) if not line), default=-1)
        return f"{kind}: {' '.join(rest[blank + 1 : nodes])}"
    indented = list(itertools.takewhile(lambda x: not x or x.startswith(" "), rest))
    errors = [line.strip() for line in indented if _ERROR.match(line.strip())]
    if errors:
        return errors[-1]
    items = [line.strip() for line in indented if line]
    return f"{first} {'; '.join(items)}" if items else first


class OutputReader:
    """Reads the output of all workers in one thread, so that lines stay whole."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)

    def add(self, output: WorkerOutput, descriptor: int) -> None:
        """Read from a file descriptor, and close it at its end; call before `start`."""
        self._selector.register(descriptor, selectors.EVENT_READ, output)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Read until all descriptors are closed, or for so many seconds."""
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
    except OSError:  # a pseudo-terminal that nobody writes to any more
        return b""


def open_channel(terminal: TextIO | None = None) -> tuple[int, int]:
    """Return descriptors to read and write; the latter a terminal like `terminal`."""
    if terminal is None:
        return os.pipe()
    read, write = os.openpty()
    modes = termios.tcgetattr(write)
    modes[1] &= ~termios.OPOST  # the other terminal converts line ends
    termios.tcsetattr(write, termios.TCSANOW, modes)
    size = fcntl.ioctl(terminal.fileno(), termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(write, termios.TIOCSWINSZ, size)
    return read, write


def open_log(directory: pathlib.Path, name: str, attempt: int) -> Display:
    """Return the file for all output of a worker; later attempts are appended."""
    path = directory / f"{name.replace(' ', '-')}.log"
    log = Display(path.open("a" if attempt > 1 else "w", encoding="utf-8"))
    if attempt > 1:
        log.say(f"attempt {attempt}")
    return log
