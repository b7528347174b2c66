"""Errors that name the worker that failed, the same on all workers."""

import contextlib
import faulthandler
import gc
import linecache
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import tf_collectives
from tf_dgc.conditions import ASSERTION
from tf_dgc.multiworker import coordination, workers

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

_REPORT_SECONDS = 2.0  # if it takes longer, it continues while this worker ends
_PROBE_SECONDS = 1.0
_TEARDOWN_SECONDS = 5.0
_ENDED = "tf_dgc/ended/{}"  # key that a worker sets when it ends without an error
_ITEM = "\t"
_INDENT = "    "
_AUTOGRAPH = "__autograph_generated_file"
_LIBRARIES = (
    *(sysconfig.get_path(kind) for kind in ("stdlib", "platlib", "purelib")),
    os.path.dirname(os.path.dirname(__file__)),  # the package
    "<",  # code without a file
)

_TASK = re.compile(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)(?!/device)")
_FORWARDED = re.compile(r"remote target \S+ while calling")  # by that worker
_REPORTED = re.compile(
    r"tf_dgc: (.*?)(?=\nThe error could be from|\nAdditional GRPC|\]?\n\t \[\["
    r"| \[type\.googleapis\.com|\Z)",
    re.S,
)
_AFTERWARDS = re.compile(r"must be in CONNECTED state|CoordinationService(?!Error)")
_ASSERTION = re.compile(
    rf"assertion failed: \[{ASSERTION}\] \[(.*?)\](?=\n\t \[\[| \[Op:|\Z)",
    re.S,
)
_ESCAPED = re.compile(r"\\([\\\"'])")  # by TensorFlow, in an assertion's text
_OWN_ERROR = re.compile(
    rf"\A(?P<traced>in user code:.*\n{_INDENT}RuntimeError: )?(?P<text>tf_dgc: .*)",
    re.S,
)

reported = threading.Event()  # whether any worker has reported why all of them end
_hooks: list[Any] = []  # values of `sys.excepthook` that this module has set


# Explain an error of TensorFlow


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


def find_reason(strategy: tf.distribute.Strategy, message: str) -> str | None:
    """Return what `explain_error` returns, or what a worker has reported before."""
    # At barriers TensorFlow says only that this worker is in an error state; the reason
    # is in an earlier message.
    if "tf_dgc: " not in message and _AFTERWARDS.search(message):
        ops = tf_collectives.get_cross_device_ops(strategy)
        first = getattr(ops, "abort_message", lambda seconds: "")(_PROBE_SECONDS)
        message = first if "tf_dgc: " in first else message
    return explain_error(strategy, message)


def explain_error(strategy: tf.distribute.Strategy, message: str) -> str | None:
    """Return which other worker an error is about, and what happened to it, or None."""
    if report := _REPORTED.search(message):
        reported.set()
        return report.group(1).strip()
    silent = "stopped sending heartbeats" in message or "heartbeat timeout" in message
    tasks = _TASK.findall(_FORWARDED.sub("", message) if silent else message)
    names = dict.fromkeys(f"{job} {index}" for job, index in tasks)
    names.pop(workers.own_name(strategy), None)
    full_names = [workers.full_name(strategy, name) for name in names]
    peers = " and ".join(full_names)
    broken = "while calling /tensorflow." in message
    ended = [n for n in names if (silent or broken) and _has_ended(n)]
    if ended:
        first = workers.full_name(strategy, ended[0])
        event = f"{first} has ended: its program was over, or called `sys.exit`"
    elif silent:
        event = f"{peers or 'this worker'} does not respond: killed, stopped or cut off"
    elif "Barrier timed out" in message:
        return None  # `consensus.wait_for_workers` names the worker that did not come
    elif "CoordinationService" in message:
        name = workers.full_name(strategy, workers.all_names(strategy)[0])
        event = (
            f"{name}, which coordinates all, cannot be reached: killed, stopped, cut "
            "off or at its end"
        )
    elif peers and broken:
        # A worker forwards the message it got and appends its own name.
        event = f"the connection to {full_names[0]} broke: it died or was cut off"
    elif peers and "Collective ops is aborted by" in message:
        event = f"{peers} failed"
    else:
        return None
    return f"{event} (TensorFlow says: {_gist(message)})"


