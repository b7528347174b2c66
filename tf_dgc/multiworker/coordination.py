"""TensorFlow's coordination service, with time limits and without Python's lock.

TensorFlow's own Python wrappers (`context.Context`) hold Python's lock while they wait
for the coordinator, and most have no time limit: if it is stopped, nothing in this
process runs any more. The functions here call the same C API
(tensorflow/c/eager/c_api_experimental.h) without the lock, each in a thread that is
abandoned if there is no answer in time.
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
_GRACE_SECONDS = 2.0  # for the service to report a timeout itself


def enable_collectives(capsule: Any, server_def: bytes, seconds: float) -> None:
    """Start this worker's server and connect it; `capsule` holds the `TFE_Context`."""
    try:
        _call_within(
            seconds + _GRACE_SECONDS,
            "TFE_EnableCollectiveOps",
            server_def,
            ctypes.c_size_t(len(server_def)),
            context=_pointer(capsule),
        )
    except tf.errors.DeadlineExceededError:
        # The abandoned thread uses the context, which must never be freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(capsule))
        raise


def publish(key: str, value: str, seconds: float) -> None:
    """Set a key that every worker can read."""
    _call_within(seconds, "TFE_InsertConfigKeyValue", key.encode(), value.encode())


def publish_at_exit(key: str, value: str) -> None:
    """Set a key in this thread, without a time limit."""
    # While the interpreter ends, Python 3.12 starts no threads.
    _call("TFE_InsertConfigKeyValue", _context(), key.encode(), value.encode())


def unpublish(key: str, seconds: float) -> None:
    """Remove a key, so that it can be set again; raises as `publish`."""
    _call_within(seconds, "TFE_DeleteConfigKeyValue", key.encode())


def lookup(key: str, seconds: float | None) -> str:
    """Return the value of a key; wait until some worker publishes it, or raise."""
    # A timeout leaves the request with the service, some 20 kB on both sides, until the
    # key is published: do not call this in a loop.
    library, context = _library(), _context()

    def get() -> str:
        buffer = ctypes.c_void_p(library.TF_NewBuffer())
        try:
            _call(
                "TFE_GetConfigKeyValue",
                context,
                key.encode(),
                _milliseconds(seconds),
                buffer,
            )
            value = library.TF_GetBuffer(buffer)
            return ctypes.string_at(value.data, value.length).decode()
        finally:
            library.TF_DeleteBuffer(buffer)

    limit = None if seconds is None else seconds + _GRACE_SECONDS
    return _within(limit, get, "TFE_GetConfigKeyValue")


def wait_at_barrier(name: str, seconds: float) -> None:
    """Wait until every worker waits at this barrier."""
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
    """Call a function of the C API; raise the error of its status, or a timeout."""
    context = context or _context()
    _within(seconds, lambda: _call(function, context, *arguments), function)


def _within(seconds: float | None, task: Callable[[], T], function: str) -> T:
    """Return the result of a task, in a thread that is abandoned after a timeout."""
    answer: futures.Future[T] = futures.Future()

    def call() -> None:
        try:
            answer.set_result(task())
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
    # For TensorFlow, 0 means no limit.
    return ctypes.c_int64(0 if seconds is None else max(1, int(1000 * seconds)))


def _context() -> ctypes.c_void_p:
    return _pointer(coordination.eager_context_capsule())


def _pointer(capsule: Any) -> ctypes.c_void_p:
    read_name = ctypes.pythonapi.PyCapsule_GetName
    read_name.restype = ctypes.c_char_p  # None until TensorFlow 2.21
    read_name.argtypes = [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(pointer(capsule, read_name(capsule)))


class _Buffer(ctypes.Structure):
    """TensorFlow's `TF_Buffer` (tensorflow/c/tf_buffer.h)."""

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
