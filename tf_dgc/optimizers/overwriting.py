"""Overwrite: variables that take what comes as their gradient as their new value.

Keras marks them by `overwrite_with_gradient`: scales and histories of float8 layers.
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tf_dgc._internals import keras_optimizers
from tf_dgc.collectives.packs import num_bytes
from tf_dgc.collectives.requests import Gather
from tf_dgc.compressors.common.one_round import from_words, to_words
from tf_dgc.distribute.communicator import Communicator

# How values of several workers, `[N, n]`, become one, by the variable's aggregation.
# Without one it is the largest, as in Keras over steps whose gradients accumulate.
_AGREE: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "none": lambda rows: tf.reduce_max(rows, axis=0),
    "mean": lambda rows: tf.reduce_mean(rows, axis=0),
    "sum": lambda rows: tf.reduce_sum(rows, axis=0),
    "only_first_replica": lambda rows: rows[0],
}


def split(
    gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
) -> tuple[list[tuple], list[tuple]]:
    """Return pairs to train with, and pairs to overwrite."""
    trained: list[tuple] = []
    overwritten: list[tuple] = []
    for pair in zip(gradients, variables, strict=True):
        special = keras_optimizers.overwrites_with_gradient(pair[1])
        (overwritten if special else trained).append(pair)
    return trained, overwritten


def overwrite(communicator: Communicator, pairs: Sequence[tuple]) -> int:
    """Assign what all workers agree on, in one collective; call it in replica context.

    An entry that is not finite on a worker counts there as the value that was.

    Args:
        communicator: communicator of the optimizer.
        pairs: new values and variables, each of the variable's shape.

    Returns:
        Bytes handed to the collective.
    """
    if not pairs:
        return 0
    wide = tf.float64 if any(v.dtype == "float64" for _, v in pairs) else tf.float32
    new, old = (
        tf.concat([tf.cast(tf.reshape(x, [-1]), wide) for x in column], axis=0)
        for column in ([g for g, _ in pairs], [v.value for _, v in pairs])
    )
    words = to_words(tf.where(tf.math.is_finite(new), new, old))
    gathered = communicator.answer(Gather(words))
    rows = from_words(
        tf.reshape(gathered, [-1]), wide, [communicator.num_workers, new.shape[0]]
    )
    sizes = [v.shape.num_elements() for _, v in pairs]
    for (_, v), part in zip(pairs, tf.split(rows, sizes, axis=1), strict=True):
        value = tf.cast(tf.reshape(_AGREE[v.aggregation](part), v.shape), v.dtype)
        tf.raw_ops.AssignVariableOp(resource=v.value.handle, value=value)
    return num_bytes(words)
