"""What Keras asks of an optimizer that wraps another one."""

from typing import Any

import keras

from tf_dgc import _internals
from tf_dgc.state import PerWorkerVariable


class OptimizerWrapper(keras.optimizers.Optimizer):
    """A `keras.optimizers.Optimizer` whose update is applied by an inner one.

    Learning rate, iterations, weight decay and moving averages belong to the inner
    optimizer; the wrapper shows them as its own.

    Args:
        inner_optimizer: applies the update to gradients that are already summed over
            the workers. It is changed not to sum them again.
        loss_scale_factor: what Keras multiplies the loss by, or None.
        name: of the optimizer.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        loss_scale_factor: float | None,
        name: str,
    ):
        super().__init__(
            learning_rate=lambda: inner_optimizer.learning_rate,
            loss_scale_factor=loss_scale_factor,
            name=name,
        )
        _internals.share_iterations(self, inner_optimizer)
        _internals.replace_all_reduce(inner_optimizer, list)
        self.inner_optimizer = inner_optimizer

    @property
    def variables(self) -> list[keras.Variable]:
        """The optimizer's variables, those of the inner optimizer included."""
        own = _internals.own_variables(self)
        known = {id(v) for v in own}
        return own + [v for v in self.inner_optimizer.variables if id(v) not in known]

    @property
    def learning_rate(self) -> Any:
        """The learning rate, which belongs to the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """See `keras.optimizers.Optimizer.exclude_from_weight_decay`."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Let the inner optimizer set final values (moving averages)."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def save_own_variables(self, store: Any) -> None:
        """Save the state of all workers; call it on every worker.

        Keras saves the inner optimizer beside it.
        """
        for i, variable in enumerate(_internals.own_variables(self)):
            per_worker = isinstance(variable, PerWorkerVariable)
            store[str(i)] = variable.gather() if per_worker else variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Load the state; call it on every worker, with the same file.

        Raises:
            ValueError: if it was saved with other settings (for example without
                momentum correction), or this optimizer is not yet built, because what
                was not sent would be lost.
        """
        own = _internals.own_variables(self)
        if not self.built and len(store.keys()) != len(own):
            raise ValueError(
                f"This {type(self).__name__} is not yet built, so what is saved of its "
                "state would be lost. Before loading, `with strategy.scope(): "
                "model.optimizer.build(model.trainable_variables)`."
            )
        if len(store.keys()) != len(own):
            raise ValueError(
                f"The saved {type(self).__name__} has {len(store.keys())} variables, "
                f"this one has {len(own)}. Load with the settings it was saved with: "
                "compressor, error feedback, sparsity above 0, momentum correction, "
                "and the inner optimizer's momentum decide which variables there are."
            )
        for i, variable in enumerate(own):
            values = store[str(i)]
            if isinstance(variable, PerWorkerVariable):
                variable.scatter(values)
            else:
                variable.assign(values)
