"""Any compression method as a Keras optimizer."""

from collections.abc import Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tf_dgc import arguments, compressors, metrics
from tf_dgc._internals import keras_optimizers
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import CollectiveAlgorithm
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.compressors import Compressor
from tf_dgc.metrics import Staleness
from tf_dgc.multiworker import divergence, tf_config
from tf_dgc.multiworker.divergence import DivergenceCheck
from tf_dgc.multiworker.strategy import creating_zero_variables, prepare
from tf_dgc.multiworker.worker_variables import PerWorkerVariable
from tf_dgc.optimizers import autotune, gradients, state, step_inputs, validation
from tf_dgc.optimizers.base import OptimizerWrapper
from tf_dgc.optimizers.config import CONFIG_KEYS, Exclusions, config_of, parse_config
from tf_dgc.optimizers.inner import extract_hyperparameters, get_inner_optimizer
from tf_dgc.optimizers.inner_hyperparameters import InnerHyperparameters, Serialize
from tf_dgc.optimizers.state import OptimizerState
from tf_dgc.optimizers.step_inputs import StepBucket
from tf_dgc.optimizers.unsupported import check_inner_rule
from tf_dgc.optimizers.update import apply_update
from tf_dgc.smart_cond import add_counts
from tf_dgc.steps import implementations
from tf_dgc.steps.base import StepOutcome
from tf_dgc.steps.state import MethodState, WorkerState

# --- Overlapping: a step in parts, each exchanged while the backward pass goes on.
#
# Each part, of the tensors of a bucket, is a step of its own: nothing of it waits for
# the
# gradients of others, and TensorFlow runs it as soon as its own are there. Collectives
# stand in the order of the buckets, on all workers alike. What workers remember is as
# it
# was before, and the model too, if a gradient of any part is not finite on any of them.


def run_buckets(
    communicator: Communicator,
    parts: Sequence[StepBucket],
    check: DivergenceCheck | None,
) -> tuple[StepOutcome, int | tf.Tensor]:
    """Run a step, as `Communicator.run` does; call it in replica context.

    Args:
        communicator: communicator of the optimizer.
        parts: parts of the step, in the order in which the backward pass finishes them.
        check: rider of the first request; None for none.

    Returns:
        What the step comes to, and the bytes that the check took.
    """
    if len(parts) == 1:
        return communicator.run(implementations.start_step(parts[0].inputs), check)
    before = [pair for part in parts for pair in _remember(part.inputs.worker_state)]
    first, *others = [implementations.start_step(part.inputs) for part in parts]
    outcome, extra = communicator.run(first, check)
    outcomes = [outcome, *(communicator.run(step)[0] for step in others)]
    sums, nonfinite = _decode(parts, outcomes)
    _restore_if(tf.greater(nonfinite, 0), before)
    joined = StepOutcome(
        decode=lambda: (sums, nonfinite),
        entries=add_counts([outcome.entries for outcome in outcomes]),
        sent_bytes=add_counts([outcome.sent_bytes for outcome in outcomes]),
        all_or_none=True,
    )
    return joined, extra


