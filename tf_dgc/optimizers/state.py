"""What an optimizer keeps between steps, made before the first one."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import collectives, schedules
from tf_dgc._internals import keras_optimizers
from tf_dgc.codecs import value_types
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import CollectiveAlgorithm
from tf_dgc.compressors import NoCompression
from tf_dgc.multiworker import consensus
from tf_dgc.optimizers import autotune, gradients, validation
from tf_dgc.optimizers.adam import AdamCorrection
from tf_dgc.optimizers.adam_sampling import create_correlation_sample
from tf_dgc.optimizers.autotune import TunedExchange, choose_algorithm
from tf_dgc.optimizers.config import Exclusions
from tf_dgc.optimizers.gradients import GradientAccumulation
from tf_dgc.optimizers.inner_hyperparameters import InnerHyperparameters
from tf_dgc.optimizers.update import all_workers_have_native_rules
from tf_dgc.steps.state import WorkerState, create_worker_state

# --- What an optimizer knows of its variables before the first step.


def tensor_spec(
    variable: keras.Variable,
    uncompressed: bool,
    keeps_residual: bool,
    num_workers: int,
    uncompressed_dtype: str | None = None,
) -> TensorSpec:
    """Return what is to be known of a variable.

    Args:
        variable: variable of the model.
        uncompressed: whether it is sent whole.
        keeps_residual: whether what is not sent is kept, so that a sum that would not
            fit into the variable can be spread over several steps.
        num_workers: number of workers, N.
        uncompressed_dtype: type of the values on the wire if it is exempt and what
            that loses is kept; None for that of the accumulators.
    """
    own = tf.as_dtype(variable.dtype)
    dtype = tf.float64 if own == tf.float64 else tf.float32
    coded = uncompressed_dtype if uncompressed and keeps_residual else None
    bound = value_types.largest_contribution(own, num_workers)
    if coded:  # it may be summed so
        bound = min(bound, value_types.largest_contribution(tf.bfloat16, num_workers))
    return TensorSpec(
        variable.path,
        tuple(variable.shape),
        dtype,
        uncompressed,
        uncompressed_dtype=coded,
        narrow=own if own.size < dtype.size else None,
        largest=bound if keeps_residual else math.inf,
    )


def is_small(variable: keras.Variable, min_compress_size: int) -> bool:
    """Whether compressing it would not pay: few entries, or a rank below 2."""
    size = variable.shape.num_elements()
    return len(variable.shape) < 2 or size < max(1, min_compress_size)


def consensus_texts(
    optimizer: Any, variables: Sequence[keras.Variable], lane: int | None = None
) -> dict[str, Any]:
    """Return what must be equal on all workers, as nested dictionaries.

    Args:
        optimizer: optimizer, whose config must be, and its schedules.
        variables: variables of the model, in order.
        lane: number of its exchanges in the background, if it has any.
    """
    config = {**optimizer.describe_config(), "lane": lane, **_schedules(optimizer)}
    config = without_identities(config)
    for wrapped in (config["inner"], config.get("outer") or {"config": {}}):
        wrapped["config"].pop("name", None)  # a class may leave it out
    config.pop("name")
    shapes = {
        f"{i}": {"shape": str(tuple(v.shape)), "dtype": v.dtype}
        for i, v in enumerate(variables)
    }
    return {
        "version": {"tensorflow": tf.__version__, "keras": keras.__version__},
        "optimizer": config,
        "variable": shapes,
    }


def _schedules(optimizer: Any) -> dict[str, Any]:
    """Return what tells schedules apart: configs of functions are their names alone."""
    found = {
        "sparsity": getattr(optimizer.compressor, "sparsity", None),
        "period": getattr(optimizer, "period", None),
    }
    asked = {name: schedule for name, schedule in found.items() if callable(schedule)}
    begins = {f"{name} at step 0": _first(given) for name, given in asked.items()}
    traced = {
        f"{name}, a checksum of its operations": schedules.schedule_fingerprint(given)
        for name, given in asked.items()
    }
    return {**begins, **traced}


def _first(schedule: Callable[[tf.Tensor], Any]) -> float:
    return tf.convert_to_tensor(schedule(tf.constant(0, tf.int64))).numpy().item()


def without_identities(config: Any) -> Any:
    """Leave out what Keras adds while it saves and loads: addresses in this process."""
    if isinstance(config, list | tuple):
        return [without_identities(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {
        key: without_identities(value)
        for key, value in config.items()
        if key != "shared_object_id"
    }


# Not a tuple: Keras saves those that are attributes of an optimizer, and looks inside.
@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """Variables, and what is known of them.

    Attributes:
        tensors: descriptions of the tensors of the model.
        worker_state: variables of these; behind them those of the Adam correction's
            sample.
        adam: correction of an inner Adam; None for others, and where it is off.
        use_native: whether all workers have the native operations for the variables.
        chosen: method and exchange of the steps.
        accumulation: gradients of calls that make no step yet; None if each makes one.
    """

    tensors: list[TensorSpec]
    worker_state: WorkerState
    adam: AdamCorrection | None
    use_native: bool
    chosen: TunedExchange
    accumulation: GradientAccumulation | None = None

    @property
    def remembers(self) -> bool:
        """Whether a step depends on the gradients of earlier calls."""
        return self.accumulation is not None or not self.worker_state.is_empty

    @property
    def accumulation_variables(self) -> list[keras.Variable]:
        """Variables of the gradients of several calls."""
        return self.accumulation.variables if self.accumulation else []

    @property
    def adam_variables(self) -> list[keras.Variable]:
        """Variables of the correction that belong to no tensor of the model."""
        return list(self.adam.variables) if self.adam else []

    @property
    def method_state(self) -> list:
        """State of the method, of each tensor; behind them that of all at once."""
        common = [self.worker_state.common] if self.worker_state.common else []
        return self.for_model_tensors(self.worker_state.states) + common

    @property
    def rule(self) -> str | None:
        """Name of the inner optimizer's rule, if the correction has a hand in it."""
        return self.adam.kind.native_rule if self.adam else None

    def for_model_tensors(self, variables: Any) -> list:
        """Return those of the tensors of the model."""
        return list(variables[: len(self.tensors)])


