"""MicroAdam: a residual in few bits, and moments of the last sparse gradients."""

import keras
import tensorflow as tf

from tf_dgc.collectives.requests import Result, to_dense_tensor
from tf_dgc.compressors import Sparsifier, StateSpec, TopK
from tf_dgc.optimizers.state import is_small

_LEVELS = 15  # steps from the least to the largest of a bucket: 4 bits


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class MicroTopK(Sparsifier):
    """Sends the largest entries, and keeps the others in 4 bits.

    Modoranu et al., "MicroAdam: accurate adaptive optimization with low space overhead
    and provable convergence", NeurIPS 2024, algorithm 1: what is kept back is rounded
    to 16 levels between the least and the largest of a bucket. Here each worker does
    so, of its own gradient. (The rounded numbers are kept as they are: this is about
    what they do, not about memory.)

    Args:
        sparsity: share of entries not sent, as of `TopK`.
        bucket: number of entries with levels of their own.
    """

    name = "micro_top_k"
    reference = "Modoranu et al., MicroAdam, NeurIPS 2024"
    error_feedback = "forbidden"

    def __init__(self, sparsity=0.99, bucket=64):
        self.choice = TopK(sparsity)
        self.bucket = bucket

    def state(self, shape):
        """Return what this worker keeps back, rounded."""
        return {"error": StateSpec(shape)}

    def bytes(self, shape, dtype):
        """Return those of `TopK`."""
        return self.choice.bytes(shape, dtype)

    def aggregate(self, values, state, draw):
        """Send of what there is the largest, and round the rest."""
        there = values + state["error"]
        moved = yield from self.choice.aggregate(there, {}, draw)
        sent = tf.reshape(to_dense_tensor(moved.sent), values.shape)
        states = {"error": in_levels(there - sent, self.bucket)}
        total = tf.reshape(to_dense_tensor(moved.sum), values.shape)
        return Result(total, sent, states, moved.entries)

    def get_config(self):
        """Return the constructor's arguments."""
        sparsity = self.choice.get_config()["sparsity"]
        return {"sparsity": sparsity, "bucket": self.bucket}


def in_levels(values, bucket):
    """Return values rounded to the nearest of 16 levels of their bucket.

    Args:
        values: tensor of any shape; the last bucket may be shorter.
        bucket: number of entries of a bucket.
    """
    flat = tf.reshape(values, [-1])
    rest = -flat.shape[0] % bucket
    # What fills up the last one is no entry of it: it is one that is there.
    filled = tf.concat([flat, tf.repeat(flat[-1:], rest)], axis=0)
    rows = tf.reshape(filled, [-1, bucket])
    least = tf.reduce_min(rows, axis=1, keepdims=True)
    step = (tf.reduce_max(rows, axis=1, keepdims=True) - least) / _LEVELS
    levels = tf.floor(tf.math.divide_no_nan(rows - least, step) + 0.5)
    rounded = tf.reshape(least + levels * step, [-1])
    return tf.reshape(rounded[: flat.shape[0]], values.shape)


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class WindowAdam(keras.optimizers.AdamW):
    """AdamW with moments of the last few gradients only.

    The paper's `AdamStats`: sums of what is in the window, and of its squares, each
    with the share that its age leaves it, corrected for bias as Adam's are. Of what is
    sent whole, a sum of ten squares would be far below a mean of thousands: such
    tensors are stock AdamW's.

    Args:
        window: number of gradients that are remembered.
        min_compress_size: that of the optimizer around it, by which tensors are sent
            whole.
        **settings: arguments of `AdamW`.
    """

    def __init__(self, window=10, min_compress_size=1024, **settings):
        super().__init__(**settings)
        self.window = int(window)
        self.min_compress_size = int(min_compress_size)

    def build(self, variables):
        """Create the windows; None for what is sent whole."""
        if self.built:
            return
        super().build(variables)
        self._windows = [
            None
            if is_small(v, self.min_compress_size)
            else self.add_variable(
                (self.window, *v.shape), dtype=v.dtype, name=f"{v.name}_window"
            )
            for v in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        """Update a variable."""
        window = self._windows[self._get_variable_index(variable)]
        if window is None:
            super().update_step(gradient, variable, learning_rate)
        else:
            self._update_by(window, gradient, variable, learning_rate)

    def _update_by(self, window, gradient, variable, learning_rate):
        ops, dtype = keras.ops, variable.dtype
        step = tf.cast(self.iterations.value, tf.int32)
        gradient = ops.cast(gradient, dtype)[tf.newaxis]
        at = [[step % self.window]]
        new = tf.tensor_scatter_nd_update(window.value, at, gradient)
        self.assign(window, new)
        ages = tf.cast((step - tf.range(self.window)) % self.window, dtype)
        number = tf.cast(step + 1, dtype)

        def moment(beta, values):
            beta = tf.constant(beta, dtype)
            total = tf.tensordot(beta**ages, values, 1)
            return (1 - beta) * total / (1 - beta**number)

        m, v = moment(self.beta_1, new), moment(self.beta_2, tf.square(new))
        rate = ops.cast(learning_rate, dtype)
        self.assign_sub(variable, rate * m / (tf.sqrt(v) + self.epsilon))

    def get_config(self):
        """Return the constructor's arguments."""
        own = {"window": self.window, "min_compress_size": self.min_compress_size}
        return {**super().get_config(), **own}
