"""Any compression method as a Keras optimizer."""

from typing import Any, ClassVar

import keras
import tensorflow as tf

from tf_dgc import arguments, compressors, metrics
from tf_dgc._internals import keras_optimizers, tracing
from tf_dgc.collectives import CollectiveAlgorithm
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.compressors import Compressor
from tf_dgc.conditions import add_counts
from tf_dgc.multiworker import divergence
from tf_dgc.multiworker.strategy import prepare
from tf_dgc.multiworker.worker_variables import PerWorkerVariable
from tf_dgc.optimizers import autotune, gradients, validation
from tf_dgc.optimizers.collective import CollectiveOptimizer
from tf_dgc.optimizers.corrections import Corrections, check_corrections
from tf_dgc.optimizers.diagnostics import Diagnostics, check_diagnostics
from tf_dgc.optimizers.inner import extract_hyperparameters, get_inner_optimizer
from tf_dgc.optimizers.state import CompressionSettings, OptimizerState
from tf_dgc.optimizers.unsupported import check_inner_rule
from tf_dgc.optimizers.update import apply_update
from tf_dgc.steps.base import StepInputs, split_uncompressed
from tf_dgc.steps.implementations import StepBucket, run_step
from tf_dgc.steps.staleness import Staleness


@keras.saving.register_keras_serializable(package="tf_dgc")
class CompressedOptimizer(CollectiveOptimizer):
    """Exchanges gradients with a compression method, around any Keras optimizer.

    Create it in the scope of the same strategy as the model:

    >>> sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    >>> qsgd = tf_dgc.compressors.QSGD(levels=127)
    >>> model.compile(optimizer=tf_dgc.CompressedOptimizer(sgd, qsgd), loss="mse")

    The inner optimizer applies its rule, including momentum, to the sum over workers.
    The update of an `Adam` is corrected for delayed entries. Clipping of the inner
    optimizer becomes local gradient clipping. `DGCOptimizer` is this optimizer with
    `TopK` and momentum correction.

    Args:
        inner: a `keras.optimizers.Optimizer` that is not built; the wrapper copies it.
            Or its name or config, as `keras.optimizers.get` accepts them.
        compressor: a `tf_dgc.compressors.Compressor`, or the name of a method;
            `tf-dgc methods` lists them.
        error_feedback: whether to keep unsent entries in `residual` and add them to the
            next gradient. None: the method's default.
        corrections: a `tf_dgc.Corrections`, for delayed entries. Without momentum
            correction by default.
        min_compress_size: tensors with fewer entries, or of rank below 2, are sent
            uncompressed.
        seed: seed of all random choices; TensorFlow's global seed is not used.
        name: name of the optimizer.
        diagnostics: a `tf_dgc.Diagnostics`: comparisons of the workers' weights, and
            the staleness of entries.
        collective: collective algorithm, or its name; `tf-dgc collectives` lists them.
            With `tf_dgc.collectives.Overlapped`, and where "auto" finds that it pays,
            buckets of gradients are exchanged during the backward pass.

    Attributes:
        inner_optimizer: copy of `inner` that applies the update.
        velocity: local momentum, one variable per model variable and worker; empty
            without momentum to correct.
        residual: unsent entries, likewise; empty without error feedback. Multiplied by
            the learning rate if `scale_before_accumulation` applies.
        second_moment: moments of the worker's gradients (the largest magnitudes of an
            `Adamax`), likewise; empty without Adam correction.
        largest_moment: largest second moments so far, likewise; empty unless an Adam
            with `amsgrad=True` is corrected. These four are float64 for float64
            variables, else float32.
        compressor_state: variables of the method's own state by name, for each model
            variable, followed by those of all tensors together, if there are any.
        communicator: runs the collectives.

    Raises:
        ValueError: for invalid combinations of settings. When it is built: for a model
            without trainable variables, variables of unsupported dtypes or of another
            strategy, and workers with different models or settings.
    """

    config_keys: ClassVar[tuple[str, ...]] = (
        "compressor",
        "error_feedback",
        "corrections",
        "min_compress_size",
        "seed",
        "diagnostics",
        "collective",
    )
    fixed = frozenset(config_keys)

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str | dict[str, Any],
        compressor: Compressor | str = "top_k",
        *,
        error_feedback: bool | None = None,
        corrections: Corrections = Corrections(),
        min_compress_size: int = 1024,
        seed: int = 0,
        name: str = "compressed_optimizer",
        diagnostics: Diagnostics = Diagnostics(),
        collective: CollectiveAlgorithm | str = "ring",
    ):
        compressor = compressors.get(compressor)
        feedback = validation.uses_error_feedback(compressor, error_feedback)
        check_corrections(corrections)
        check_diagnostics(diagnostics, type(self).__name__, "track_consensus_distance")
        corrects_momentum = self._corrects_momentum(corrections, feedback)
        validation.check_min_compress_size(min_compress_size)
        algorithm, overlap = validation.resolve_overlap(
            validation.get_collective(collective, compressor, feedback)
        )
        strategy = prepare(tf.distribute.get_strategy())
        inner = get_inner_optimizer(inner)
        validation.check_one_momentum(compressor, inner)
        inner_rule, hyperparameters = extract_hyperparameters(
            inner,
            corrects_momentum,
            corrections.adam and feedback,
            compressor,
            corrections.scale_before_accumulation
            and feedback
            and compressor.homogeneity == 1,
        )
        validation.check_adam_correction(
            algorithm, compressor, feedback, bool(hyperparameters.adam)
        )
        check_inner_rule(inner, compressor, feedback, warn=corrections.adam)
        autotune.check_overlap(
            overlap, compressor, hyperparameters, diagnostics.track_staleness
        )
        settings = CompressionSettings(
            compressor=compressor,
            hyperparameters=hyperparameters,
            error_feedback=feedback,
            algorithm=algorithm,
            factor_masking=corrections.factor_masking,
            min_compress_size=int(min_compress_size),
            seed=arguments.check_seed(seed),
            track_staleness=diagnostics.track_staleness,
            overlap=overlap,
        )
        super().__init__(
            inner_rule, settings, name, strategy, Communicator(strategy, algorithm)
        )
        self.compressor = compressor
        self.error_feedback = error_feedback
        self.corrections = corrections
        self.min_compress_size = settings.min_compress_size
        self.seed = settings.seed
        self.diagnostics = diagnostics
        self.collective = collective  # the name, if it was passed
        self.velocity: list[PerWorkerVariable] = []
        self.second_moment: list[PerWorkerVariable] = []
        self.largest_moment: list[PerWorkerVariable] = []
        self._gradient_check = gradients.GradientCheck(strategy)
        self._adam_variables: list[keras.Variable] = []
        self._accumulation_variables: list[keras.Variable] = []

    def _corrects_momentum(self, corrections: Corrections, feedback: bool) -> bool:
        """Return whether the local velocity of an SGD is accumulated."""
        validation.check_momentum_correction(bool(corrections.momentum), feedback)
        return bool(corrections.momentum)

    def create_variables(
        self, state: OptimizerState, variables: list[keras.Variable]
    ) -> None:
        """Make the state's variables attributes, which Keras saves."""
        super().create_variables(state, variables)
        worker = state.worker_state
        self.velocity = state.for_model_tensors(worker.velocity)
        self.second_moment = state.for_model_tensors(worker.second_moment)
        self.largest_moment = state.for_model_tensors(worker.largest_moment)
        self._adam_variables = state.adam_variables
        self._accumulation_variables = state.accumulation_variables

    # --- in every step --------------------------------------------------------------

    def step(
        self, state: OptimizerState, grads: list[Any], variables: list[keras.Variable]
    ) -> None:
        """Take one step; with gradient accumulation, only in the last of its calls."""
        self._gradient_check.check(self, variables)
        if state.has_memory:
            grads, variables = gradients.add_repeated(grads, variables)
        if state.accumulation is None:
            self._exchange_and_update(state, grads, variables)
        else:
            state.accumulation.call(
                self.inner_optimizer,
                [keras_optimizers.variable_index(self, v) for v in variables],
                grads,
                variables,
                lambda means: self._exchange_and_update(state, means, variables),
            )

    def _exchange_and_update(
        self, state: OptimizerState, grads: list[Any], variables: list[keras.Variable]
    ) -> None:
        communicator = self.communicator
        grads, variables, other_bytes = gradients.overwrite_variables(
            communicator, grads, variables
        )
        if not variables:  # which Keras counts as a step
            self.inner_optimizer.iterations.assign_add(1)
            metrics.count_step(
                state.worker_state.counters,
                entries=0,
                sent_bytes=other_bytes,
                dense_bytes=other_bytes,
                nonfinite=tf.constant(0),
            )
            return
        # Clip, scale by the learning rate.
        buckets = self._create_buckets(state, grads, variables)
        # Correct, compress, exchange.
        check = divergence.create_check(
            self._strategy,
            variables,
            self.inner_optimizer.iterations.value,
            self.diagnostics.check_every,
            self.diagnostics.on_divergence,
        )
        outcome, check_bytes = run_step(communicator, buckets, check)
        # Decode, sum, update.
        if state.adam:
            outcome = state.adam.remove_sample(outcome)
        nonfinite = apply_update(
            self.inner_optimizer,
            outcome,
            variables,
            state.use_native,
            state.adam.variant.native_rule if state.adam else None,
            self.settings.hyperparameters.scales_by_learning_rate,
        )
        moment_bytes = state.adam.synchronize(communicator) if state.adam else 0
        sent_bytes = [outcome.sent_bytes, check_bytes, other_bytes, moment_bytes]
        metrics.count_step(
            state.worker_state.counters,
            entries=outcome.entries,
            sent_bytes=add_counts(sent_bytes),
            dense_bytes=metrics.dense_bytes(variables) + other_bytes,
            nonfinite=nonfinite,
        )

    def _create_inputs(
        self, state: OptimizerState, grads: list[Any], variables: list[keras.Variable]
    ) -> StepInputs:
        """Clip and scale gradients, and return the step's inputs."""
        settings = self.settings
        clipped, scales = gradients.clip_gradients(
            settings,
            grads,
            variables,
            self.num_workers,
            settings.hyperparameters.loss_scale,
        )
        inputs = gradients.create_inputs(
            settings,
            clipped,
            scales,
            [keras_optimizers.variable_index(self, v) for v in variables],
            state.worker_state,
            compressor=state.tuned.compressor,
            iteration=self.inner_optimizer.iterations.value,
            worker=tf.distribute.get_replica_context().replica_id_in_sync_group,
            num_workers=self.num_workers,
            drops_entries=self.communicator.drops_entries,
            all_workers_native=state.use_native,
            machine=self.communicator.node_workers(),
        )
        if settings.hyperparameters.scales_by_learning_rate:
            inputs = gradients.scale_by_learning_rate(
                inputs, self.inner_optimizer.learning_rate
            )
        if state.adam:
            inputs = state.adam.precondition(inputs)
        return inputs

    def _create_buckets(
        self, state: OptimizerState, grads: list[Any], variables: list[keras.Variable]
    ) -> list[StepBucket]:
        """Return the step's inputs in buckets; in one, if it does not overlap.

        It does not within XLA, which exchanges nothing, nor if the global norm of all
        gradients is clipped, nor if a variable occurs several times.
        """
        indices = [keras_optimizers.variable_index(self, v) for v in variables]
        place_of = {index: place for place, index in enumerate(indices)}
        buckets = [
            [place_of[i] for i in bucket if i in place_of]
            for bucket in state.tuned.buckets
        ]
        buckets = [bucket for bucket in buckets if bucket]
        if (
            len(buckets) < 2
            or len(place_of) < len(variables)
            or self.settings.hyperparameters.clipping["global_clipnorm"]
            or tracing.in_xla_context()
        ):
            everything = range(len(variables))
            return [
                StepBucket(everything, self._create_inputs(state, grads, variables))
            ]
        shares = split_uncompressed(
            [state.tensors[i] for i in indices], self.num_workers
        )
        separate = len(shares) > 1
        return [
            StepBucket(
                bucket,
                self._create_inputs(
                    state, [grads[i] for i in bucket], [variables[i] for i in bucket]
                )._replace(separate_uncompressed=separate),
            )
            for bucket in buckets
        ]

    @property
    def staleness(self) -> Staleness | None:
        """How long entries have been delayed on this worker; None unless tracked.

        Read it outside of a step. It is local, and differs between workers.
        """
        if not self.diagnostics.track_staleness:
            return None
        with self._strategy.scope():
            state = self.state
            return state.worker_state.staleness() if state else Staleness(0.0, 0.0, 0.0)
