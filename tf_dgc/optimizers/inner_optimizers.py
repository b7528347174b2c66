"""Keras optimizers for compressed and asynchronous training."""

from typing import Any

import keras
from keras import ops

from tf_dgc._internals import keras_optimizers
from tf_dgc.arguments import check_number, check_whole
from tf_dgc.steps import accumulation


@keras.saving.register_keras_serializable(package="tf_dgc")
class NovoGrad(keras_optimizers.CoupledDecay):
    """SGD with momentum and gradients that are normalized tensor by tensor.

    Ginsburg et al., "Stochastic gradient methods with layer-wise adaptive moments for
    training of deep networks", 2019, algorithm 1. For every tensor:

        v = beta_2 * v + (1 - beta_2) * |g|^2
        m = beta_1 * m + g / (sqrt(v) + epsilon) + weight_decay * w
        w = w - learning_rate * m

    v is one number per tensor, `|g|^2` in the first step whose gradient is not 0; m is
    0 at first. Weight decay is part of the momentum, unlike Keras's decoupled weight
    decay; `exclude_from_weight_decay` works as usual. Only the direction of a tensor's
    gradient matters, so NovoGrad suits methods that lose its magnitude (`SignSGD`). It
    needs half the memory of Adam.

    The norm and v are float64 for float64 variables, and float32 for all others.

    Args:
        learning_rate: a float, a `LearningRateSchedule` or a callable.
        beta_1: decay of the momentum, in [0, 1).
        beta_2: decay of the second moment, in [0, 1).
        epsilon: small number added to the norm, 0 or more.
        weight_decay: coefficient, 0 or more; None for 0.
        name: name of the optimizer.
        **kwargs: arguments of every Keras optimizer, such as clipping.

    Raises:
        ValueError: for settings outside the ranges above.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        beta_1: float = 0.95,
        beta_2: float = 0.98,
        epsilon: float = 1e-8,
        weight_decay: float | None = None,
        name: str = "novograd",
        **kwargs: Any,
    ):
        check_number("beta_1", beta_1, "[0, 1)")
        check_number("beta_2", beta_2, "[0, 1)")
        check_number("epsilon", epsilon, "[0, inf)")
        if weight_decay is not None:
            check_number("weight_decay", weight_decay, "[0, inf)")
        super().__init__(learning_rate, weight_decay=weight_decay, name=name, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon

    def build(self, variables: list[keras.Variable]) -> None:
        """Create a momentum and a scalar second moment per variable."""
        if self.built:
            return
        super().build(variables)
        self._momentums = self.add_optimizer_variables(variables, "momentum")
        self._moments = [
            self.add_variable(
                (),
                # Squares overflow and vanish in 16 bits.
                dtype="float64" if v.dtype == "float64" else "float32",
                name=f"{v.name}_second_moment",
            )
            for v in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Apply algorithm 1 to one variable."""
        index = keras_optimizers.variable_index(self, variable)
        momentum, moment = self._momentums[index], self._moments[index]
        dtype = variable.dtype
        gradient = ops.cast(accumulation.to_dense(gradient, variable), moment.dtype)
        square = ops.sum(ops.square(gradient))
        average = self.beta_2 * moment + (1 - self.beta_2) * square
        new_moment = ops.where(ops.equal(moment, 0), square, average)
        step = ops.cast(gradient / (ops.sqrt(new_moment) + self.epsilon), dtype)
        if self.weight_decay and keras_optimizers.uses_weight_decay(self, variable):
            step = step + self.weight_decay * variable
        new_momentum = self.beta_1 * momentum + step
        self.assign(moment, new_moment)
        self.assign(momentum, new_momentum)
        self.assign_sub(variable, ops.cast(learning_rate, dtype) * new_momentum)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
        }


@keras.saving.register_keras_serializable(package="tf_dgc")
class DelayedNesterov(keras.optimizers.Optimizer):
    """SGD with Nesterov momentum that is updated every `delay` steps only.

    Liu et al., "Asynchronous local-SGD training for language modeling", 2024, algorithm
    4 with c = 0. It is for a server of asynchronous workers, where each push is a step:
    momentum in every step would amplify stale gradients. In every step

        sum = sum + g

    and then in every `delay`-th step

        m = momentum * m + sum;  sum = 0
        w = w - learning_rate * (momentum * m + g)

    and in all others

        w = w - learning_rate * g

    The server divides pushes by the number of workers, as the paper does by `delay`.
    With `delay=1` this is Nesterov's momentum.

    Args:
        learning_rate: a float, a `LearningRateSchedule` or a callable.
        momentum: coefficient, in [0, 1).
        delay: steps from one update of the momentum to the next; usually the number of
            workers.
        name: name of the optimizer.
        **kwargs: arguments of every Keras optimizer.

    Raises:
        ValueError: for settings outside the ranges above.
    """

    def __init__(
        self,
        learning_rate: Any = 0.1,
        momentum: float = 0.9,
        delay: int = 1,
        name: str = "delayed_nesterov",
        **kwargs: Any,
    ):
        check_number("momentum", momentum, "[0, 1)")
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
        is_due = ops.equal((self.iterations + 1) % self.delay, 0)
        new_total = total + gradient
        new_momentum = ops.where(is_due, self.momentum * momentum + new_total, momentum)
        added = ops.where(is_due, self.momentum * new_momentum, 0)
        self.assign(total, ops.where(is_due, 0, new_total))
        self.assign(momentum, new_momentum)
        step = ops.cast(learning_rate, dtype) * (ops.cast(added, dtype) + gradient)
        self.assign_sub(variable, step)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "delay": self.delay,
        }
