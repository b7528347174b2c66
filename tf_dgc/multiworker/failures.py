"""Failures: which other worker an error is about, said by all workers alike."""

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import tf_collectives
from tf_dgc.multiworker import coordination, workers

# --- Where in the user's program a thread is.


def main_thread_frame() -> FrameType | None:
    """Return what the main thread executes, or None if it has ended."""
    identity = threading.main_thread().ident
    return None if identity is None else sys._current_frames().get(identity)


def source_location(frame: FrameType | None) -> str:
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

ADVICE = (
    "Training cannot go on without it: end all workers and start all of them again "
    "from the last checkpoint (`tf-dgc run --max-restarts` does both). The cause is at "
    "the end of what that worker printed."
)

ALL_ALIKE = (
    "Starting again does not help before the program is changed: all workers must make "
    "the same calls in the same order. Call what involves all of them (`fit`, "
    "`evaluate`, `predict`, saving a model, reading an optimizer's state) on every "
    "worker or on none; and let every worker compute its loss from the same variables."
)

IN_DIFFERENT_COLLECTIVES = "are in different collectives"
DOES_NOT_COME = "which responds but does not come"  # of a worker that is waited for

_REPORT_SECONDS = 2.0  # longer, and it goes on while this worker ends
_PROBE_SECONDS = 1.0
_TEARDOWN_SECONDS = 5.0
reported = threading.Event()  # the workers have been told, by whichever, why they end


def explain_error(strategy: tf.distribute.Strategy, message: str) -> str | None:
    """Return which worker an error of TensorFlow is about, and what happened to it.

    Args:
        strategy: strategy whose workers may be meant.
        message: text of TensorFlow's error.

    Returns:
        None if it is about no other worker.
    """
    reason = _TOLD.search(message)
    if reason:
        reported.set()
        return reason.group(1).strip()
    silent = "stopped sending heartbeats" in message or "heartbeat timeout" in message
    tasks = _TASK.findall(_PASSED_ON.sub("", message) if silent else message)
    everyone = (f"{job} {index}" for job, index in tasks)
    others = dict.fromkeys(t for t in everyone if t != workers.own_name(strategy))
    names = " and ".join(workers.full_name(strategy, name) for name in others)
    lost = silent or "while calling /tensorflow." in message
    ended = [name for name in others if lost and _has_ended(name)]
    if ended:
        first = workers.full_name(strategy, ended[0])
        what = f"{first} has ended: its program was over, or called `sys.exit`"
    elif silent:
        what = f"{names or 'this worker'} does not respond: killed, stopped or cut off"
    elif "Barrier timed out" in message:
        return None  # all are there, and somebody does not come: `meeting.rendezvous`
    elif "CoordinationService" in message:
        name = workers.full_name(strategy, workers.all_names(strategy)[0])
        what = f"{name}, which coordinates all, cannot be reached: killed, stopped, "
        what += "cut off or at its end"
    elif names and "while calling /tensorflow." in message:
        # A worker passes on what it heard, and its own name comes after that.
        first = workers.full_name(strategy, next(iter(others)))
        what = f"the connection to {first} broke: it died or was cut off"
    elif names and "Collective ops is aborted by" in message:
        what = f"{names} failed"
    else:
        return None
    return f"{what} (TensorFlow says: {_gist(message)})"


_TASK = re.compile(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)(?!/device)")
_PASSED_ON = re.compile(r"remote target \S+ while calling")  # by that worker
_TOLD = re.compile(
    r"tf_dgc: (.*?)(?=\nThe error could be from|\nAdditional GRPC|\]?\n\t \[\["
    r"| \[type\.googleapis\.com|\Z)",
    re.S,
)


def find_reason(strategy: tf.distribute.Strategy, message: str) -> str | None:
    """Return what `explain` does, or what the workers were told before that.

    What TensorFlow says after that, when workers are to meet, is that this worker is in
    an error state, or that the one that coordinates is gone.
    """
    if "tf_dgc: " not in message and _AFTERWARDS.search(message):
        ops = tf_collectives.get_cross_device_ops(strategy)
        first = getattr(ops, "abort_message", lambda seconds: "")(_PROBE_SECONDS)
        message = first if "tf_dgc: " in first else message
    return explain_error(strategy, message)


_AFTERWARDS = re.compile(r"must be in CONNECTED state|CoordinationService(?!Error)")


