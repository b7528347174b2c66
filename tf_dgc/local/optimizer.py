"""`LocalOptimizer`: local steps, and a synchronization every `period` steps."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tf_dgc import arguments, compressors, metrics, schedules
from tf_dgc._internals import keras_optimizers, keras_rules
from tf_dgc._internals.optimizer_copies import copy_optimizer
from tf_dgc.collectives import CollectiveAlgorithm, Gossip
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.compressors import Compressor, NoCompression
from tf_dgc.local import averaging, gossip, streaming
from tf_dgc.local.averaging import AveragingSynchronizer
from tf_dgc.local.gossip import GossipSynchronizer
from tf_dgc.local.rounds import RoundCounter
from tf_dgc.local.streaming import DelayedSynchronizer
from tf_dgc.local.synchronizer import Synchronizer
from tf_dgc.local.weights import LocalWeightsOptimizer, SwappedWeights
from tf_dgc.multiworker.background import BackgroundReduction
from tf_dgc.multiworker.strategy import prepare
from tf_dgc.multiworker.worker_variables import PerWorkerVariable, SharedVariable
from tf_dgc.optimizers import inner_hyperparameters, unsupported, validation
from tf_dgc.optimizers.diagnostics import Diagnostics, check_diagnostics
from tf_dgc.optimizers.inner import get_inner_optimizer
from tf_dgc.optimizers.inner_hyperparameters import InnerHyperparameters, Serialize
from tf_dgc.optimizers.state import CompressionSettings, OptimizerState


@keras.saving.register_keras_serializable(package="tf_dgc")
class LocalOptimizer(LocalWeightsOptimizer):
    """Takes local steps on each worker, and synchronizes every `period` steps.

    A round has `period` steps. In each, a worker applies its own gradient by the inner
    optimizer, with its own optimizer state, and contacts no other worker. At the end of
    the round the workers exchange their parameter deltas: the anchor, which is the
    weights with which all began the round, minus the worker's weights. Deltas may be
    compressed by any method, with its error feedback. The outer optimizer applies the
    mean delta to the anchor as a gradient, and all workers continue from the result.

    >>> adam = keras.optimizers.AdamW(4e-4)
    >>> nesterov = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    >>> optimizer = tf_dgc.LocalOptimizer(adam, period=100, outer=nesterov)

    `local_sgd`, `post_local_sgd`, `diloco` and `sparse_loco` are presets with the
    settings of their papers.

    A worker whose gradient is not finite skips that step (`skipped`), and still takes
    part in the synchronization. A worker whose weights or inner state are not finite
    takes the weights of the others, and resets its inner state (`resets`). With loss
    scaling (`LossScaleOptimizer(LocalOptimizer(...))`) each worker has its own scale.

    Args:
        inner: a `keras.optimizers.Optimizer` for local steps, not yet built; it is
            copied. Or its name or config. It determines `learning_rate` and
            `iterations` of this optimizer; it may clip, and accumulate gradients.
        period: number of local steps in a round, 1 or more; or a schedule: a function
            of the number of the step with which a round begins, for example
            `tf_dgc.schedules.PiecewiseConstantPeriod`.
        outer: a `keras.optimizers.Optimizer` that applies the mean delta, as `inner`;
            None for `SGD(1.0)`, which sets the anchor to the mean of the workers'
            weights.
        compressor: a `tf_dgc.compressors.Compressor`, or the name of a method, for
            parameter deltas; the default sends them whole.
        error_feedback: whether to keep unsent entries in `residual` and add them to the
            next delta. None for the method's default.
        min_compress_size: tensors of fewer entries, and those of rank below 2, are sent
            uncompressed.
        seed: seed of all random choices of the method.
        name: name of the optimizer.
        diagnostics: a `tf_dgc.Diagnostics`: comparisons of the anchors, every
            `check_every` rounds from the first on, and the consensus distance.
        collective: a collective algorithm, or its name; or `tf_dgc.collectives.Gossip`,
            with which a worker exchanges with its neighbors only, without `outer`.
        delay: number of steps after a round in which its mean is computed in the
            background, at most `period / fragments`; 0 to wait for it.
        fragments: number of fragments of the model that are exchanged in turn: each
            every `period` steps, one of them every `period / fragments`. Needs a
            `delay`.

    Attributes:
        inner_optimizer: copy of `inner` that takes local steps.
        outer_optimizer: copy of `outer` that applies the mean delta.
        anchor: variables, one per model variable, equal on all workers: the weights
            with which the round began; empty with `Gossip`.
        own_replica: variables, one per model variable and worker, flat: the replica of
            this worker's weights that its neighbors hold. With a graph that changes,
            `[phases, n]`. Empty unless `Gossip` compresses.
        residual: variables, one per model variable and worker: unsent entries of
            deltas; empty without error feedback.
        compressor_state: variables of the method's own state by name, for each model
            variable; the state of all tensors at once comes last, if there is one.
        communicator: object that runs exchanges.

    Raises:
        ValueError: for settings that cannot be combined; at build time as
            `CompressedOptimizer`, and for variables without a value per replica.
    """

    config_keys: ClassVar[tuple[str, ...]] = (
        "period",
        "compressor",
        "error_feedback",
        "min_compress_size",
        "seed",
        "diagnostics",
        "collective",
        "delay",
        "fragments",
    )
    fixed = frozenset(config_keys)

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str | dict[str, Any],
        period: int | Callable[[Any], Any],
        *,
        outer: keras.optimizers.Optimizer | str | dict[str, Any] | None = None,
        compressor: Compressor | str = "none",
        error_feedback: bool | None = None,
        min_compress_size: int = 1024,
        seed: int = 0,
        name: str = "local_optimizer",
        diagnostics: Diagnostics = Diagnostics(),
        collective: CollectiveAlgorithm | str = "ring",
        delay: int = 0,
        fragments: int = 1,
    ):
        period = schedules.get_period(period)
        compressor = compressors.get(compressor)
        delay, fragments = streaming.check_fragments(
            delay, fragments, period, compressor, collective
        )
        feedback = validation.uses_error_feedback(compressor, error_feedback)
        validation.check_min_compress_size(min_compress_size)
        algorithm = validation.get_collective(
            collective, compressor, feedback, gossip=True
        )
        check_diagnostics(diagnostics, type(self).__name__, "track_staleness")
        strategy = prepare(tf.distribute.get_strategy())
        gossip.check_gossip(
            algorithm, compressor, error_feedback, outer, strategy.num_replicas_in_sync
        )
        inner_rule = _create_inner(inner)
        settings = CompressionSettings(
            compressor=compressor,
            hyperparameters=InnerHyperparameters({}),
            error_feedback=feedback,
            algorithm=algorithm,
            min_compress_size=int(min_compress_size),
            seed=arguments.check_seed(seed),
        )
        background = BackgroundReduction(strategy) if delay else None
        hook = background.hook if background else None
        super().__init__(
            inner_rule,
            settings,
            name,
            strategy,
            Communicator(strategy, algorithm, hook),
        )
        self.background = background
        self.outer_optimizer = _create_outer(outer, compressor, feedback, fragments)
        keras_optimizers.load_only_if(self.outer_optimizer, lambda: self._is_loaded)
        self.period = period
        self.compressor = compressor
        self.error_feedback = error_feedback
        self.min_compress_size = settings.min_compress_size
        self.seed = settings.seed
        self.diagnostics = diagnostics
        self.collective = collective  # as passed, a name or an object
        self.delay = delay
        self.fragments = fragments
        self.anchor: list[SharedVariable] = []
        self.own_replica: list[PerWorkerVariable] = []

    def check_variables(self, variables: Sequence[keras.Variable]) -> None:
        """Raise `ValueError` for variables that replicas cannot change on their own."""
        super().check_variables(variables)
        validation.check_own_copies(variables)

    def create_variables(
        self, state: OptimizerState, variables: list[keras.Variable]
    ) -> None:
        """Make the state's variables attributes, and create the synchronizer."""
        super().create_variables(state, variables)
        self._synchronizer = self._create_synchronizer(state, variables)
        self.anchor = self._synchronizer.anchor
        self._drift = self._synchronizer.consensus_distance
        self._swapped_weights = SwappedWeights(self._strategy, variables)
        self._rounds = RoundCounter(streaming.fragment_period(self), self._strategy)
        self._progress = self._rounds.variable

    def _create_synchronizer(
        self, state: OptimizerState, variables: list[keras.Variable]
    ) -> Synchronizer:
        if self.delay:
            delayed = DelayedSynchronizer(self, state, variables)
            self._moved = delayed.sent_deltas
            self._received = delayed.received_sums
            return delayed
        if not state.tuned.algorithm.is_neighbor_exchange:
            return AveragingSynchronizer(self, state, variables)
        gossip_synchronizer = GossipSynchronizer(self, state, variables)
        if replicas := gossip_synchronizer.replicas:
            self.own_replica = replicas.own_replica
            self._pull = replicas.mixing_term
            self.compressor_state = replicas.states
        return gossip_synchronizer

    def step(
        self, state: OptimizerState, grads: list[Any], variables: list[keras.Variable]
    ) -> None:
        """Take a local step, and synchronize the workers if the round ends."""
        rounds, synchronizer = self._rounds, self._synchronizer
        assert rounds is not None
        assert synchronizer is not None
        round_ends = rounds.ends()
        synchronizer.start_round(rounds)
        applied = averaging.local_step(
            self.inner_optimizer, grads, variables, self.num_workers, state.use_native
        )
        rounds.count_call(applied)
        if isinstance(synchronizer, DelayedSynchronizer):
            synchronizer.apply_mean_if_due(rounds, round_ends)
        rounds.run_if(round_ends, lambda: synchronizer.synchronize(rounds))

    @property
    def stats(self) -> metrics.CompressionStats:
        """What one worker sent, in total and in the last round; steps are rounds.

        `nonfinite` counts workers that were left out of a synchronization because their
        weights were not finite. Steps that were skipped because of the gradient are
        counted in `skipped`.
        """
        return super().stats

    @property
    def variables(self) -> list[keras.Variable]:
        """Variables of this, the inner and the outer optimizer."""
        variables = super().variables
        return [*variables, *self.outer_optimizer.variables] if variables else []

    def finalize_variable_values(self, var_list: Any) -> None:
        """Let both optimizers set final values, such as averages of the outer one."""
        super().finalize_variable_values(var_list)
        self.outer_optimizer.finalize_variable_values(var_list)
        if self.outer_optimizer.use_ema:  # averages of the anchor, equal on all workers
            self.restart_round()

    @property
    def wrapped_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """Optimizers that Keras saves in addition to this one."""
        return [*super().wrapped_optimizers, self.outer_optimizer]

    def _repr_arguments(self) -> list[str]:
        if isinstance(self.collective, Gossip):
            return super()._repr_arguments()
        text = inner_hyperparameters.describe_constructor(
            type(self.outer_optimizer),
            keras_optimizers.arguments_of(self.outer_optimizer),
        )
        return [*super()._repr_arguments(), f"outer={text}"]

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, with the current learning rate.

        Raises:
            ValueError: as `save_own_variables`, if an HDF5 file is being written.
        """
        self.in_hdf5()
        return super().get_config()

    def collect_config(self, serialize: Serialize) -> dict[str, Any]:
        """Return the constructor's arguments: see `OptimizerWrapper`."""
        gossips = isinstance(self.collective, Gossip)
        outer = None if gossips else serialize(self.outer_optimizer)
        return {**super().collect_config(serialize), "outer": outer}

    def consensus_config(self) -> dict[str, Any]:
        """Return the config that must be equal on all workers."""
        lane = self.background.number if self.background else None
        return {**super().consensus_config(), "lane": lane}

    def schedule_functions(self) -> dict[str, Any]:
        """Return settings, by name, that may be functions of the iteration."""
        return {**super().schedule_functions(), "period": self.period}


