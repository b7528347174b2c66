"""1-bit LAMB: the update rule that scales each tensor's step."""

import keras
import tensorflow as tf

from rivals.one_bit_adam import FrozenAdam, is_dense

_SCALE_DECAY = 0.9  # decay of the moving average of scales
_SCALE_BOUNDS = 0.01, 10.0  # bounds of a scale in a dense step
_FACTOR_BOUNDS = 0.5, 4.0  # bounds of the factor of the average scale afterwards
_MAX_CHANGE = 0.1  # relative change of that factor per step


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class FrozenLamb(FrozenAdam):
    """LAMB in dense steps; afterwards its second moment and average scale are frozen.

    Li et al., "1-bit LAMB: communication efficient large-scale large-batch training
    with LAMB's convergence speed", 2021, algorithm 1. It follows `OneBitMomentum`,
    which returns the gradient that reproduces the shared momentum. A second, fresh
    moment of that gradient is updated in all steps. After the dense steps, a tensor's
    step is scaled by the average scale of the dense steps times the largest ratio of
    the frozen root to the fresh root, within bounds. Entries whose frozen second moment
    is zero are ignored.

    Weight decay is decoupled and biases are corrected, as in Keras's `Lamb`. The
    average begins with the first scale.

    Args:
        dense_steps: numbers of the dense steps, ascending.
        **settings: arguments of `AdamW`.
    """

    def build(self, variables):
        """Create the slots, and a scale and a factor per variable."""
        if self.built:
            return
        super().build(variables)
        self._fresh = self.add_optimizer_variables(variables, "fresh_velocity")
        self._scales, self._factors = (
            [
                self.add_variable((), initializer, v.dtype, name=f"{v.name}_{name}")
                for v in variables
            ]
            for name, initializer in (("scale", "zeros"), ("factor", "ones"))
        )

    def update_step(self, gradient, variable, learning_rate):
        """Update a variable."""
        ops, index = keras.ops, self._get_variable_index(variable)
        gradient = ops.cast(gradient, variable.dtype)
        m, v = self._momentums[index], self._velocities[index]
        fresh = self._fresh[index]
        dense = self._is_dense(variable.dtype)
        m_bias, v_bias, fresh_bias = self._bias_corrections(variable.dtype)
        square = ops.square(gradient)
        self.assign_add(m, (gradient - m) * (1 - self.beta_1))
        self.assign_add(v, (square - v) * ((1 - self.beta_2) * dense))
        self.assign_add(fresh, (square - fresh) * (1 - self.beta_2))
        root = ops.sqrt(v / v_bias) + self.epsilon
        update = ops.where(v > 0, m / m_bias / root, 0.0)
        ratio = root / (ops.sqrt(fresh / fresh_bias) + self.epsilon)
        ratio = ops.where(v > 0, ratio, 0.0)
        scale = self._scale(index, variable, update, ratio, dense > 0)
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * scale * update)

    def _is_dense(self, dtype):
        """Return 1 in a dense step, else 0."""
        return tf.cast(is_dense(self.dense_steps, self.iterations.value), dtype)

    def _bias_corrections(self, dtype):
        """Return those of the first moment, of the second one, and of the fresh one."""
        step = tf.cast(self.iterations.value, tf.int64)
        dense_steps = tf.constant(self.dense_steps, tf.int64)
        num_dense = tf.reduce_sum(tf.cast(dense_steps <= step, dtype))
        num_steps = tf.cast(step + 1, dtype)
        beta_1 = tf.constant(self.beta_1, dtype)
        beta_2 = tf.constant(self.beta_2, dtype)
        return 1 - beta_1**num_steps, 1 - beta_2**num_dense, 1 - beta_2**num_steps

    def _scale(self, index, variable, update, ratios, dense):
        """Return the factor of the update in addition to the learning rate."""
        ops = keras.ops
        average, factor = self._scales[index], self._factors[index]
        weight_norm = ops.norm(ops.reshape(variable, -1))
        update_norm = ops.norm(ops.reshape(update, -1))
        zero = ops.logical_or(ops.equal(weight_norm, 0), ops.equal(update_norm, 0))
        ratio = weight_norm / ops.where(zero, 1.0, update_norm)
        scale = ops.where(zero, 1.0, ops.clip(ratio, *_SCALE_BOUNDS))
        new_average = _SCALE_DECAY * average + (1 - _SCALE_DECAY) * scale
        new_average = ops.where(ops.equal(average, 0), scale, new_average)
        new_factor = ops.clip(ops.max(ratios), *_FACTOR_BOUNDS)
        low, high = factor * (1 - _MAX_CHANGE), factor * (1 + _MAX_CHANGE)
        new_factor = ops.minimum(ops.maximum(new_factor, low), high)
        self.assign(average, ops.where(dense, new_average, average))
        self.assign(factor, ops.where(dense, factor, new_factor))
        return ops.where(dense, scale, average * factor)
