"""NovoGrad: an inner optimizer whose step is normalized tensor by tensor."""

from typing import Any

import keras
from keras import ops

from tf_dgc._internals import keras_optimizers
from tf_dgc.arguments import check_whole, show
from tf_dgc.steps import accumulation


@keras.saving.register_keras_serializable(package="tf_dgc")
class NovoGrad(keras_optimizers.CoupledDecay):
    """SGD with momentum, of gradients that are normalized by a norm of each tensor.

    Ginsburg et al., "Stochastic gradient methods with layer-wise adaptive moments for
    training of deep networks", 2019, algorithm 1. For every tensor:

        v = beta_2 * v + (1 - beta_2) * |g|^2
        m = beta_1 * m + g / (sqrt(v) + epsilon) + weight_decay * w
        w = w - learning_rate * m

    v, one number, is `|g|^2` at first; m is 0 before. While all gradients were 0, v is
    not set yet: the first that is not 0 counts as the first. Weight decay
    goes through the momentum, and is not Keras's own (which is decoupled from it);
    `exclude_from_weight_decay` works as usual. Since only the direction of a tensor's
    gradient counts, it fits methods that lose its magnitude (`SignSGD`), and it needs
    half the memory of Adam.

    The norm and v are float32 for float16 and bfloat16 variables.

    Args:
        learning_rate: a float, a schedule or a callable; 0.01 as in the paper.
        beta_1: decay of the momentum, in [0, 1).
        beta_2: decay of the second moment, in [0, 1).
        epsilon: small number against division by 0, above 0.
        weight_decay: coefficient d, 0 or more; None for 0.
        name: name of the optimizer.
        **kwargs: arguments of every Keras optimizer: clipping, moving averages, loss
            scale.
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
        for what, value in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 <= value < 1:
                raise ValueError(
                    f"`{what}` must be in [0, 1). Received: {what}={show(value)}"
                )
        for what, value in (("epsilon", epsilon), ("weight_decay", weight_decay or 0)):
            if not value >= 0:
                raise ValueError(f"`{what}` must be 0 or more. Received: {show(value)}")
        super().__init__(learning_rate, weight_decay=weight_decay, name=name, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon

    def build(self, variables: list[keras.Variable]) -> None:
        """Create a momentum per variable, and the second moment, a scalar."""
        if self.built:
            return
        super().build(variables)
        self._momentums = self.add_optimizer_variables(variables, "momentum")
        self._moments = [
            self.add_variable((), dtype=_wide(v), name=f"{v.name}_second_moment")
            for v in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Apply algorithm 1 to one variable."""
        index = keras_optimizers.variable_index(self, variable)
        momentum, moment = self._momentums[index], self._moments[index]
        dtype = variable.dtype
        gradient = ops.cast(accumulation.to_dense(gradient, variable), moment.dtype)
        square = ops.sum(ops.square(gradient))
        follow = self.beta_2 * moment + (1 - self.beta_2) * square
        new_moment = ops.where(ops.equal(moment, 0), square, follow)
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


def _wide(variable: keras.Variable) -> str:
    """Return a type in which squares of a gradient neither vanish nor overflow."""
    return "float64" if variable.dtype == "float64" else "float32"


# --- Delayed Nesterov: momentum for gradients that come one by one, from many workers.


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