def _decode(
    parts: Sequence[StepBucket], outcomes: Sequence[StepOutcome]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return the sums of all parts, and the number of gradients that left them out."""
    sums: dict[int, tf.Tensor] = {}
    counts = []
    for part, outcome in zip(parts, outcomes, strict=True):
        found, nonfinite = outcome.decode()
        sums.update(zip(part.places, found, strict=True))
        counts.append(nonfinite)
    return [sums[i] for i in sorted(sums)], tf.reduce_max(tf.stack(counts))


def _remember(worker_state: WorkerState) -> list[tuple[Any, tf.Tensor]]:
    """Return the variables that a step may assign, and their values.

    A value is not copied until something writes to its variable.
    """
    states = [variable for state in worker_state.states for variable in state.values()]
    return [
        (v, v.local())
        for v in [*worker_state.residual, *worker_state.velocity, *states]
    ]


def _restore_if(wanted: tf.Tensor, before: Sequence[tuple[Any, tf.Tensor]]) -> None:
    def restore() -> tf.Tensor:
        for variable, value in before:
            variable.assign(value)
        return tf.constant(True)

    tf.cond(wanted, restore, lambda: tf.constant(True))


# --- One step of `CompressedOptimizer`, from gradients to the update.


def accumulate_or_step(
    optimizer: Any,
    grads: list,
    variables: list[keras.Variable],
    hyperparameters: InnerHyperparameters,
    made: OptimizerState,
    strategy: tf.distribute.Strategy,
) -> None:
    """Take a step, or the part of one that a call is; arguments are those of `take`."""
    if made.remembers:
        grads, variables = gradients.add_repeated(grads, variables)

    def step(given: list) -> None:
        take_step(optimizer, given, variables, hyperparameters, made, strategy)

    if made.accumulation:
        made.accumulation.call(optimizer, grads, variables, step)
    else:
        step(grads)


def take_step(
    optimizer: Any,
    grads: list,
    variables: list[keras.Variable],
    hyperparameters: InnerHyperparameters,
    made: OptimizerState,
    strategy: tf.distribute.Strategy,
) -> None:
    """Take a step; call it in replica context.

    Args:
        optimizer: `CompressedOptimizer` whose step it is.
        grads: gradients of the variables.
        variables: variables of the model.
        hyperparameters: settings of the inner optimizer that are applied in its place.
        made: variables that the optimizer keeps.
        strategy: strategy of the workers.
    """
    communicator = optimizer.communicator
    trained, overwritten = gradients.split_overwritten(grads, variables)
    extra = gradients.overwrite_variables(communicator, overwritten)
    if not trained:  # as by Keras, it counts
        optimizer.iterations.assign_add(1)
        nothing = {"entries": 0, "nonfinite": tf.constant(0)}
        metrics.count_step(
            made.worker_state.counters, sent_bytes=extra, dense_bytes=extra, **nothing
        )
        return
    grads, variables = map(list, zip(*trained, strict=True))
    with tf.name_scope(optimizer.name):
        parts = step_inputs.collect_buckets(
            optimizer, grads, variables, hyperparameters, made
        )
        asks = optimizer.iterations.value, optimizer.check_every
        check = divergence.create_check(
            strategy, variables, *asks, optimizer.on_divergence
        )
        outcome, asked = run_buckets(communicator, parts, check)
        if made.adam:
            outcome = made.adam.receive(outcome)
        known = made.use_native, made.rule, hyperparameters.scales_by_learning_rate
        nonfinite = apply_update(optimizer.inner_optimizer, outcome, variables, *known)
        refreshed = made.adam.refresh(communicator) if made.adam else 0
        metrics.count_step(
            made.worker_state.counters,
            entries=outcome.entries,
            sent_bytes=add_counts([outcome.sent_bytes, asked, extra, refreshed]),
            dense_bytes=metrics.dense_bytes(variables) + extra,
            nonfinite=nonfinite,
        )


@keras.saving.register_keras_serializable(package="tf_dgc")
class CompressedOptimizer(OptimizerWrapper):
    """Exchanges gradients by a compression method, around any Keras optimizer.

    Create it in the scope of the same strategy as the model:

    >>> sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    >>> qsgd = tf_dgc.compressors.QSGD(levels=127)
    >>> model.compile(optimizer=tf_dgc.CompressedOptimizer(sgd, qsgd), loss="mse")

    The inner optimizer applies its rule, momentum included, to the sum over workers; an
    Adam is corrected for what waits. Its clipping becomes local gradient clipping.
    `DGCOptimizer` is the case of `TopK` with momentum correction.

    Args:
        inner: a `keras.optimizers.Optimizer`, not yet built; it is copied. Or its name
            or config, as `keras.optimizers.get` takes them.
        compressor: a `tf_dgc.compressors.Compressor`, or the name of a method for its
            defaults; `tf-dgc methods` lists them.
        error_feedback: whether to keep what is not sent in `residual` and add it to the
            next gradient. None for the method's own choice.
        momentum_correction: whether to accumulate the local velocity of an `SGD`
            instead of the gradient (Lin et al., section 3.2); needs error feedback. An
            Adam goes by `adam_correction` alone.
        factor_masking: whether to clear that velocity where entries were sent (section
            3.3), with methods that send some entries and not others. None: that of an
            `SGD`, not in steps whose sparsity is below 99 %. A `Nadam` is never masked:
            it looks ahead before it accumulates.
        adam_correction: whether an inner `Adam`, `AdamW`, `Adamax` or `Nadam` divides
            by its second moment before the exchange, wherever there is error feedback,
            and accumulates what waiting leaves of its momentum. Else an entry that
            comes every T steps moves `T**0.5` times too little. Other rules of that
            fault, as `RMSprop`'s, are warned of, unless it is False.
        rate_correction: whether a gradient that waits counts by the learning rate of
            its own step, as in the momentum of Keras's SGD, and not of that in which it
            is sent; with error feedback, of an `SGD` or a corrected Adam of which
            waiting leaves no momentum (with `beta_1=0.9` from 90 % on; never a `Nadam`)
            and not by `Threshold`, `TwoBit` and `DeMo(sign=True)`.
        min_compress_size: number of entries below which tensors, and those of rank
            below 2, are exempt: sent whole and without loss.
        seed: seed of all random choices; TensorFlow's global seed is not used.
        name: name of the optimizer.
        track_staleness: whether to remember when each entry was last sent, for
            `staleness`, in 4 bytes per entry, which are not saved.
        check_every: number of steps between comparisons of the variables' checksums,
            which travel with what is exchanged, from the first on; None for never.
        on_divergence: reaction on all workers if variables differ: "raise", before
            anything is updated, or "warn"; both name workers and variables.
        exchange: way of sums and gathers, or its name; `tf-dgc exchanges` lists them.
        overlap: whether tensors are exchanged in buckets while the backward pass goes
            on, in as many as a model of the links says; or the seconds that a backward
            pass takes, if they are known. A gradient that is not finite then leaves out
            the step on all workers. None: only if `exchange="auto"` finds that it pays.

    Attributes:
        inner_optimizer: copy of `inner` that applies the update.
        velocity: variables, one per model variable and worker, as are the next three;
            empty where there is no momentum to correct.
        residual: not yet sent, times the rate if `rate_correction` acts, or empty.
        second_moment: moments of the worker's gradients, or an `Adamax`'s largest
            magnitudes; empty without Adam correction.
        largest_moment: largest second moment so far; empty unless an Adam with
            `amsgrad=True` is corrected. All are float64 for float64, else float32.
        compressor_state: variables of the method's own state by name, for each model
            variable; behind them that of all at once, if there is one.
        communicator: object that runs steps, `distribute.communicator.Communicator`.

    Raises:
        ValueError: for settings that do not go together; at build time for a model
            without trainable variables, variables of other dtypes or of another
            strategy, and workers that were started with different models or settings.
    """

    fixed = frozenset(CONFIG_KEYS)

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str | dict,
        compressor: Compressor | str = "top_k",
        *,
        error_feedback: bool | None = None,
        momentum_correction: bool = False,
        factor_masking: bool | None = None,
        adam_correction: bool = True,
        rate_correction: bool = True,
        min_compress_size: int = 1024,
        seed: int = 0,
        name: str = "compressed_optimizer",
        track_staleness: bool = False,
        check_every: int | None = 1000,
        on_divergence: str = "raise",
        exchange: CollectiveAlgorithm | str = "ring",
        overlap: bool | float | None = None,
    ):
        compressor = compressors.get(compressor)
        feedback = validation.uses_error_feedback(compressor, error_feedback)
        validation.check_momentum_correction(momentum_correction, feedback)
        validation.check_min_compress_size(min_compress_size)
        ways = validation.get_exchange(exchange, compressor, feedback)
        divergence.check_divergence_settings(check_every, on_divergence)
        strategy = prepare(tf.distribute.get_strategy())
        inner = get_inner_optimizer(inner)
        validation.check_one_momentum(compressor, inner)
        corrects = bool(momentum_correction), bool(adam_correction) and feedback
        scales_by_learning_rate = (
            rate_correction and feedback and not compressor.has_units
        )
        rule, hyperparameters = extract_hyperparameters(
            inner, *corrects, compressor, scales_by_learning_rate
        )
        validation.check_adam_correction(
            ways, compressor, feedback, bool(hyperparameters.adam)
        )
        check_inner_rule(inner, compressor, feedback, wanted=not adam_correction)
        autotune.check_overlap(overlap, compressor, hyperparameters, track_staleness)
        super().__init__(rule, hyperparameters, name, strategy)
        self.compressor, self.error_feedback = compressor, error_feedback
        self.momentum_correction = bool(momentum_correction)
        self.factor_masking = arguments.check_choice("factor_masking", factor_masking)
        self.adam_correction = bool(adam_correction)
        self.rate_correction = bool(rate_correction)
        self.min_compress_size = int(min_compress_size)
        self.seed = arguments.check_seed(seed)
        self.track_staleness = bool(track_staleness)
        self.check_every = check_every and int(check_every)
        self.on_divergence = on_divergence
        self.exchange = exchange  # by name, if it was given so
        self.overlap = overlap
        self.communicator = Communicator(strategy, ways)
        self.velocity: list[PerWorkerVariable] = []
        self.residual: list[PerWorkerVariable] = []
        self.second_moment: list[PerWorkerVariable] = []
        self.largest_moment: list[PerWorkerVariable] = []
        self.compressor_state: list[MethodState] = []
        self._keeps_residual = feedback
        self.uncompressed_dtype: str | None = None
        self._exclusions = Exclusions()
        self._gradient_check = gradients.GradientCheck(strategy)
        self._counters: keras.Variable | None = None
        self.kept: state.OptimizerState | None = None
        self._adam_variables: list[keras.Variable] = []
        self._accumulation_variables: list[keras.Variable] = []

    # --- before the first step ------------------------------------------------------

    def exclude_from_compression(
        self,
        var_list: Sequence[keras.Variable] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Send these variables whole and without loss, like small ones.

        Like Keras's `exclude_from_weight_decay`; call it on every worker, before the
        optimizer is built. It is part of the config.

        Args:
            var_list: variables of the model.
            var_names: regular expressions; variables in whose path one is found.

        Raises:
            ValueError: if the optimizer is built, and for other arguments.
        """
        validation.check_not_built(self, "exclude_from_compression")
        self._exclusions.add(var_list, var_names)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create the state; all workers compare what they were given.

        Args:
            variables: model's trainable variables.

        Raises:
            ValueError: see the class.
            RuntimeError: if another worker does not come within `TF_DGC_TIMEOUT`
                seconds.
        """
        if self.built or self.is_loaded_without(variables):
            return
        variables = keras_optimizers.distinct_variables(self, variables)
        validation.check_scope(self, self._strategy, variables, "build")
        validation.check_variables(variables)
        self.check_copies()
        use_native = state.compare_workers(self, variables, self._strategy)
        if not variables:
            self.build_without_variables()
            return
        with creating_zero_variables(self._strategy), keras_optimizers.tracked():
            self._create(variables, use_native)

    def _create(self, variables: list[keras.Variable], use_native: bool) -> None:
        self.inner_optimizer.build(variables)
        asks = self._exclusions, self._keeps_residual, self._hyperparameters, use_native
        made = self.kept = state.create_state(self, variables, *asks, self._strategy)
        # Only now it is built: what was refused may be mended, and tried again.
        keras_optimizers.remember_variables(self, variables)
        # Keras saves what is an attribute of the optimizer.
        self._counters = made.worker_state.counters
        self.residual = made.for_model_tensors(made.worker_state.residual)
        self.velocity = made.for_model_tensors(made.worker_state.velocity)
        self.second_moment = made.for_model_tensors(made.worker_state.second_moment)
        self.largest_moment = made.for_model_tensors(made.worker_state.largest_moment)
        self.compressor_state = made.method_state
        self._adam_variables, self._accumulation_variables = (
            made.adam_variables,
            made.accumulation_variables,
        )

    # --- in every step --------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply one step; call it in replica context.

        Args:
            grads: one gradient per variable: a tensor, `tf.IndexedSlices` or None,
                already divided by the number of workers (Keras scales the loss). None
                at all are no step, as in Keras.
            trainable_variables: the variables; the optimizer is built for those of the
                first call.

        Raises:
            ValueError: outside the replica context of the optimizer's strategy, and
                for variables the optimizer was not built with.
        """
        validation.check_scope(self, self._strategy, trainable_variables or (), "apply")
        validation.check_in_replica(self.num_workers)
        grads, variables = gradients.match_gradients(self, grads, trainable_variables)
        if grads:
            self._gradient_check.check(self, variables)
            made = cast(state.OptimizerState, self.kept)  # by now
            asks = self._hyperparameters, made, self._strategy
            accumulate_or_step(self, grads, variables, *asks)

    # --- what users read ------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """Replicas in sync."""
        return self.communicator.num_workers

    @property
    def num_entries(self) -> int:
        """Entries of all variables; 0 before it is built."""
        return sum(t.size for t in self.tensors)

    @property
    def num_compressed(self) -> int:
        """Variables that are not exempt; 0 before the optimizer is built."""
        return sum(not t.uncompressed for t in self.tensors)

    @property
    def tensors(self) -> list[TensorSpec]:
        """Descriptions of all variables; none before the optimizer is built."""
        return self.kept.tensors if self.kept else []

    @property
    def stats(self) -> metrics.CompressionStats:
        """What was sent so far and in the last step, per worker."""
        return metrics.read_stats(
            self._counters, state.algorithm_name(self.kept, self.exchange)
        )

    @property
    def staleness(self) -> Staleness | None:
        """How long entries have waited on this worker; None unless it is tracked.

        Call it outside of a step. It is local: workers differ, and none waits.
        """
        if not self.track_staleness:
            return None
        with self._strategy.scope():
            made = self.kept
            return made.worker_state.staleness() if made else Staleness(0.0, 0.0, 0.0)

    def collect_config(self, serialize: Serialize) -> dict[str, Any]:
        """Return the constructor's arguments: see `OptimizerWrapper`."""
        return config_of(self, serialize, self._exclusions)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "CompressedOptimizer":
        """Build an optimizer from `get_config`'s dictionary."""
        arguments, exclusions = parse_config(config, custom_objects)
        with tf_config.loading_config():
            optimizer = cls(**arguments)
        optimizer._exclusions = exclusions
        return optimizer