def _gist(message: str, length: int = 300) -> str:
    """Return the one line of an error's message that says what happened."""
    lines = message.rpartition("aborted by: ")[2].strip().splitlines() or [""]
    if len(lines[0]) <= length:
        return lines[0]
    return f"{lines[0][:length].rsplit(maxsplit=1)[0]} ..."


# Report to the other workers


def stop_this_worker(strategy: tf.distribute.Strategy, reason: str) -> RuntimeError:
    """Report the reason to the other workers; return the error to raise here."""
    report_to_workers(reason)
    return RuntimeError(error_text(strategy, reason))


def report_to_workers(reason: str) -> None:
    """End the collectives of all workers for this reason; only the first one counts."""
    if not reported.is_set():
        reported.set()
        report_failure(f"tf_dgc: {reason}")


def report_failure(message: str) -> None:
    """End the collectives of all workers with this message, if that is possible."""
    with contextlib.suppress(tf.errors.OpError):  # another worker may have been faster
        coordination.report_error(message, _REPORT_SECONDS)


def error_text(strategy: tf.distribute.Strategy, reason: str) -> str:
    """Return the error of a worker that cannot continue."""
    name = workers.full_name(strategy, workers.own_name(strategy))
    if IN_DIFFERENT_COLLECTIVES in reason:
        listed = reason.replace(_ITEM, "\n  ")
        return f"tf_dgc: {name} cannot go on: {listed}\n{ALL_ALIKE}"
    return f"tf_dgc: {name} cannot go on: {reason}. {ADVICE}"


def itemize(head: str, items: Sequence[str]) -> str:
    """Return one line, whose items `error_text` puts on lines of their own."""
    return _ITEM.join([f"{head}:", *(item.replace(_ITEM, " ") for item in items)])


