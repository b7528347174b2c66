"""Refuse buffers that are not what they should be, and say which and why."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import clipping
from tf_dgc._internals import tracing

_DAMAGED = (
    "The buffer was damaged on its way or built wrongly; restart from a checkpoint."
)


class BufferCheck(NamedTuple):
    """A number of every worker that must be as expected, modulo 2**32.

    Attributes:
        what: text that says which number it is, for the error.
        received: numbers of all workers, int32 `[N]`.
        expected: number that all must be, an int or a scalar integer tensor.
        advice: text of what to do if they differ.
    """

    what: str
    received: tf.Tensor
    expected: int | tf.Tensor
    advice: str = _DAMAGED


def require(checks: Sequence[BufferCheck], results: Any) -> Any:
    """Return `results`, to be had only if all checks hold.

    XLA drops assertions, so within it nothing is checked.

    Args:
        checks: checks of all buffers, the more telling ones first.
        results: nested structure of tensors and Nones.

    Raises:
        tf.errors.InvalidArgumentError: when run; of all that fails, the first check
            and for it the first worker are named.
    """
    if tracing.in_xla_context():
        return results
    received, expected, wrong = _compare(checks)
    first = tf.argmax(tf.reshape(wrong, [-1]))
    check, worker = first // received.shape[1], first % received.shape[1]
    message = tf.strings.join(
        [
            "The buffer of worker ",
            tf.strings.as_string(worker),
            " is refused: ",
            tf.constant([c.what for c in checks])[check],
            ". Received: ",
            tf.strings.as_string(received[check, worker]),
            ", expected: ",
            tf.strings.as_string(expected[check]),
            ". ",
            tf.constant([c.advice for c in checks])[check],
        ]
    )
    verdict = tf.raw_ops.Assert(
        condition=tf.logical_not(tf.reduce_any(wrong)), data=[message]
    )
    with tf.control_dependencies([verdict]):
        return tf.nest.map_structure(
            lambda x: None if x is None else tf.identity(x), results
        )


def all_hold(checks: Sequence[BufferCheck]) -> tf.Tensor:
    """Return whether all checks hold, a scalar bool."""
    return tf.reduce_all(hold_per_worker(checks))


def hold_per_worker(checks: Sequence[BufferCheck]) -> tf.Tensor:
    """Return whether all checks hold of each worker, bool `[N]`."""
    return tf.logical_not(tf.reduce_any(_compare(checks)[2], axis=0))


def _compare(checks: Sequence[BufferCheck]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return what was received, `[checks, N]`, what was expected, and what is wrong."""
    received = tf.bitcast(tf.stack([c.received for c in checks]), tf.uint32)
    expected = tf.convert_to_tensor([_int64(c.expected) for c in checks], tf.int64)
    expected = tf.cast(expected, tf.uint32)
    return received, expected, tf.not_equal(received, expected[:, tf.newaxis])


def require_finite_sums(
    sums: Sequence[tf.Tensor],
    narrow: Sequence[tf.DType | None],
    labels: Sequence[str],
    results: Any,
) -> Any:
    """Return `results`, to be had only if no sum overflowed.

    Args:
        sums: sums over workers, float, of any shape.
        narrow: dtype that each is going to be cast to; None if it stays as it is.
        labels: name of each, for the error.
        results: nested structure of tensors, and of what else there is.

    Raises:
        tf.errors.InvalidArgumentError: when run, on all workers alike. Not within XLA,
            which drops assertions.
    """
    if tracing.in_xla_context():
        return results
    held = [
        s if dtype is None else tf.cast(s, dtype)
        for s, dtype in zip(sums, narrow, strict=True)
    ]
    finite = tf.cond(
        clipping.all_finite(held),
        lambda: tf.fill([len(held)], True),
        lambda: tf.stack([tf.reduce_all(tf.math.is_finite(s)) for s in held]),
    )
    return require_finite(finite, {s.dtype.name for s in held}, labels, results)


def require_finite(
    finite: tf.Tensor, types: Collection[str], labels: Sequence[str], results: Any
) -> Any:
    """Return `results`, to be had only if all sums are finite; see `finite_sums`.

    Args:
        finite: whether each tensor's sum is, bool `[tensors]`.
        types: names of the sums' dtypes.
        labels: name of each, for the error.
        results: nested structure of tensors, and of what else there is.
    """
    named = ", ".join(sorted(types))
    verdict = tf.debugging.Assert(
        tf.reduce_all(finite),
        [
            "The sum over workers of what was sent is not finite, or too large for the "
            f"variable's dtype ({named}). Clip gradients (`clipnorm` of the inner "
            "optimizer), lower the learning rate, or use variables of a wider dtype. "
            "Received of the tensors, finite or not:",
            finite,
            tf.constant(list(labels)),
        ],
        summarize=len(labels),
    )
    with tf.control_dependencies([] if verdict is None else [verdict]):
        return tf.nest.map_structure(
            lambda x: tf.identity(x) if tf.is_tensor(x) else x, results
        )


def _int64(number: int | tf.Tensor) -> int | tf.Tensor:
    return number if isinstance(number, int) else tf.cast(number, tf.int64)