@contextlib.contextmanager
def naming_workers(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Turn an error about another worker into a `RuntimeError` that names it."""
    try:
        yield
    except tf.errors.OpError as error:
        reason = find_reason(strategy, str(error.message))
        if reason is None:
            raise
        raise stop_this_worker(strategy, reason) from error


def stop_this_worker(strategy: tf.distribute.Strategy, reason: str) -> RuntimeError:
    """Pass the reason on to the other workers; return the error to raise here."""
    report_to_workers(reason)
    return RuntimeError(error_text(strategy, reason))


def report_to_workers(reason: str) -> None:
    """End the collectives of all workers, this one's too, for this reason.

    All then name the worker that was at the start of it, not one that fails because
    another did.
    """
    if reported.is_set():
        return
    reported.set()
    report_failure(f"tf_dgc: {reason}")


def report_failure(message: str) -> None:
    """End the collectives of all workers with this message, if that is possible."""
    with contextlib.suppress(tf.errors.OpError):  # one may have been told already
        coordination.report_error(message, _REPORT_SECONDS)


def limit_teardown() -> None:
    """Let this process end soon, whatever TensorFlow's threads wait for."""
    # It says goodbye to workers that are gone, for up to 20 s.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(_TEARDOWN_SECONDS, exit=True, file=nowhere)


def error_text(strategy: tf.distribute.Strategy, reason: str) -> str:
    """Return what a worker that cannot go on says."""
    name = workers.full_name(strategy, workers.own_name(strategy))
    if IN_DIFFERENT_COLLECTIVES in reason:
        listed = reason.replace(_ITEM, "\n  ")
        return f"tf_dgc: {name} cannot go on: {listed}\n{ALL_ALIKE}"
    return f"tf_dgc: {name} cannot go on: {reason}. {ADVICE}"


def itemize(head: str, items: Sequence[str]) -> str:
    """Return a reason with items, which `error_text` writes on lines of their own.

    Until then it is one line, as TensorFlow's log repeats what it is given.
    """
    return _ITEM.join([f"{head}:", *(item.replace(_ITEM, " ") for item in items)])


_ITEM = "\t"


def show_own_errors_plainly() -> None:
    """Show errors about other workers without a traceback, when one ends this process.

    Their reason is in no line of the program. It prints that line, and the text of the
    error. With `keras.config.disable_traceback_filtering()` tracebacks stay. By
    `sys.excepthook`, which shows all other errors as before.
    """
    show = sys.excepthook
    if show in _hooks:
        return

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        text = _own_text(error)
        if text is None or not keras.config.is_traceback_filtering_enabled():
            return show(kind, error, trace)
        if place := place_of_error(trace):
            line = source_line(place)
            sys.stderr.write(f"At {place}: {line}\n")
        return show(RuntimeError, RuntimeError(text), None)

    _hooks.append(hook)
    sys.excepthook = hook


_hooks: list[Any] = []  # that show our own errors plainly


def _own_text(error: BaseException) -> str | None:
    """Return what an error says of other workers; None if it is about something else.

    Raised while a function is traced, it comes in a `RuntimeError` whose text begins
    with the traceback of that function.
    """
    if isinstance(error, tf.errors.OpError):
        found = _TOLD.search(str(error.message))
        return found and f"tf_dgc: {found.group(1).strip()}"
    if not isinstance(error, RuntimeError):
        return None
    found = _OWN.search(str(error))
    if found is None:
        return None
    text = found["text"].rstrip()
    return text.replace(f"\n{_INDENT}", "\n") if found["traced"] else text


_INDENT = "    "
_OWN = re.compile(
    rf"\A(?P<traced>in user code:.*\n{_INDENT}RuntimeError: )?(?P<text>tf_dgc: .*)",
    re.S,
)


def report_uncaught_exceptions(strategy: tf.distribute.Strategy) -> None:
    """When an error ends this process, name the worker it is about, or tell the others.

    By `sys.excepthook`, which shows what it showed before.
    """
    show_own_errors_plainly()
    show = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        with _without_interrupts():
            end_with(kind, error, trace)

    def end_with(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        reason, cause = None, error
        if isinstance(error, KeyboardInterrupt) and error.__context__ is not None:
            cause = error.__context__  # by `tf-dgc run`, while that was explained
        if isinstance(cause, tf.errors.OpError):
            reason = find_reason(strategy, str(cause.message))
        if reason is not None:
            named_error = stop_this_worker(strategy, reason)
            named_error.__cause__ = cause
            return show(RuntimeError, named_error, trace)
        advice = _advice(error)
        if _own_text(error) is None:  # else the others know already
            name = workers.full_name(strategy, workers.own_name(strategy))
            what = f"{kind.__name__}: {_gist(str(error))}{advice}"
            report_to_workers(f"{name} ended with {what}")
        show(kind, error, trace)
        if advice:
            sys.stderr.write(f"tf_dgc:{advice}\n")
        return None

    _hooks.append(hook)
    sys.excepthook = hook


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let no Ctrl-C keep this process, which ends anyway, from saying why it does.

    `tf-dgc run` interrupts workers when one has failed, while they tell each other.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _advice(error: BaseException) -> str:
    """Return what to do instead of what several workers cannot do at once, or ""."""
    locked = isinstance(error, BlockingIOError) and "unable to lock file" in str(error)
    return locked * (
        " Several workers write to the same HDF5 file, which is lost. Save by "
        "`tf_dgc.saving.save_weights`, by which one of them writes, or give each "
        "worker a path of its own."
    )


def note_end(strategy: tf.distribute.Strategy) -> None:
    """Leave word that this process ends by itself, for who misses it later.

    For an exit that no error brings about, of which nobody is told: the others may be
    done as well. Call it at the end of the process, from a thread.
    """
    if not reported.is_set():
        coordination.publish_at_exit(_ENDED.format(workers.own_name(strategy)), "1")


def _has_ended(name: str) -> bool:
    """Whether a worker has left word that it ended by itself."""
    try:
        return bool(coordination.lookup(_ENDED.format(name), _PROBE_SECONDS))
    except tf.errors.OpError:
        return False


_ENDED = "tf_dgc/ended/{}"


def _gist(message: str, length: int = 300) -> str:
    """Return the one line of an error's message that says what happened."""
    lines = message.rpartition("aborted by: ")[2].strip().splitlines() or [""]
    return lines[0] if len(lines[0]) <= length else lines[0][:length] + " ..."