def compare_workers(
    optimizer: Any, variables: list[keras.Variable], strategy: tf.distribute.Strategy
) -> bool:
    """Compare with the other workers what they were given, before anything is made.

    Args:
        optimizer: optimizer, whose config and `variables` must be alike on all.
        variables: variables of the model.
        strategy: strategy of the workers.

    Returns:
        Whether all workers have the native operations for the variables.
    """
    with tf.init_scope():  # the first call may come while a step is being traced
        lane = getattr(getattr(optimizer, "background", None), "number", None)
        consensus.require_equal(
            strategy,
            lambda: consensus_texts(optimizer, variables, lane),
        )
        return all_workers_have_native_rules(strategy, variables)


def create_state(
    optimizer: Any,
    variables: list[keras.Variable],
    exclusions: Exclusions,
    keeps_residual: bool,
    hyperparameters: InnerHyperparameters,
    use_native: bool,
    strategy: tf.distribute.Strategy,
) -> OptimizerState:
    """Create all variables; call it on every worker, in the strategy's scope.

    Args:
        optimizer: `CompressedOptimizer`, whose inner optimizer is built.
        variables: variables of the model.
        exclusions: exclusions from compression.
        keeps_residual: whether what is not sent is kept.
        hyperparameters: settings of the inner optimizer that are applied in its place.
        use_native: whether all workers have the native operations for the variables.
        strategy: strategy of the optimizer.
    """
    exclusions.warn_of_unmatched(variables)
    trained, _ = gradients.split_overwritten(variables, variables)
    found = [_describe(optimizer, v, exclusions, keeps_residual) for v, _ in trained]
    agreement = None
    if hyperparameters.adam:
        agreement = create_correlation_sample(
            found, optimizer.num_workers, optimizer.seed
        )
    ways, merges = validation.allows(optimizer, keeps_residual)
    merges = merges and validation.is_exact(ways, optimizer.compressor, found)
    worker_state = create_worker_state(
        [*found, *([agreement.tensor] if agreement else [])],
        # Of a method among neighbours there is a state of each of them (`gossip.py`).
        NoCompression() if ways.is_neighbor_exchange else optimizer.compressor,
        keeps_residual=keeps_residual,
        keeps_velocity=hyperparameters.keeps_velocity,
        keeps_second_moment=hyperparameters.adam is not None,
        keeps_largest_moment=hyperparameters.adam is not None
        and hyperparameters.adam.largest,
        tracks_staleness=optimizer.track_staleness,
        # As a refresh agrees on them.
        moment_rule="largest"
        if hyperparameters.adam and hyperparameters.adam.infinity
        else "mean",
    )
    asked, wanted = optimizer.compressor, optimizer.overlap
    if autotune.overlap_hindrance(asked, hyperparameters, optimizer.track_staleness):
        wanted = False
    asks = asked, found, keeps_residual, merges, bool(wanted)
    chosen = choose_algorithm(ways, *asks, strategy, optimizer.communicator)
    num_kept = len(
        [some for some in (worker_state.residual, worker_state.velocity) if some]
    )
    chosen = autotune.split_into_buckets(
        chosen, wanted, found, num_kept, optimizer.num_workers
    )
    correction = None
    if hyperparameters.adam:
        correction = AdamCorrection(
            optimizer.inner_optimizer,
            hyperparameters.adam,
            hyperparameters.momentum,
            hyperparameters.rate,
            worker_state,
            None if chosen.compressor is not asked else asked,
            agreement,
            functools.partial(keras_optimizers.variable_index, optimizer),
        )
    accumulation = None
    if hyperparameters.calls > 1:
        accumulation = GradientAccumulation(hyperparameters.calls, found, variables)
        accumulation.set_rate(optimizer.inner_optimizer)
    return OptimizerState(
        found, worker_state, correction, use_native, chosen, accumulation
    )


def algorithm_name(
    made: OptimizerState | None, exchange: CollectiveAlgorithm | str
) -> str:
    """Return the name of an exchange, or of what was chosen by it.

    Args:
        made: variables of the optimizer; None if there are none yet.
        exchange: exchange of the optimizer, or its name.
    """
    return made.chosen.name if made else collectives.get(exchange).name


def _describe(
    optimizer: Any,
    variable: keras.Variable,
    exclusions: Exclusions,
    keeps_residual: bool,
) -> TensorSpec:
    small = is_small(variable, optimizer.min_compress_size)
    uncompressed = small or variable in exclusions
    coded = optimizer.uncompressed_dtype
    return tensor_spec(
        variable, uncompressed, keeps_residual, optimizer.num_workers, coded
    )
