"""Checks of received buffers and sums, with errors that name worker and cause."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import clipping
from tf_dgc._internals import tracing
from tf_dgc.conditions import ASSERTION

_MAX_LISTED = 5  # tensors; more are counted
_DAMAGED = (
    "The buffer was damaged on its way or built wrongly; restart from a checkpoint."
)


class BufferCheck(NamedTuple):
    """A number of every worker that must be as expected, modulo 2**32."""

    what: str  # name of the number, for the error
    received: tf.Tensor  # int32 `[N]`
    expected: int | tf.Tensor
    advice: str = _DAMAGED


def require(checks: Sequence[BufferCheck], results: Any) -> Any:
    """Return `results`; reading them raises unless all checks hold.

    The error names the first check that fails, and the first worker for which it does.
    Checks nothing within XLA, which drops assertions.
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
    assertion = tf.raw_ops.Assert(
        condition=tf.logical_not(tf.reduce_any(wrong)), data=[ASSERTION, message]
    )
    with tf.control_dependencies([assertion]):
        return tf.nest.map_structure(
            lambda x: None if x is None else tf.identity(x), results
        )


def all_hold(checks: Sequence[BufferCheck]) -> tf.Tensor:
    """Return whether all checks hold, a scalar bool."""
    return tf.reduce_all(hold_per_worker(checks))


def hold_per_worker(checks: Sequence[BufferCheck]) -> tf.Tensor:
    """Return whether all checks hold for each worker, bool `[N]`."""
    return tf.logical_not(tf.reduce_any(_compare(checks)[2], axis=0))


def require_finite_sums(
    sums: Sequence[tf.Tensor],
    narrow: Sequence[tf.DType | None],
    labels: Sequence[str],
    results: Any,
) -> Any:
    """Return `results`; reading them raises if a sum overflows, also once it is narrow.

    Checks nothing within XLA, which drops assertions.
    """
    if tracing.in_xla_context():
        return results
    sums = [
        s if dtype is None else tf.cast(s, dtype)
        for s, dtype in zip(sums, narrow, strict=True)
    ]
    finite = tf.cond(
        clipping.all_finite(sums),
        lambda: tf.fill([len(sums)], True),
        lambda: tf.stack([tf.reduce_all(tf.math.is_finite(s)) for s in sums]),
    )
    return require_finite(finite, {s.dtype.name for s in sums}, labels, results)


def require_finite(
    finite: tf.Tensor, dtypes: Collection[str], labels: Sequence[str], results: Any
) -> Any:
    """Return `results`; reading them raises unless all of `finite` is true."""

    def fail() -> tf.Tensor:
        names = tf.boolean_mask(
            tf.constant(list(labels), tf.string), tf.logical_not(finite)
        )
        message = tf.strings.join(
            [
                "The sum over workers of what was sent is not finite, or too large for "
                f"the variable's dtype ({', '.join(sorted(dtypes))}). Clip gradients "
                "(`clipnorm` of the inner optimizer), lower the learning rate, or use "
                "variables of a wider dtype. Received: such sums of ",
                tf.strings.as_string(tf.size(names)),
                f" of {len(labels)} tensors: ",
                tf.strings.reduce_join(names[:_MAX_LISTED], separator=", "),
            ]
        )
        assertion = tf.raw_ops.Assert(condition=False, data=[ASSERTION, message])
        with tf.control_dependencies([] if assertion is None else [assertion]):
            return tf.constant(False)

    checked = tf.cond(tf.reduce_all(finite), lambda: tf.constant(True), fail)
    with tf.control_dependencies([checked]):
        return tf.nest.map_structure(
            lambda x: tf.identity(x) if tf.is_tensor(x) else x, results
        )


def _compare(checks: Sequence[BufferCheck]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return received, `[checks, N]`, and expected numbers, and where they differ."""
    received = tf.bitcast(tf.stack([c.received for c in checks]), tf.uint32)
    numbers = [
        c.expected if isinstance(c.expected, int) else tf.cast(c.expected, tf.int64)
        for c in checks
    ]
    expected = tf.cast(tf.convert_to_tensor(numbers, tf.int64), tf.uint32)
    return received, expected, tf.not_equal(received, expected[:, tf.newaxis])
