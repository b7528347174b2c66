"""Delayed Nesterov: momentum for gradients that come one by one, from many workers."""

from typing import Any

import keras
from keras import ops

from tf_dgc._internals import keras_optimizers
from tf_dgc.arguments import check_whole, show
from tf_dgc.steps import accumulation


@keras.saving.register_keras_serializable(package="tf_dgc")
class DelayedNesterov(keras.optimizers.Optimizer):
    """SGD whose momentum is renewed only every so many steps, by Nesterov's rule.

    Liu et al., "Asynchronous local-SGD training for language modeling", 2024, algorithm
    4 with c = 0. Where each push is a step, momentum of every one carries on what is
    old already; between two renewals gradients act by themselves:

        sum = sum + g
        w = w - learning_rate * g                         in steps between
        m = momentum * m + sum;  sum = 0                  in every `delay`-th step
        w = w - learning_rate * (momentum * m + g)

    It is for the server of asynchronous workers, which divides what they push by their
    number, as the paper does by `delay`; with `delay=1` it is Nesterov's momentum.

    Args:
        learning_rate: a float, a schedule or a callable.
        momentum: coefficient, in [0, 1).
        delay: steps from one renewal to the next; the number of workers.
        name: name of the optimizer.
        **kwargs: arguments of every Keras optimizer.
    """

    def __init__(
        self,
        learning_rate: Any = 0.1,
        momentum: float = 0.9,
        delay: int = 1,
        name: str = "delayed_nesterov",
        **kwargs: Any,
    ):
        if not 0 <= momentum < 1:
            raise ValueError(
                f"`momentum` must be in [0, 1). Received: momentum={show(momentum)}"
            )
        check_whole("delay", delay, 1, " of steps")
        super().__init__(learning_rate, name=name, **kwargs)
        self.momentum = momentum
        self.delay = int(delay)

    def build(self, variables: list[keras.Variable]) -> None:
        """Create a momentum and a sum per variable."""
        if self.built:
            return
        super().build(variables)
        self._momentums = self.add_optimizer_variables(variables, "momentum")
        self._sums = self.add_optimizer_variables(variables, "sum")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Apply algorithm 4 to one variable."""
        index = keras_optimizers.variable_index(self, variable)
        momentum, total = self._momentums[index], self._sums[index]
        dtype = variable.dtype
        gradient = accumulation.to_dense(gradient, variable)
        renews = ops.equal((self.iterations + 1) % self.delay, 0)
        summed = total + gradient
        new_momentum = ops.where(renews, self.momentum * momentum + summed, momentum)
        carried = ops.where(renews, self.momentum * new_momentum, 0)
        self.assign(total, ops.where(renews, 0, summed))
        self.assign(momentum, new_momentum)
        step = ops.cast(learning_rate, dtype) * (ops.cast(carried, dtype) + gradient)
        self.assign_sub(variable, step)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        own = {"momentum": self.momentum, "delay": self.delay}
        return {**super().get_config(), **own}
