"""MicroAdam: a residual in 4 bits, and moments of the last sparse gradients."""

import keras
import tensorflow as tf

from tf_dgc.collectives.requests import Result, to_dense_tensor
from tf_dgc.compressors import Sparsifier, StateSpec, TopK
from tf_dgc.optimizers.state import is_small

_STEPS = 15  # between the smallest and the largest value of a bucket: 4 bits


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class MicroTopK(Sparsifier):
    """Sends the largest entries, and rounds the residual to 4 bits.

    Modoranu et al., "MicroAdam: accurate adaptive optimization with low space overhead
    and provable convergence", NeurIPS 2024, algorithm 1: the residual is rounded to 16
    levels between the smallest and the largest value of a bucket. Here each worker does
    so with its own gradient, and stores the rounded values as floats: the subject is
    accuracy, not memory.

    Args:
        sparsity: share of entries not sent, as in `TopK`.
        bucket: number of entries that share 16 levels.
    """

    name = "micro_top_k"
    reference = "Modoranu et al., MicroAdam, NeurIPS 2024"
    error_feedback = "forbidden"

    def __init__(self, sparsity=0.99, bucket=64):
        self.top_k = TopK(sparsity)
        self.bucket = bucket

    def state(self, shape):
        """Return this worker's rounded residual."""
        return {"error": StateSpec(shape)}

    def bytes(self, shape, dtype):
        """Return the bytes of `TopK`."""
        return self.top_k.bytes(shape, dtype)

    def aggregate(self, values, state, draw):
        """Send the largest entries of gradient and residual, and round the rest."""
        accumulated = values + state["error"]
        result = yield from self.top_k.aggregate(accumulated, {}, draw)
        sent = tf.reshape(to_dense_tensor(result.sent), values.shape)
        states = {"error": round_to_levels(accumulated - sent, self.bucket)}
        total = tf.reshape(to_dense_tensor(result.sum), values.shape)
        return Result(total, sent, states, result.entries)

    def get_config(self):
        """Return the constructor's arguments."""
        sparsity = self.top_k.get_config()["sparsity"]
        return {"sparsity": sparsity, "bucket": self.bucket}


def round_to_levels(values, bucket):
    """Round values to the nearest of 16 levels of their bucket.

    Args:
        values: tensor of any shape; the last bucket may be shorter.
        bucket: number of entries of a bucket.
    """
    flat = tf.reshape(values, [-1])
    padding = -flat.shape[0] % bucket
    # Padding with the last value does not change the range of its bucket.
    padded = tf.concat([flat, tf.repeat(flat[-1:], padding)], axis=0)
    rows = tf.reshape(padded, [-1, bucket])
    smallest = tf.reduce_min(rows, axis=1, keepdims=True)
    step = (tf.reduce_max(rows, axis=1, keepdims=True) - smallest) / _STEPS
    levels = tf.floor(tf.math.divide_no_nan(rows - smallest, step) + 0.5)
    rounded = tf.reshape(smallest + levels * step, [-1])
    return tf.reshape(rounded[: flat.shape[0]], values.shape)


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class WindowAdam(keras.optimizers.AdamW):
    """AdamW with moments of the last few gradients only.

    The paper's `AdamStats`: sums over the gradients of a window and over their squares,
    each weighted by its age, with Adam's bias correction. Uncompressed tensors use
    stock AdamW, since a sum of ten squares would be far below the usual mean of
    thousands.

    Args:
        window: number of gradients in the window.
        min_compress_size: the wrapper's `min_compress_size`, which decides which
            tensors are uncompressed.
        **settings: arguments of `AdamW`.
    """

    def __init__(self, window=10, min_compress_size=1024, **settings):
        super().__init__(**settings)
        self.window = int(window)
        self.min_compress_size = int(min_compress_size)

    def build(self, variables):
        """Create the windows; None for uncompressed variables."""
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
            self._update_by_window(window, gradient, variable, learning_rate)

    def _update_by_window(self, window, gradient, variable, learning_rate):
        ops, dtype = keras.ops, variable.dtype
        step = tf.cast(self.iterations.value, tf.int32)
        gradient = ops.cast(gradient, dtype)[tf.newaxis]
        index = [[step % self.window]]
        gradients = tf.tensor_scatter_nd_update(window.value, index, gradient)
        self.assign(window, gradients)
        ages = tf.cast((step - tf.range(self.window)) % self.window, dtype)
        num_steps = tf.cast(step + 1, dtype)

        def moment(beta, values):
            beta = tf.constant(beta, dtype)
            total = tf.tensordot(beta**ages, values, 1)
            return (1 - beta) * total / (1 - beta**num_steps)

        m = moment(self.beta_1, gradients)
        v = moment(self.beta_2, tf.square(gradients))
        rate = ops.cast(learning_rate, dtype)
        self.assign_sub(variable, rate * m / (tf.sqrt(v) + self.epsilon))

    def get_config(self):
        """Return the constructor's arguments."""
        return {
            **super().get_config(),
            "window": self.window,
            "min_compress_size": self.min_compress_size,
        }
