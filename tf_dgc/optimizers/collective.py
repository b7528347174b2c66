"""Base class of the optimizers whose workers exchange with collectives."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import metrics
from tf_dgc._internals import keras_optimizers, tf_collectives, tracing
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import CollectiveAlgorithm
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.multiworker.strategy import creating_zero_variables
from tf_dgc.multiworker.worker_variables import PerWorkerVariable
from tf_dgc.optimizers import gradients, validation
from tf_dgc.optimizers.base import OptimizerWrapper
from tf_dgc.optimizers.state import (
    CompressionSettings,
    OptimizerState,
    compare_workers,
    create_state,
)
from tf_dgc.steps.base import MethodState


class CollectiveOptimizer(OptimizerWrapper):
    """A wrapper whose `build` and `apply` every worker calls.

    Subclasses define `step`.

    Args:
        inner_optimizer: optimizer that applies the update.
        settings: settings of the compression.
        name: name of the optimizer.
        strategy: strategy in whose scope it is created, prepared.
        communicator: communicator of the workers.

    Attributes:
        communicator: communicator of the workers.
        residual: accumulated, unsent entries, one variable per model variable and
            worker; empty without error feedback.
        compressor_state: variables of the method's own state by name, for each model
            variable, followed by those of all tensors together, if there are any.
    """

    collective: CollectiveAlgorithm | str

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        settings: CompressionSettings,
        name: str,
        strategy: tf.distribute.Strategy,
        communicator: Communicator,
    ):
        super().__init__(
            inner_optimizer,
            settings.hyperparameters,
            settings.exclusions,
            name,
            strategy,
        )
        self._settings = settings
        self.communicator = communicator
        self._state: OptimizerState | None = None
        self.residual: list[PerWorkerVariable] = []
        self.compressor_state: list[MethodState] = []
        self._counters: keras.Variable | None = None

    # --- before the first step ------------------------------------------------------

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create the state, after all workers have compared models and settings.

        Args:
            variables: model's trainable variables.

        Raises:
            ValueError: see the class.
            RuntimeError: if another worker does not come within `TF_DGC_TIMEOUT`
                seconds.
        """
        if self.built:
            return
        variables = keras_optimizers.distinct_variables(self, variables)
        _check_scope(self, self._strategy, variables, "build")
        self.check_variables(variables)
        self.check_copies()
        use_native = compare_workers(
            self._strategy,
            self.consensus_config,
            self.schedule_functions(),
            variables,
        )
        if not variables:
            self.build_without_variables()
            return
        with creating_zero_variables(self._strategy), keras_optimizers.tracked():
            for optimizer in self.wrapped_optimizers:
                optimizer.build(variables)
            self._state = create_state(
                self.settings,
                self.inner_optimizer,
                variables,
                lambda variable: keras_optimizers.variable_index(self, variable),
                self.communicator,
                use_native,
                self._strategy,
            )
            self.create_variables(self._state, variables)
            # Only now is it built: a rejected build can be fixed and retried.
            keras_optimizers.remember_variables(self, variables)

    def check_variables(self, variables: Sequence[keras.Variable]) -> None:
        """Raise `ValueError` for variables that this optimizer cannot train."""
        validation.check_variables(variables)

    def create_variables(
        self, state: OptimizerState, variables: list[keras.Variable]
    ) -> None:
        """Make the state's variables attributes, which Keras saves."""
        del variables
        self._counters = state.worker_state.counters
        self.residual = state.for_model_tensors(state.worker_state.residual)
        self.compressor_state = state.method_state

    # --- in every step --------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Take one step; call it in replica context.

        Args:
            grads: one gradient per variable: a tensor, `tf.IndexedSlices` or None,
                already divided by the number of workers (Keras scales the loss). If
                all are None nothing is done, as in Keras.
            trainable_variables: the variables; the optimizer is built for those of the
                first call.

        Raises:
            ValueError: outside the replica context of the optimizer's strategy, and
                for variables the optimizer was not built with.
        """
        _check_scope(self, self._strategy, trainable_variables or (), "apply")
        _check_in_replica(self.num_workers)
        grads, variables = gradients.match_gradients(self, grads, trainable_variables)
        if grads:
            assert self.state is not None  # `match_gradients` builds the optimizer
            with tf.name_scope(self.name):
                self.step(self.state, grads, variables)

    def step(
        self, state: OptimizerState, grads: list[Any], variables: list[keras.Variable]
    ) -> None:
        """Take one step.

        Args:
            state: state that `build` created.
            grads: gradients, none missing.
            variables: variable of each.
        """
        raise NotImplementedError

    # --- attributes -----------------------------------------------------------------

    @property
    def settings(self) -> CompressionSettings:
        """Settings of the compression."""
        return self._settings

    @property
    def state(self) -> OptimizerState | None:
        """Everything that `build` created; None before."""
        return self._state

    @property
    def num_workers(self) -> int:
        """Replicas in sync."""
        return self.communicator.num_workers

    @property
    def tensors(self) -> list[TensorSpec]:
        """Descriptions of all variables; empty before the optimizer is built."""
        return self.state.tensors if self.state else []

    @property
    def num_entries(self) -> int:
        """Entries of all variables; 0 before the optimizer is built."""
        return sum(t.size for t in self.tensors)

    @property
    def num_compressed(self) -> int:
        """Number of compressed variables; 0 before the optimizer is built."""
        return sum(not t.uncompressed for t in self.tensors)

    @property
    def stats(self) -> metrics.CompressionStats:
        """What each worker sent so far, and in the last exchange."""
        name = self.state.tuned.name if self.state else self.settings.algorithm.name
        return metrics.read_stats(self._counters, name)

    # --- config ---------------------------------------------------------------------

    def consensus_config(self) -> dict[str, Any]:
        """Return the config that must be equal on all workers."""
        return self.describe_config()

    def schedule_functions(self) -> dict[str, Any]:
        """Return settings, by name, that may be functions of the iteration."""
        return {"sparsity": getattr(self.settings.compressor, "sparsity", None)}


# --- Context of a call ----------------------------------------------------------------


def _check_scope(
    optimizer: keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    variables: Sequence[Any],
    method: str,
) -> None:
    """Raise `ValueError` unless optimizer, model and call belong to one strategy.

    The optimizer was created in the scope of `strategy`, and `method` is called.
    """
    created_in_scope = strategy.extended.variable_created_in_scope
    foreign = next((v for v in variables if not created_in_scope(_value(v))), None)
    current = tf.distribute.get_strategy()
    if foreign is None and current is strategy:
        return
    class_name = type(optimizer).__name__
    if foreign is None:
        foreign_strategy = None
        received = (
            f"Received: a {class_name} created {_where(strategy)}, and `{method}` "
            f"called {_where(current)}"
        )
    else:
        foreign_strategy = getattr(_value(foreign), "distribute_strategy", None)
        received = (
            f"Received: variable {getattr(foreign, 'path', foreign.name)} created "
            f"{_where(foreign_strategy)}, and a {class_name} created {_where(strategy)}"
        )
    if tf_collectives.is_default(strategy):
        raise ValueError(
            f"This {class_name} was created outside of `strategy.scope()`, and the "
            f"model within it. Move the call of `{class_name}(...)`, or of the "
            "function that returns it, into `with strategy.scope():`, with the "
            f"strategy of the model. {received}"
        )
    if foreign is None:
        raise ValueError(
            f"`{method}` was called outside of the strategy in whose scope this "
            f"{class_name} and the model were created. Call `build` within "
            "`with strategy.scope():`, and `apply` or `apply_gradients` in a function "
            f"that is passed to `strategy.run`. {received}"
        )
    if tf_collectives.is_default(foreign_strategy):
        raise ValueError(
            "The model was created outside of `strategy.scope()`, and this "
            f"{class_name} within it. Move the call that creates the model, such as "
            "`keras.Sequential(...)`, `keras.Model(...)` or "
            "`keras.models.load_model(...)`, into `with strategy.scope():`, with the "
            f"strategy of the optimizer. {received}"
        )
    raise ValueError(
        f"The model and this {class_name} were created under different strategies. "
        "Create one strategy, and create both within its `with strategy.scope():`. "
        f"{received}"
    )


def _check_in_replica(num_workers: int) -> None:
    """Raise `ValueError` outside of replica context, and for collectives in XLA."""
    if num_workers > 1 and tracing.in_xla_context():
        raise ValueError(
            "XLA compiles this step (`jit_compile=True`), and an exchange between "
            "workers is nothing that it can compile. Compile the model, and "
            "`tf.function`s, with `jit_compile=False`. Received: a step of "
            f"{num_workers} workers"
        )
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "`apply` and `apply_gradients` must be called in replica context: within "
            "a function passed to `strategy.run`."
        )


def _value(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _where(strategy: tf.distribute.Strategy | None) -> str:
    """Return in which scope something was created or called."""
    if strategy is None or tf_collectives.is_default(strategy):
        return "outside of any scope"
    number = strategy.num_replicas_in_sync
    return f"in the scope of a {type(strategy).__name__} of {number} replicas"
