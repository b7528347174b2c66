"""Refuse buffers that are not what they should be, and say which and why."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _internals

_DAMAGED = (
    "The buffer was damaged on its way or built wrongly; restart from a checkpoint."
)


class Check(NamedTuple):
    """A number of every worker that must be as expected, modulo 2**32.

    Attributes:
        what: the number is, for the error.
        received: int32 `[N]`.
        expected: an int, or a scalar integer tensor.
        advice: what to do if they differ.
    """

    what: str
    received: tf.Tensor
    expected: int | tf.Tensor
    advice: str = _DAMAGED


def gate(checks: Sequence[Check], results: Any) -> Any:
    """Return `results`, to be had only if all checks hold.

    XLA drops assertions, so within it nothing is checked.

    Args:
        checks: of all buffers.
        results: nested structure of tensors and Nones.

    Raises:
        tf.errors.InvalidArgumentError: when run; of all that fails, the first check
            and for it the first worker are named.
    """
    if _internals.in_xla_context():
        return results
    received = tf.bitcast(tf.stack([c.received for c in checks]), tf.uint32)
    expected = tf.convert_to_tensor([_int64(c.expected) for c in checks], tf.int64)
    expected = tf.cast(expected, tf.uint32)
    wrong = tf.not_equal(received, expected[:, tf.newaxis])
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


def _int64(number: int | tf.Tensor) -> int | tf.Tensor:
    return number if isinstance(number, int) else tf.cast(number, tf.int64)
