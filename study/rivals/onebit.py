"""1-bit Adam, with dense steps of several kinds: a method, and a rule behind it."""

import keras
import tensorflow as tf

from tf_dgc.codecs import value_types
from tf_dgc.collectives.requests import AllGather, AllReduce, Result
from tf_dgc.compressors import Quantizer, StateSpec
from tf_dgc.compressors.common.one_round import only_if, sum_decoded


def first_steps(number):
    """Return the dense steps of 1-bit Adam: the first ones."""
    return list(range(number))


def growing_intervals(steps, kappa=16):
    """Return dense steps whose intervals double after every `kappa` of them.

    In these steps 0/1 Adam's second moment follows (Lu et al., "Maximizing
    communication efficiency for large-scale training via 0/1 Adam", ICLR 2023, section
    6, which takes 16); `zero_one.ZeroOneAdam` takes its local steps, too.
    """
    found, at = [], 0
    while at < steps:
        found.append(at)
        at += 2 ** ((len(found) - 1) // kappa)
    return found


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class OneBitMomentum(Quantizer):
    """Sends the momentum that Adam would have, in 1 bit per entry, but in some steps.

    Tang et al., "1-bit Adam", ICML 2021, algorithm 1: every worker lets its gradient
    enter the momentum of all, and sends the signs of that, and of what it kept back,
    with their mean magnitude. What the momentum of all becomes by that is returned as
    the gradient that leads to it, so that the rule behind (`FrozenAdam`) is Adam's. In
    dense steps the gradient itself is summed, and what was kept back stays.

    An entry that was zero in all dense steps so far has no second moment to be divided
    by. As by DeepSpeed's momentum mask, it has no momentum then and sends nothing, and
    nothing of it is kept back; its sign still travels.

    Magnitudes are of each tensor, and the sum is not rounded once more on its way back,
    as the paper's is by its server: that favours it.

    Args:
        dense_steps: numbers of the steps in which gradients are sent, ascending.
        beta_1: share of the momentum before.
        whole: whether it is sent as it is, without rounding: the method's control.
    """

    name = "one_bit_momentum"
    reference = "Tang et al., 1-bit Adam, ICML 2021"
    error_feedback = "required"
    reads_residual = True

    def __init__(self, dense_steps, beta_1=0.9, whole=False):
        self.dense_steps, self.beta_1, self.whole = list(dense_steps), beta_1, whole

    def state(self, shape):
        """Return the momentum, and where dense sums were not zero; all know both."""
        return {
            name: StateSpec(shape, per_worker=False) for name in ("momentum", "seen")
        }

    def bytes(self, shape, dtype):
        """Return None: it depends on the step."""
        del shape, dtype

    def aggregate(self, values, state, draw):
        """Send the gradient, or what the momentum is to become."""
        flat, kept, momentum, seen = (
            tf.reshape(v, [-1])
            for v in (values, state["residual"], state["momentum"], state["seen"])
        )
        size, rest = flat.shape[0], 1 - self.beta_1
        dense = is_dense(self.dense_steps, draw.step)
        whole = tf.logical_or(dense, self.whole)
        counts = tf.logical_or(dense, seen > 0)
        share = self.beta_1 * momentum / draw.num_workers
        words = value_types.encode_values(
            tf.where(counts, share + rest * flat, 0.0), "sign"
        )
        gradient = tf.where(dense, flat - kept, flat)
        summed = yield AllReduce(gradient[: tf.where(whole, size, 0)])
        gathered = yield AllGather(only_if(tf.logical_not(whole), words))

        def by_sum():
            total = tf.ensure_shape(summed, [size])
            return total, self.beta_1 * momentum + rest * total

        def by_signs():
            new = sum_decoded(
                gathered, lambda row: decode_signs(row, flat), [size], flat.dtype
            )
            return (new - self.beta_1 * momentum) / rest, new

        total, new = (
            tf.where(counts, v, 0.0) for v in tf.cond(whole, by_sum, by_signs)
        )
        sent = tf.where(whole, gradient, (decode_signs(words, flat) - share) / rest)
        follows = tf.logical_and(dense, tf.not_equal(total, 0))
        found = {
            "momentum": new,
            "seen": tf.maximum(seen, tf.cast(follows, seen.dtype)),
        }
        states = {name: tf.reshape(v, values.shape) for name, v in found.items()}
        return Result(total, tf.where(counts, sent, flat), states)

    def get_config(self):
        """Return the constructor's arguments."""
        return {
            "dense_steps": self.dense_steps,
            "beta_1": self.beta_1,
            "whole": self.whole,
        }


def decode_signs(words, like):
    """Return what the words of signs stand for, `[n]` and of the type of `like`."""
    row = tf.reshape(words, [1, -1])
    return value_types.decode_values(row, "sign", like.shape[0], like.dtype)[0]


def is_dense(dense_steps, step):
    """Return whether a step is one of them, a scalar bool."""
    step = tf.cast(step, tf.int64)
    return tf.reduce_any(tf.equal(tf.constant(dense_steps, tf.int64), step))


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class FrozenAdam(keras.optimizers.AdamW):
    """AdamW whose second moment follows the gradient in some steps only.

    Its bias is corrected by the number of those. Entries of which it is zero do not
    move: momentum that came later would be divided by epsilon alone.

    Args:
        dense_steps: numbers of these steps, ascending.
        **settings: arguments of `AdamW`.
    """

    def __init__(self, dense_steps, **settings):
        super().__init__(**settings)
        self.dense_steps = list(dense_steps)

    def update_step(self, gradient, variable, learning_rate):
        """Update a variable."""
        ops, index = keras.ops, self._get_variable_index(variable)
        dtype = variable.dtype
        gradient = ops.cast(gradient, dtype)
        m, v = self._momentums[index], self._velocities[index]
        step = tf.cast(self.iterations.value, tf.int64)
        follows = tf.cast(is_dense(self.dense_steps, step), dtype)
        followed = tf.reduce_sum(
            tf.cast(tf.constant(self.dense_steps, tf.int64) <= step, dtype)
        )
        known = 1 - tf.constant(self.beta_2, dtype) ** followed
        begun = 1 - tf.constant(self.beta_1, dtype) ** tf.cast(step + 1, dtype)
        rate = ops.cast(learning_rate, dtype) * ops.sqrt(known) / begun
        self.assign_add(m, (gradient - m) * (1 - self.beta_1))
        square = ops.square(gradient) - v
        self.assign_add(v, square * ((1 - self.beta_2) * follows))
        moved = ops.where(v > 0, m * rate / (ops.sqrt(v) + self.epsilon), 0.0)
        self.assign_sub(variable, moved)

    def get_config(self):
        """Return the constructor's arguments."""
        return {**super().get_config(), "dense_steps": self.dense_steps}
