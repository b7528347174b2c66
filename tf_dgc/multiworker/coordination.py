"""TensorFlow's coordination of workers, by calls that end and let other threads run.

TensorFlow's own Python wrappers (`context.Context`) hold Python's lock while they wait
for the worker that coordinates, and most have no time limit: if it is stopped, nothing
in this process runs any more. The functions here call the same C API
(tensorflow/c/eager/c_api_experimental.h) without the lock, each in a thread that is
left behind when there is no answer in time.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

import tensorflow as tf

from tf_dgc._internals import coordination

T = TypeVar("T")
_GRACE_SECONDS = 2.0  # for the service to say itself that a time is over


def enable_collectives(capsule: Any, server_def: bytes, seconds: float) -> None:
    """Start this worker's server, and connect it to the others'.

    Args:
        capsule: capsule of the `TFE_Context`.
        server_def: bytes of a serialized `ServerDef`.
        seconds: time to wait for the worker that coordinates.

    Raises:
        tf.errors.DeadlineExceededError: if that worker does not answer in time.
    """
    try:
        _call_within(
            seconds + _GRACE_SECONDS,
            "TFE_EnableCollectiveOps",
            server_def,
            ctypes.c_size_t(len(server_def)),
            context=_pointer(capsule),
        )
    except tf.errors.DeadlineExceededError:
        # What was left behind uses the context: it must outlive everything.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(capsule))
        raise


def publish(key: str, value: str, seconds: float) -> None:
    """Set a key that every worker can read.

    Args:
        key: name that must not be set yet.
        value: text of any length.
        seconds: time to wait for the worker that coordinates.

    Raises:
        tf.errors.AlreadyExistsError: if the key is set.
        tf.errors.DeadlineExceededError: if that worker does not answer in time.
    """
    _call_within(seconds, "TFE_InsertConfigKeyValue", key.encode(), value.encode())


def publish_at_exit(key: str, value: str) -> None:
    """Do what `publish` does, in this thread, for as long as it takes.

    While the interpreter ends, Python 3.12 starts no thread any more.
    """
    _call("TFE_InsertConfigKeyValue", _context(), key.encode(), value.encode())


def unpublish(key: str, seconds: float) -> None:
    """Remove a key, so that it can be published again; raises as `publish`."""
    _call_within(seconds, "TFE_DeleteConfigKeyValue", key.encode())


def lookup(key: str, seconds: float | None) -> str:
    """Return the value of a key, waiting until some worker publishes it.

    While it waits no packet is sent.

    Args:
        key: name of the key.
        seconds: time to wait; None to wait for as long as it takes.

    Raises:
        tf.errors.DeadlineExceededError: if that takes more than so many seconds.

    A time that is over leaves what was asked for with the service, some 20 kB here and
    there, until the key is published. So this is not for asking again and again.
    """
    library, context = _library(), _context()

    def get() -> str:
        buffer = ctypes.c_void_p(library.TF_NewBuffer())
        given = context, key.encode(), _milliseconds(seconds), buffer
        try:
            _call("TFE_GetConfigKeyValue", *given)
            value = library.TF_GetBuffer(buffer)
            return ctypes.string_at(value.data, value.length).decode()
        finally:
            library.TF_DeleteBuffer(buffer)

    limit = None if seconds is None else seconds + _GRACE_SECONDS
    return _within(limit, get, "TFE_GetConfigKeyValue")


def wait_at_barrier(name: str, seconds: float) -> None:
    """Wait until every worker waits at this barrier.

    Raises:
        tf.errors.DeadlineExceededError: if one does not arrive in time.
    """
    _call_within(
        seconds + _GRACE_SECONDS,
        "TFE_WaitAtBarrier",
        name.encode(),
        _milliseconds(seconds),
    )


def report_error(message: str, seconds: float) -> None:
    """Make pending collectives of all workers fail with this message."""
    _call_within(
        seconds,
        "TFE_ReportErrorToCluster",
        ctypes.c_int(tf.errors.FAILED_PRECONDITION),
        message.encode(),
    )


def abort_collectives(message: str) -> None:
    """Make pending collectives of this worker alone fail with the message."""
    status = _new_status(tf.errors.UNAVAILABLE, message)
    _library().TFE_AbortCollectiveOps(_context(), status)
    _library().TF_DeleteStatus(status)


def _call_within(
    seconds: float,
    function: str,
    *arguments: Any,
    context: ctypes.c_void_p | None = None,
) -> None:
    """Call a function of the C API; raise what its status says, or if it is slow."""
    given = context or _context(), *arguments
    _within(seconds, lambda: _call(function, *given), function)


def _within(seconds: float | None, do: Callable[[], T], function: str) -> T:
    """Return what something comes to, in a thread that is left behind if it is slow."""
    answer: futures.Future[T] = futures.Future()

    def call() -> None:
        try:
            answer.set_result(do())
        except BaseException as error:
            answer.set_exception(error)

    coordination.start_daemon_thread(call, f"tf_dgc {function}")
    try:
        return answer.result(seconds)
    except futures.TimeoutError:
        raise tf.errors.DeadlineExceededError(
            None,
            None,
            f"the CoordinationService has not answered {function} for {seconds:g} s",
        ) from None


def _call(function: str, *arguments: Any) -> None:
    library = _library()
    status = _new_status(tf.errors.OK, "")
    try:
        getattr(library, function)(*arguments, status)
        code = library.TF_GetCode(status)
        message = library.TF_Message(status).decode(errors="replace")
    finally:
        library.TF_DeleteStatus(status)
    if code != tf.errors.OK:
        kind = tf.compat.v1.errors.exception_type_from_error_code(code)
        raise kind(None, None, message)


def _new_status(code: int, message: str) -> ctypes.c_void_p:
    status = ctypes.c_void_p(_library().TF_NewStatus())
    _library().TF_SetStatus(status, ctypes.c_int(code), message.encode())
    return status


def _milliseconds(seconds: float | None) -> ctypes.c_int64:
    # To TensorFlow, 0 means no limit.
    return ctypes.c_int64(0 if seconds is None else max(1, int(1000 * seconds)))


def _context() -> ctypes.c_void_p:
    return _pointer(coordination.eager_context_capsule())


def _pointer(capsule: Any) -> ctypes.c_void_p:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(pointer(capsule, None))


class _Buffer(ctypes.Structure):
    """What TensorFlow's `TF_Buffer` is (tensorflow/c/tf_buffer.h)."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("data_deallocator", ctypes.c_void_p),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the library with TensorFlow's C API, which the process has loaded."""
    name = "libtensorflow_cc." + ("2.dylib" if sys.platform == "darwin" else "so.2")
    library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), name))
    library.TF_NewStatus.restype = ctypes.c_void_p
    library.TF_Message.restype = ctypes.c_char_p
    library.TF_NewBuffer.restype = ctypes.c_void_p
    library.TF_GetBuffer.restype = _Buffer
    return library
