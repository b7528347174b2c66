"""Any compression method as a Keras optimizer."""

from collections.abc import Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tf_dgc import arguments, compressors
from tf_dgc._internals import keras_optimizers
from tf_dgc.adaptive.unsuited import check_rule
from tf_dgc.cluster import tf_config
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.compressors import Compressor
from tf_dgc.distribute import divergence
from tf_dgc.distribute.communicator import Communicator
from tf_dgc.distribute.preparation import prepare, zeros_expected
from tf_dgc.distribute.worker_variables import PerWorkerVariable
from tf_dgc.exchanges import Exchange
from tf_dgc.inner import takeover
from tf_dgc.inner.descriptions import Serialize
from tf_dgc.inner.wrapper import OptimizerWrapper
from tf_dgc.metrics import counting
from tf_dgc.metrics.staleness import Staleness
from tf_dgc.optimizers import bucketing, kept, matching, stepping, validation
from tf_dgc.optimizers.configuration import SETTINGS, collect, take_apart
from tf_dgc.optimizers.exclusions import Exclusions
from tf_dgc.steps.memory import State


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

    fixed = frozenset(SETTINGS)

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
        exchange: Exchange | str = "ring",
        overlap: bool | float | None = None,
    ):
        compressor = compressors.get(compressor)
        feedback = validation.uses_error_feedback(compressor, error_feedback)
        validation.check_momentum_correction(momentum_correction, feedback)
        validation.check_min_compress_size(min_compress_size)
        ways = validation.get_exchange(exchange, compressor, feedback)
        divergence.check_settings(check_every, on_divergence)
        strategy = prepare(tf.distribute.get_strategy())
        inner = takeover.get_inner(inner)
        validation.check_one_momentum(compressor, inner)
        corrects = bool(momentum_correction), bool(adam_correction) and feedback
        weighs = rate_correction and feedback and not compressor.has_units
        rule, took = takeover.take_over(inner, *corrects, compressor, weighs)
        validation.check_adam_correction(ways, compressor, feedback, bool(took.adam))
        check_rule(inner, compressor, feedback, wanted=not adam_correction)
        bucketing.check(overlap, compressor, took, track_staleness)
        super().__init__(rule, took, name, strategy)
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
        self.compressor_state: list[State] = []
        self._keeps_residual = feedback
        self.exempt_dtype: str | None = None
        self._exclusions = Exclusions()
        self._gradient_check = matching.GradientCheck(strategy)
        self._counters: keras.Variable | None = None
        self.kept: kept.Kept | None = None
        self._of_adam: list[keras.Variable] = []
        self._of_calls: list[keras.Variable] = []

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
        natively = kept.meet(self, variables, self._strategy)
        if not variables:
            self.build_without_variables()
            return
        with zeros_expected(self._strategy), keras_optimizers.tracked():
            self._create(variables, natively)

    def _create(self, variables: list[keras.Variable], natively: bool) -> None:
        self.inner_optimizer.build(variables)
        asks = self._exclusions, self._keeps_residual, self._took, natively
        made = self.kept = kept.make(self, variables, *asks, self._strategy)
        # Only now it is built: what was refused may be mended, and tried again.
        keras_optimizers.remember_variables(self, variables)
        # Keras saves what is an attribute of the optimizer.
        self._counters = made.memory.counters
        self.residual = made.of_model(made.memory.residual)
        self.velocity = made.of_model(made.memory.velocity)
        self.second_moment = made.of_model(made.memory.second_moment)
        self.largest_moment = made.of_model(made.memory.largest_moment)
        self.compressor_state = made.of_method
        self._of_adam, self._of_calls = made.of_adam, made.of_calls

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
        grads, variables = matching.match(self, grads, trainable_variables)
        if grads:
            self._gradient_check.check(self, variables)
            made = cast(kept.Kept, self.kept)  # by now
            asks = self._took, made, self._strategy
            stepping.take_call(self, grads, variables, *asks)

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
        return sum(not t.exempt for t in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """Descriptions of all variables; none before the optimizer is built."""
        return self.kept.tensors if self.kept else []

    @property
    def stats(self) -> counting.CompressionStats:
        """What was sent so far and in the last step, per worker."""
        return counting.read(self._counters, kept.name_of(self.kept, self.exchange))

    @property
    def staleness(self) -> Staleness | None:
        """How long entries have waited on this worker; None unless it is tracked.

        Call it outside of a step. It is local: workers differ, and none waits.
        """
        if not self.track_staleness:
            return None
        with self._strategy.scope():
            made = self.kept
            return made.memory.staleness() if made else Staleness(0.0, 0.0, 0.0)

    def collect_config(self, serialize: Serialize) -> dict[str, Any]:
        """Return the constructor's arguments: see `OptimizerWrapper`."""
        return collect(self, serialize, self._exclusions)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "CompressedOptimizer":
        """Build an optimizer from `get_config`'s dictionary."""
        arguments, exclusions = take_apart(config, custom_objects)
        with tf_config.loading():
            optimizer = cls(**arguments)
        optimizer._exclusions = exclusions
        return optimizer