def limit_teardown() -> None:
    """End this process soon; TensorFlow waits up to 20 s for workers that are gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(_TEARDOWN_SECONDS, exit=True, file=null)


def note_end(strategy: tf.distribute.Strategy) -> None:
    """Publish, from a thread at exit, that this process ends without an error."""
    if not reported.is_set():
        coordination.publish_at_exit(_ENDED.format(workers.own_name(strategy)), "1")


def _has_ended(name: str) -> bool:
    try:
        return bool(coordination.lookup(_ENDED.format(name), _PROBE_SECONDS))
    except tf.errors.OpError:
        return False


# Uncaught exceptions


def show_own_errors_plainly() -> None:
    """Print uncaught errors about other workers, and of steps, without a traceback."""
    previous_hook = sys.excepthook
    if previous_hook in _hooks:
        return

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        text = _own_text(error)
        if text is None or not keras.config.is_traceback_filtering_enabled():
            return previous_hook(kind, error, trace)
        if place := place_of_error(trace):
            sys.stderr.write(f"At {place}: {source_line(place)}\n")
        return previous_hook(RuntimeError, RuntimeError(text), None)

    _hooks.append(hook)
    sys.excepthook = hook


def report_uncaught_exceptions(strategy: tf.distribute.Strategy) -> None:
    """When an error ends this process, name the worker it is about, or report it."""
    show_own_errors_plainly()
    previous_hook = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        reason, cause = None, error
        if isinstance(error, KeyboardInterrupt) and error.__context__ is not None:
            cause = error.__context__  # `tf-dgc run` interrupted its explanation
        if isinstance(cause, tf.errors.OpError):
            reason = find_reason(strategy, str(cause.message))
        if reason is not None:
            named_error = stop_this_worker(strategy, reason)
            named_error.__cause__ = cause
            previous_hook(RuntimeError, named_error, trace)
            return
        advice = _hdf5_lock_advice(error)
        name = workers.full_name(strategy, workers.own_name(strategy))
        if text := _assertion_text(error):
            report_to_workers(f"{name} ended with this error: {_gist(text)}")
        elif _own_text(error) is None:  # otherwise it has been reported
            text = f"{kind.__name__}: {_gist(str(error))}{advice}"
            report_to_workers(f"{name} ended with {text}")
        previous_hook(kind, error, trace)
        if advice:
            sys.stderr.write(f"tf_dgc:{advice}\n")

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        with _without_interrupts():
            report(kind, error, trace)

    _hooks.append(hook)
    sys.excepthook = hook


def _own_text(error: BaseException) -> str | None:
    """Return the text of an error about other workers or of a step, else None."""
    # An error raised while a function is traced is wrapped in a `RuntimeError`, whose
    # text begins with the traceback of that function.
    if isinstance(error, tf.errors.OpError):
        if text := _assertion_text(error):
            return f"tf_dgc: {text}"
        report = _REPORTED.search(str(error.message))
        return report and f"tf_dgc: {report.group(1).strip()}"
    match = _OWN_ERROR.search(str(error)) if isinstance(error, RuntimeError) else None
    if match is None:
        return None
    text = match["text"].rstrip()
    return text.replace(f"\n{_INDENT}", "\n") if match["traced"] else text


def _assertion_text(error: BaseException) -> str:
    """Return the text of an assertion of this package that failed in a step, or ""."""
    message = error.message if isinstance(error, tf.errors.OpError) else ""
    match = _ASSERTION.search(str(message))
    return _ESCAPED.sub(r"\1", match.group(1).replace("] [", " ")) if match else ""


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C while this process, which ends anyway, reports why."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _hdf5_lock_advice(error: BaseException) -> str:
    """Return how to save instead, if several workers wrote to one HDF5 file; or ""."""
    locked = isinstance(error, BlockingIOError) and "unable to lock file" in str(error)
    return locked * (
        " Several workers write to the same HDF5 file, which is lost. Save by "
        "`tf_dgc.saving.save_weights`, by which one of them writes, or give each "
        "worker a path of its own."
    )


# Places in the user's program


_frames_lock = threading.Lock()


@contextlib.contextmanager
def thread_frames() -> Iterator[dict[int, FrameType]]:
    """Yield the frames that all threads execute; read their stacks only within."""
    # Python 3.11 may collect garbage when it creates a frame object. A finalizer can
    # then release the interpreter's lock, the thread continues, and the interpreter
    # reads a frame that is gone. Later versions collect between instructions only.
    with _frames_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield sys._current_frames()
        finally:
            if collects:
                gc.enable()


def main_thread(frames: Mapping[int, FrameType]) -> FrameType | None:
    """Return the frame that the main thread executes, or None if it has ended."""
    return frames.get(threading.main_thread().ident or 0)


def source_location(frame: FrameType | None) -> str:
    """Return the innermost place in the user's program of a stack."""
    while frame is not None and not _is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return _describe(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def place_of_error(trace: TracebackType | None) -> str:
    """Return the innermost place in the user's program of a traceback, or ""."""
    stack = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(trace)
    ]
    return place_in(reversed(stack))


def place_in(stack: Iterable[tuple[str, int, str]]) -> str:
    """Return the innermost place in the user's program of a recorded stack, or ""."""
    places = (_describe(*frame) for frame in stack if _is_of_user(frame[0]))
    return next(places, "")


def source_line(place: str) -> str:
    """Return the source line at a place; "" if it cannot be read."""
    path, _, number = place.partition(" in ")[0].rpartition(":")
    line = linecache.getline(path, int(number)) if number.isdecimal() else ""
    return line.strip()


def _is_of_user(path: str) -> bool:
    """Whether a file is the user's, and not generated for a function being traced."""
    return not path.startswith(_LIBRARIES) and _AUTOGRAPH not in path


def _describe(path: str, line: int, function: str) -> str:
    return f"{path}:{line} in {function}"
