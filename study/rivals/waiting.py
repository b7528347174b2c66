"""Adam behind a sparse sum, that counts how long an entry has waited."""

import keras


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class WaitingAdam(keras.optimizers.AdamW):
    """AdamW that takes what comes after T steps for T gradients at once.

    An entry that arrives is the sum of T gradients: its moments decay as in T steps of
    their mean, and it moves T times as far. What does not arrive, a zero, is left
    alone. Where all arrives in every step it is AdamW.

    Args:
        independent: whether the T gradients are taken for independent noise, so that
            the square of one is 1/T of that of the sum, and not for equal ones, of
            which it is 1/T**2.
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
        self._waited = self.add_optimizer_variables(variables, "waited")

    def update_step(self, gradient, variable, learning_rate):
        """Update a variable."""
        ops, index = keras.ops, self._get_variable_index(variable)
        dtype = variable.dtype
        gradient = ops.cast(gradient, dtype)
        arrived = ops.not_equal(gradient, 0)
        m, v = self._momentums[index], self._velocities[index]
        waited = self._waited[index] + 1
        self.assign(self._waited[index], ops.where(arrived, 0.0, waited))
        mean = gradient / waited
        square = ops.square(mean) * (waited if self.independent else 1.0)
        self._follow(m, mean, self.beta_1, waited, arrived)
        self._follow(v, square, self.beta_2, waited, arrived)
        step = ops.cast(self.iterations + 1, dtype)
        rate = ops.cast(learning_rate, dtype) * ops.sqrt(1 - self.beta_2**step)
        rate /= 1 - self.beta_1**step
        moved = rate * waited * m / (ops.sqrt(v) + self.epsilon)
        self.assign_sub(variable, ops.where(arrived, moved, 0.0))

    def _follow(self, moment, value, beta, waited, arrived):
        new = value + keras.ops.power(beta, waited) * (moment - value)
        self.assign(moment, keras.ops.where(arrived, new, moment))

    def get_config(self):
        """Return the constructor's arguments."""
        return {**super().get_config(), "independent": self.independent}