def _create_inner(inner: Any) -> keras.optimizers.Optimizer:
    """Return a copy of the inner optimizer whose steps contact no other worker."""
    inner = get_inner_optimizer(inner, steps_locally=True)
    unsupported.check_rule_numbers(inner, NoCompression())
    copy = copy_optimizer(inner, keras_optimizers.count_alone)
    keras_optimizers.step_alone(copy)
    keras_rules.count_age(copy)
    keras_optimizers.leave_out_of_files(copy)
    return copy


def _create_outer(
    outer: Any, compressor: Compressor, feedback: bool, fragments: int
) -> keras.optimizers.Optimizer:
    """Return a copy of the outer optimizer, which applies the mean parameter delta."""
    if outer is None and compressor.homogeneity == 0:
        raise ValueError(
            f"{compressor!r} sends only signs, so each round would move every weight "
            "by 1. Pass an `outer` whose learning rate is the size of that move, for "
            "example `outer=keras.optimizers.SGD(1e-3)`, or another method. Received: "
            "outer=None"
        )
    outer = keras.optimizers.SGD(1.0) if outer is None else outer
    outer = get_inner_optimizer(outer, what="outer")
    validation.check_one_momentum(compressor, outer, "outer")
    streaming.check_outer_with_fragments(outer, fragments)
    unsupported.check_outer_rule(outer, compressor, feedback)
    copy = copy_optimizer(outer)
    keras_optimizers.replace_all_reduce(copy, list)
    return copy
