"""1-bit Adam: a compression method, and the update rule that follows it."""

import keras
import tensorflow as tf

from tf_dgc.codecs import value_types
from tf_dgc.collectives.requests import AllGather, AllReduce, Result
from tf_dgc.compressors import Quantizer, StateSpec
from tf_dgc.compressors.common.one_round import only_if, sum_decoded


def first_steps(number):
    """Return the dense steps of 1-bit Adam: the first `number` steps."""
    return list(range(number))


def growing_intervals(steps, kappa=16):
    """Return dense steps whose intervals double after every `kappa` of them.

    In these steps 0/1 Adam updates its second moment (Lu et al., "Maximizing
    communication efficiency for large-scale training via 0/1 Adam", ICLR 2023, section
    6, with kappa = 16). `zero_one_adam.ZeroOneAdam` has its local steps in addition.
    """
    dense_steps, step = [], 0
    while step < steps:
        dense_steps.append(step)
        step += 2 ** ((len(dense_steps) - 1) // kappa)
    return dense_steps


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class OneBitMomentum(Quantizer):
    """Sends Adam's momentum in 1 bit per entry, except in dense steps.

    Tang et al., "1-bit Adam", ICML 2021, algorithm 1: every worker updates the shared
    momentum with its own gradient, adds its residual, and sends the signs and the mean
    magnitude. The method returns the gradient that leads to the new shared momentum, so
    that the update rule after it (`FrozenAdam`) is Adam's. Dense steps sum the
    gradients themselves and leave the residual unchanged.

    An entry that was zero in all dense steps so far has no second moment to divide by.
    As with DeepSpeed's momentum mask, its momentum and its residual are zero; its sign
    is still sent.

    Each tensor has one magnitude. Unlike the paper's server, this does not round the
    sum again, which favours the method.

    Args:
        dense_steps: numbers of the steps that send gradients, ascending.
        beta_1: decay of the momentum.
        whole: whether the momentum is sent without rounding, as the method's control.
    """

    name = "one_bit_momentum"
    reference = "Tang et al., 1-bit Adam, ICML 2021"
    error_feedback = "required"
    reads_residual = True

    def __init__(self, dense_steps, beta_1=0.9, whole=False):
        self.dense_steps, self.beta_1, self.whole = list(dense_steps), beta_1, whole

    def state(self, shape):
        """Return the shared momentum, and a mask of entries with a second moment."""
        return {
            name: StateSpec(shape, per_worker=False) for name in ("momentum", "seen")
        }

    def bytes(self, shape, dtype):
        """Return None: it depends on the step."""
        del shape, dtype

    def aggregate(self, values, state, draw):
        """Send the gradient, or the signs of the updated momentum."""
        flat = tf.reshape(values, [-1])
        residual = tf.reshape(state["residual"], [-1])
        momentum = tf.reshape(state["momentum"], [-1])
        seen = tf.reshape(state["seen"], [-1])
        size, alpha = flat.shape[0], 1 - self.beta_1
        dense = is_dense(self.dense_steps, draw.step)
        whole = tf.logical_or(dense, self.whole)
        mask = tf.logical_or(dense, seen > 0)
        worker_momentum = self.beta_1 * momentum / draw.num_workers
        words = value_types.encode_values(
            tf.where(mask, worker_momentum + alpha * flat, 0.0), "sign"
        )
        gradient = tf.where(dense, flat - residual, flat)
        summed = yield AllReduce(gradient[: tf.where(whole, size, 0)])
        gathered = yield AllGather(only_if(tf.logical_not(whole), words))

        def from_sum():
            total = tf.ensure_shape(summed, [size])
            return total, self.beta_1 * momentum + alpha * total

        def from_signs():
            new_momentum = sum_decoded(
                gathered, lambda row: decode_signs(row, flat), [size], flat.dtype
            )
            return (new_momentum - self.beta_1 * momentum) / alpha, new_momentum

        total, new_momentum = (
            tf.where(mask, v, 0.0) for v in tf.cond(whole, from_sum, from_signs)
        )
        decoded = decode_signs(words, flat)
        sent = tf.where(whole, gradient, (decoded - worker_momentum) / alpha)
        nonzero = tf.logical_and(dense, tf.not_equal(total, 0))
        seen = tf.maximum(seen, tf.cast(nonzero, seen.dtype))
        states = {
            "momentum": tf.reshape(new_momentum, values.shape),
            "seen": tf.reshape(seen, values.shape),
        }
        return Result(total, tf.where(mask, sent, flat), states)

    def get_config(self):
        """Return the constructor's arguments."""
        return {
            "dense_steps": self.dense_steps,
            "beta_1": self.beta_1,
            "whole": self.whole,
        }


def decode_signs(words, like):
    """Decode words of signs to values `[n]` of the dtype of `like`."""
    row = tf.reshape(words, [1, -1])
    return value_types.decode_values(row, "sign", like.shape[0], like.dtype)[0]


def is_dense(dense_steps, step):
    """Return whether a step is a dense one, a scalar bool tensor."""
    step = tf.cast(step, tf.int64)
    return tf.reduce_any(tf.equal(tf.constant(dense_steps, tf.int64), step))


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class FrozenAdam(keras.optimizers.AdamW):
    """AdamW that updates its second moment in dense steps only.

    The number of dense steps corrects its bias. Entries whose second moment is zero do
    not move, as their momentum would be divided by epsilon alone.

    Args:
        dense_steps: numbers of the dense steps, ascending.
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
        dense = tf.cast(is_dense(self.dense_steps, step), dtype)
        num_dense = tf.reduce_sum(
            tf.cast(tf.constant(self.dense_steps, tf.int64) <= step, dtype)
        )
        m_bias = 1 - tf.constant(self.beta_1, dtype) ** tf.cast(step + 1, dtype)
        v_bias = 1 - tf.constant(self.beta_2, dtype) ** num_dense
        rate = ops.cast(learning_rate, dtype) * ops.sqrt(v_bias) / m_bias
        self.assign_add(m, (gradient - m) * (1 - self.beta_1))
        change = ops.square(gradient) - v
        self.assign_add(v, change * ((1 - self.beta_2) * dense))
        update = ops.where(v > 0, m * rate / (ops.sqrt(v) + self.epsilon), 0.0)
        self.assign_sub(variable, update)

    def get_config(self):
        """Return the constructor's arguments."""
        return {**super().get_config(), "dense_steps": self.dense_steps}
