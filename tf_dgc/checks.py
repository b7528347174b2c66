"""Refuse buffers that are not what they should be, and say which and why."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _internals

_DAMAGED = (
    "The buffer was damaged on its way or built wrongly; restart from a checkpoint."
)


class Check(NamedTuple):
    """Two numbers per worker that must be equal.

    Attributes:
        what: they are, for the error.
        received: int32 or uint32 `[N]`.
        expected: the same type, `[N]` or scalar, or an int.
        advice: what to do if they differ.
    """

    what: str
    received: tf.Tensor
    expected: tf.Tensor | int
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
    received = tf.stack([tf.bitcast(c.received, tf.uint32) for c in checks])
    expected = tf.stack(
        [tf.broadcast_to(_unsigned(c.expected), received.shape[1:]) for c in checks]
    )
    wrong = tf.not_equal(received, expected)
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
            tf.strings.as_string(expected[check, worker]),
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


def _unsigned(number: tf.Tensor | int) -> tf.Tensor:
    if isinstance(number, int):
        return tf.constant(number, tf.uint32)
    return tf.bitcast(number, tf.uint32)
