"""The settings of a compressing optimizer, and its state, created by `build`."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import schedules
from tf_dgc.codecs import value_types
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import CollectiveAlgorithm
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.overlapped import Overlap, OverlapMode
from tf_dgc.compressors import Compressor, NoCompression
from tf_dgc.multiworker import consensus
from tf_dgc.optimizers import autotune, gradients, validation
from tf_dgc.optimizers.adam import AdamCorrection
from tf_dgc.optimizers.adam_sampling import create_correlation_sample
from tf_dgc.optimizers.autotune import TunedExchange
from tf_dgc.optimizers.config import Exclusions
from tf_dgc.optimizers.gradient_accumulation import GradientAccumulation
from tf_dgc.optimizers.gradients import StepSettings
from tf_dgc.optimizers.update import all_workers_have_native_rules
from tf_dgc.steps.base import MethodState, WorkerState
from tf_dgc.steps.state import create_worker_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressionSettings(StepSettings):
    """What an optimizer that exchanges with collectives needs in addition.

    Attributes:
        compressor: method of the tensors that are not sent uncompressed.
        algorithm: collective algorithm of the exchange.
        min_compress_size: number of entries from which on tensors are compressed.
        uncompressed_dtype: value type of uncompressed tensors; None for full precision.
        track_staleness: whether to record when each entry was last sent.
        overlap: whether buckets are exchanged during the backward pass.
        exclusions: variables that the user excluded from compression.
    """

    compressor: Compressor
    algorithm: CollectiveAlgorithm
    min_compress_size: int = 1024
    uncompressed_dtype: str | None = None
    track_staleness: bool = False
    overlap: Overlap = Overlap()
    exclusions: Exclusions = dataclasses.field(default_factory=Exclusions)

    @property
    def keeps_residual(self) -> bool:
        """Whether there is one residual; gossip has a state for each neighbor."""
        return self.error_feedback and not self.algorithm.is_neighbor_exchange

    @property
    def allows_merging(self) -> bool:
        """Whether an algorithm may merge the entries of several workers on the way."""
        merges = validation.can_merge(self.compressor, self.keeps_residual)
        return merges and not self.uncompressed_dtype

    def is_uncompressed(self, variable: keras.Variable) -> bool:
        """Whether a variable is sent as it is: excluded, or too small to pay."""
        return is_small(variable, self.min_compress_size) or variable in self.exclusions


def is_small(variable: keras.Variable, min_compress_size: int) -> bool:
    """Whether a variable has few entries, or a rank below 2."""
    size = variable.shape.num_elements()
    return len(variable.shape) < 2 or size < max(1, min_compress_size)


def tensor_spec(
    variable: keras.Variable,
    uncompressed: bool,
    keeps_residual: bool,
    num_workers: int,
    uncompressed_dtype: str | None = None,
) -> TensorSpec:
    """Return the description of a variable.

    Args:
        variable: variable of the model.
        uncompressed: whether it is sent uncompressed.
        keeps_residual: whether there is a residual, so that a sum that overflows the
            variable's dtype can be spread over several steps.
        num_workers: number of workers, N.
        uncompressed_dtype: value type if it is sent uncompressed and there is a
            residual; None for the accumulators' dtype.
    """
    variable_dtype = tf.as_dtype(variable.dtype)
    dtype = tf.float64 if variable_dtype == tf.float64 else tf.float32
    value_dtype = uncompressed_dtype if uncompressed and keeps_residual else None
    largest = value_types.largest_contribution(variable_dtype, num_workers)
    if value_dtype:  # a collective may sum it as bfloat16
        summed = value_types.largest_contribution(tf.bfloat16, num_workers)
        largest = min(largest, summed)
    return TensorSpec(
        variable.path,
        tuple(variable.shape),
        dtype,
        uncompressed,
        uncompressed_dtype=value_dtype,
        narrow_dtype=variable_dtype if variable_dtype.size < dtype.size else None,
        max_magnitude=largest if keeps_residual else math.inf,
    )


# --- Comparison of the workers ------------------------------------------------------


def compare_workers(
    strategy: tf.distribute.Strategy,
    describe_config: Callable[[], dict[str, Any]],
    schedule_functions: dict[str, Any],
    variables: Sequence[keras.Variable],
) -> bool:
    """Compare models and settings of all workers; call it on every worker.

    Args:
        strategy: strategy of the workers.
        describe_config: function that returns the optimizer's config, called only if
            there are other workers.
        schedule_functions: settings that may be functions of the iteration, by name;
            the config has only the names of functions.
        variables: variables of the model.

    Returns:
        Whether all workers have the native operations for the variables.

    Raises:
        ValueError: on all workers, if two of them differ.
    """
    with tf.init_scope():  # the first call may come while a step is traced
        consensus.require_equal(
            strategy,
            lambda: consensus_texts(describe_config(), schedule_functions, variables),
        )
        return all_workers_have_native_rules(strategy, variables)


def consensus_texts(
    config: dict[str, Any],
    schedule_functions: dict[str, Any],
    variables: Sequence[keras.Variable],
) -> dict[str, Any]:
    """Return what must be equal on all workers, as nested dictionaries."""
    config = without_identities(config)
    for wrapped in (config["inner"], config.get("outer") or {"config": {}}):
        wrapped["config"].pop("name", None)  # a class may leave it out
    config.pop("name")
    for name, schedule in schedule_functions.items():
        if callable(schedule):
            fingerprint = schedules.schedule_fingerprint(schedule)
            config[f"{name} at step 0"] = _first(schedule)
            config[f"{name}, a checksum of its operations"] = fingerprint
    return {
        "version": {"tensorflow": tf.__version__, "keras": keras.__version__},
        "optimizer": config,
        "variable": {
            f"{i}": {"shape": str(tuple(v.shape)), "dtype": v.dtype}
            for i, v in enumerate(variables)
        },
    }


def _first(schedule: Callable[[tf.Tensor], Any]) -> float:
    return float(tf.convert_to_tensor(schedule(tf.constant(0, tf.int64))).numpy())


def without_identities(config: Any) -> Any:
    """Return a config without the object addresses that Keras adds when saving."""
    if isinstance(config, list | tuple):
        return [without_identities(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {
        key: without_identities(value)
        for key, value in config.items()
        if key != "shared_object_id"
    }


# --- State --------------------------------------------------------------------------


# Not a tuple: Keras saves tuples that are attributes of an optimizer, and looks inside.
@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """Everything that `build` creates.

    Attributes:
        tensors: descriptions of the model's tensors.
        worker_state: this worker's variables for these, followed by those for the
            sample of the Adam correction.
        adam: correction of an inner Adam; None for others, and where it is off.
        use_native: whether all workers have the native operations for the variables.
        tuned: compressor, collective algorithm and buckets of the steps.
        has_memory: whether a step depends on the gradients of earlier calls.
        accumulation: gradient accumulation over several calls; None without.
    """

    tensors: list[TensorSpec]
    worker_state: WorkerState
    adam: AdamCorrection | None
    use_native: bool
    tuned: TunedExchange
    has_memory: bool
    accumulation: GradientAccumulation | None = None

    @property
    def accumulation_variables(self) -> list[keras.Variable]:
        """Variables of the gradient accumulation."""
        return self.accumulation.variables if self.accumulation else []

    @property
    def adam_variables(self) -> list[keras.Variable]:
        """Variables of the Adam correction that belong to no tensor of the model."""
        return list(self.adam.variables) if self.adam else []

    @property
    def method_state(self) -> list[MethodState]:
        """The method's state of each tensor, followed by that of all tensors."""
        common = [self.worker_state.common] if self.worker_state.common else []
        return self.for_model_tensors(self.worker_state.states) + common

    def for_model_tensors(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables of the model's tensors, without those of the sample."""
        return list(variables[: len(self.tensors)])


def create_state(
    settings: CompressionSettings,
    inner_optimizer: keras.optimizers.Optimizer,
    variables: list[keras.Variable],
    index_of: Callable[[Any], int],
    communicator: Communicator,
    use_native: bool,
    strategy: tf.distribute.Strategy,
) -> OptimizerState:
    """Create all variables; call it on every worker, in the strategy's scope.

    Args:
        settings: the optimizer's settings.
        inner_optimizer: inner optimizer, built.
        variables: variables of the model.
        index_of: function of a variable that returns its index among the tensors.
        communicator: communicator of the steps, which will use the tuned algorithm.
        use_native: whether all workers have the native operations for the variables.
        strategy: strategy of the optimizer.
    """
    hyperparameters = settings.hyperparameters
    num_workers = communicator.num_workers
    settings.exclusions.warn_of_unmatched(variables)
    trained = gradients.without_overwritten(variables)
    tensors = [
        tensor_spec(
            v,
            settings.is_uncompressed(v),
            settings.keeps_residual,
            num_workers,
            settings.uncompressed_dtype,
        )
        for v in trained
    ]
    sample = None
    if hyperparameters.adam:
        sample = create_correlation_sample(tensors, num_workers, settings.seed)
    worker_state = _create_worker_state(
        settings, [*tensors, *([sample.tensor] if sample else [])]
    )
    tuned = _tune(settings, tensors, worker_state, communicator, strategy)
    correction = None
    if hyperparameters.adam:
        correction = AdamCorrection(
            inner_optimizer,
            hyperparameters.adam,
            hyperparameters.momentum,
            hyperparameters.scale_before_accumulation,
            worker_state,
            settings.compressor if tuned.compressor is settings.compressor else None,
            sample,
            index_of,
        )
    accumulation = None
    if hyperparameters.accumulation_steps > 1:
        accumulation = GradientAccumulation(
            hyperparameters.accumulation_steps, tensors, variables
        )
        accumulation.count_calls_for_learning_rate(inner_optimizer)
    has_memory = accumulation is not None or not worker_state.is_empty
    return OptimizerState(
        tensors, worker_state, correction, use_native, tuned, has_memory, accumulation
    )


def _create_worker_state(
    settings: CompressionSettings, tensors: list[TensorSpec]
) -> WorkerState:
    adam = settings.hyperparameters.adam
    by_neighbor = settings.algorithm.is_neighbor_exchange  # has the method's state
    return create_worker_state(
        tensors,
        NoCompression() if by_neighbor else settings.compressor,
        keeps_residual=settings.keeps_residual,
        keeps_velocity=settings.hyperparameters.keeps_velocity,
        keeps_second_moment=adam is not None,
        keeps_largest_moment=adam is not None and adam.amsgrad,
        tracks_staleness=settings.track_staleness,
        # As synchronizing the moments combines them.
        moment_rule="largest" if adam and adam.infinity_norm else "mean",
    )


def _tune(
    settings: CompressionSettings,
    tensors: list[TensorSpec],
    worker_state: WorkerState,
    communicator: Communicator,
    strategy: tf.distribute.Strategy,
) -> TunedExchange:
    """Choose the algorithm and the buckets of the steps."""
    overlap = settings.overlap
    if autotune.overlap_hindrance(
        settings.compressor, settings.hyperparameters, settings.track_staleness
    ):
        overlap = Overlap()
    tuned = autotune.choose_algorithm(
        settings.algorithm,
        settings.compressor,
        tensors,
        settings.keeps_residual,
        settings.allows_merging
        and validation.is_exact(settings.algorithm, settings.compressor, tensors),
        overlap.mode is OverlapMode.ALWAYS,
        strategy,
        communicator,
    )
    states = (worker_state.residual, worker_state.velocity)
    return autotune.split_into_buckets(
        tuned, overlap, tensors, sum(map(bool, states)), communicator.num_workers
    )
