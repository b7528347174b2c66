"""AdamW that accounts for the delay of sparse entries."""

import keras


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class DelayAwareAdam(keras.optimizers.AdamW):
    """AdamW that treats an entry that arrives after T steps as T gradients.

    Such an entry is the sum of T gradients: its moments decay as in T steps with the
    mean gradient, and the weight moves T times as far. Entries that are zero do not
    arrive and are left alone. If all entries arrive in every step, this is AdamW.

    Args:
        independent: whether the T gradients are assumed to be independent noise, so
            that the square of one is 1/T of the square of the sum. Otherwise they are
            assumed to be equal, and it is 1/T**2.
        **settings: arguments of `AdamW`.
    """

    def __init__(self, independent=True, **settings):
        super().__init__(**settings)
        self.independent = bool(independent)

    def build(self, variables):
        """Create the slots."""
        if self.built:
            return
        super().build(variables)
        self._delays = self.add_optimizer_variables(variables, "delay")

    def update_step(self, gradient, variable, learning_rate):
        """Update a variable."""
        ops, index = keras.ops, self._get_variable_index(variable)
        dtype = variable.dtype
        gradient = ops.cast(gradient, dtype)
        arrives = ops.not_equal(gradient, 0)
        m, v = self._momentums[index], self._velocities[index]
        delay = self._delays[index] + 1
        self.assign(self._delays[index], ops.where(arrives, 0.0, delay))
        mean = gradient / delay
        square = ops.square(mean) * (delay if self.independent else 1.0)
        self._update_moment(m, mean, self.beta_1, delay, arrives)
        self._update_moment(v, square, self.beta_2, delay, arrives)
        step = ops.cast(self.iterations + 1, dtype)
        rate = ops.cast(learning_rate, dtype) * ops.sqrt(1 - self.beta_2**step)
        rate /= 1 - self.beta_1**step
        update = rate * delay * m / (ops.sqrt(v) + self.epsilon)
        self.assign_sub(variable, ops.where(arrives, update, 0.0))

    def _update_moment(self, moment, value, beta, delay, arrives):
        new = value + keras.ops.power(beta, delay) * (moment - value)
        self.assign(moment, keras.ops.where(arrives, new, moment))

    def get_config(self):
        """Return the constructor's arguments."""
        return {**super().get_config(), "independent": self.independent}
