"""1-bit LAMB: the rule behind 1-bit momentum that scales each tensor's step."""

import keras
import tensorflow as tf

from rivals.onebit import FrozenAdam

_AVERAGED = 0.9  # share of the mean of scales before
_SCALES = 0.01, 10.0  # bounds of those of the dense steps
_FACTORS = 0.5, 4.0  # bounds of what the mean is multiplied by afterwards
_CHANGE = 0.1  # of that factor, from one step to the next


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class FrozenLamb(FrozenAdam):
    """LAMB in the dense steps; afterwards its second moment and mean scale stand still.

    Li et al., "1-bit LAMB: communication efficient large-scale large-batch training
    with LAMB's convergence speed", 2021, algorithm 1. Behind `OneBitMomentum`, which
    returns the gradient that leads to the momentum of all. Of that gradient a second
    moment is followed to the end; the step of a tensor is the mean of the scales of the
    dense steps times the largest ratio of the root that stands still to that one,
    within bounds. Entries whose second moment stands still at zero have no part in it.

    Decay of weights is apart from the rule, and biases are corrected, as in Keras's
    `Lamb`. The mean begins with the first scale.

    Args:
        dense_steps: numbers of the dense steps, ascending.
        **settings: arguments of `AdamW`.
    """

    def build(self, variables):
        """Create the slots, and two numbers per variable."""
        if self.built:
            return
        super().build(variables)
        self._fresh = self.add_optimizer_variables(variables, "fresh_velocity")
        self._scales, self._factors = (
            [
                self.add_variable((), first, v.dtype, name=f"{v.name}_{name}")
                for v in variables
            ]
            for name, first in (("scale", "zeros"), ("factor", "ones"))
        )

    def update_step(self, gradient, variable, learning_rate):
        """Update a variable."""
        ops, index = keras.ops, self._get_variable_index(variable)
        gradient = ops.cast(gradient, variable.dtype)
        m, v = self._momentums[index], self._velocities[index]
        fresh = self._fresh[index]
        dense, known, followed, begun = self._when(variable.dtype)
        square = ops.square(gradient)
        self.assign_add(m, (gradient - m) * (1 - self.beta_1))
        self.assign_add(v, (square - v) * ((1 - self.beta_2) * dense))
        self.assign_add(fresh, (square - fresh) * (1 - self.beta_2))
        root = ops.sqrt(v / followed) + self.epsilon
        update = ops.where(v > 0, m / begun / root, 0.0)
        ratio = root / (ops.sqrt(fresh / known) + self.epsilon)
        ratio = ops.where(v > 0, ratio, 0.0)
        scale = self._scale(index, variable, update, ratio, dense > 0)
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * scale * update)

    def _when(self, dtype):
        """Return whether the step is dense, and the shares there are of the moments.

        Of the second one that goes on, of that which stands still, and of the first.
        """
        step = tf.cast(self.iterations.value, tf.int64)
        dense = tf.constant(self.dense_steps, tf.int64)

        def share(beta, number):
            return 1 - tf.constant(beta, dtype) ** tf.cast(number, dtype)

        number = tf.reduce_sum(tf.cast(dense <= step, dtype))
        is_dense = tf.cast(tf.reduce_any(tf.equal(dense, step)), dtype)
        begun = share(self.beta_1, step + 1)
        return is_dense, share(self.beta_2, step + 1), share(self.beta_2, number), begun

    def _scale(self, index, variable, update, ratios, dense):
        """Return what the update is multiplied by, beside the learning rate."""
        ops = keras.ops
        mean, factor = self._scales[index], self._factors[index]
        size, length = (ops.norm(ops.reshape(v, -1)) for v in (variable, update))
        one = ops.logical_or(ops.equal(size, 0), ops.equal(length, 0))
        divided = size / ops.where(one, 1.0, length)
        scale = ops.where(one, 1.0, ops.clip(divided, *_SCALES))
        averaged = _AVERAGED * mean + (1 - _AVERAGED) * scale
        averaged = ops.where(ops.equal(mean, 0), scale, averaged)
        wanted = ops.clip(ops.max(ratios), *_FACTORS)
        low, high = factor * (1 - _CHANGE), factor * (1 + _CHANGE)
        moved = ops.minimum(ops.maximum(wanted, low), high)
        self.assign(mean, ops.where(dense, averaged, mean))
        self.assign(factor, ops.where(dense, factor, moved))
        return ops.where(dense, scale, mean * factor)
