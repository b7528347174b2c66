"""What an optimizer that steps alone remembers, and how a worker begins it anew."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_dgc.distribute.copies import Copies
from tf_dgc.transforms import clipping


class InnerState:
    """Slots of the inner optimizer: momentum, second moments, waiting gradients.

    Iterations and the learning rate are not among them.

    Args:
        optimizer: inner optimizer, built, before its first step. Its slots begin with
            one number each, as those of Keras do.
        strategy: strategy under which it was built.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy
    ):
        scalars = optimizer.iterations, optimizer.learning_rate
        apart = {id(v) for v in scalars}
        self._variables = [
            v
            for v in optimizer.variables
            if id(v) not in apart and tf.as_dtype(v.dtype).is_floating
        ]
        self._first = [_first_entry(strategy, v) for v in self._variables]

    def begin_anew_unless_finite(
        self, moved: Sequence[tf.Tensor], natively: bool
    ) -> tf.Tensor:
        """Let this replica forget its state if that, or its weights, hold NaN or Inf.

        Call it in replica context, on the replica's own copies.

        Args:
            moved: distance of its weights from where they were, of each tensor.
            natively: whether all workers have the native operations.

        Returns:
            Whether it did, scalar bool.
        """
        kept = [tf.convert_to_tensor(v.value) for v in self._variables]

        def begin_anew() -> tf.Tensor:
            for variable, first in zip(self._variables, self._first, strict=True):
                variable.assign(tf.fill(variable.shape, tf.cast(first, variable.dtype)))
            return tf.constant(True)

        finite = clipping.all_finite([*moved, *kept], natively)
        return tf.cond(finite, lambda: tf.constant(False), begin_anew)


def _first_entry(strategy: tf.distribute.Strategy, variable: keras.Variable) -> float:
    with tf.init_scope():  # the first call may come while a step is being traced
        copy = Copies(strategy, variable.value).local[0]
        some = tf.reshape(copy, [-1])[:1].numpy()
    return float(some[0]) if some.size else 0.0
