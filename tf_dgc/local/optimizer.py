"""Local steps, and an exchange of how far they led every so many."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tf_dgc import arguments, compressors, schedules
from tf_dgc._internals import keras_optimizers, keras_rules
from tf_dgc._internals.optimizer_copies import copy_optimizer
from tf_dgc.collectives import CollectiveAlgorithm, Gossip
from tf_dgc.collectives.background import BackgroundReduction
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.compressors import Compressor, NoCompression
from tf_dgc.local import averaging, gossip, streaming
from tf_dgc.local.averaging import AveragingSynchronizer
from tf_dgc.local.gossip import GossipSynchronizer
from tf_dgc.local.rounds import RoundCounter
from tf_dgc.local.streaming import DelayedSynchronizer
from tf_dgc.local.synchronizer import Synchronizer
from tf_dgc.local.weights import LocalWeightsOptimizer, SwappedWeights
from tf_dgc.multiworker import divergence
from tf_dgc.multiworker.strategy import prepare
from tf_dgc.multiworker.worker_variables import PerWorkerVariable, SharedVariable
from tf_dgc.optimizers import inner_hyperparameters, unsupported, validation
from tf_dgc.optimizers.inner import get_inner_optimizer
from tf_dgc.optimizers.inner_hyperparameters import InnerHyperparameters, Serialize
from tf_dgc.optimizers.state import CompressionSettings, OptimizerState

# --- The two optimizers of local steps, made ready for what they are given.


def create_inner(inner: Any) -> keras.optimizers.Optimizer:
    """Return a copy of the inner optimizer, whose steps meet nobody.

    Args:
        inner: an optimizer, or its name or config.

    Raises:
        ValueError: for anything else, and for optimizers that cannot be wrapped.
    """
    inner = get_inner_optimizer(inner, steps_locally=True)
    unsupported.check_rule_numbers(inner, NoCompression())
    rule = copy_optimizer(inner, keras_optimizers.count_alone)
    keras_optimizers.step_alone(rule)
    keras_rules.count_age(rule)
    keras_optimizers.leave_out_of_files(rule)
    return rule


def create_outer(
    outer: Any, compressor: Compressor, feedback: bool, parts: int
) -> keras.optimizers.Optimizer:
    """Return a copy of the outer optimizer, which is given what is exchanged.

    Args:
        outer: an optimizer, or its name or config; None for one that adds the mean.
        compressor: method of the exchange.
        feedback: whether what is not sent is kept back.
        parts: number of parts of the model that take turns.

    Raises:
        ValueError: for anything else, for optimizers that cannot be wrapped, and for
            those that do not go together with the method; for None with one of signs.
    """
    if outer is None and compressor.sends_signs:
        raise ValueError(
            f"{compressor!r} sends signs alone, and not how far workers moved, so each "
            "round would move every weight by 1. Pass an `outer` whose learning rate "
            "is how far it is to be, for example `outer=keras.optimizers.SGD(1e-3)`, "
            "or another method. Received: outer=None"
        )
    outer = keras.optimizers.SGD(1.0) if outer is None else outer
    outer = get_inner_optimizer(outer, what="outer")
    validation.check_one_momentum(compressor, outer, "outer")
    streaming.check_outer_with_fragments(outer, parts)
    unsupported.check_outer_rule(outer, compressor, feedback)
    rule = copy_optimizer(outer)
    keras_optimizers.make_scalars_readable(rule)
    keras_optimizers.replace_all_reduce(rule, list)
    return rule


@keras.saving.register_keras_serializable(package="tf_dgc")
class LocalOptimizer(LocalWeightsOptimizer):
    """Lets every worker take several steps of its own before they exchange.

    In a round each worker takes `period` steps of the inner optimizer, by its own
    gradients and with a state of its own, and contacts nobody. Then the workers
    exchange how far they moved from the anchor, the weights with which all began,
    compressed by any method with its error feedback. The mean, as a gradient, is
    applied to the anchor by the outer optimizer, and all go on from what comes of it.

    >>> adam = keras.optimizers.AdamW(4e-4)
    >>> nesterov = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    >>> optimizer = tf_dgc.LocalOptimizer(adam, period=100, outer=nesterov)

    `local_sgd`, `post_local_sgd`, `diloco` and `sparse_loco` are this with their
    papers' settings. Rounds are counted by calls: a worker whose gradient is not
    finite leaves out its own step, and comes to the exchange with the others; one whose
    weights or inner state are not, takes the weights of the others and goes on with an
    inner state like a new one (`resets`). With loss
    scaling (`LossScaleOptimizer(LocalOptimizer(...))`) each has a scale of its own.

    Args:
        inner: a `keras.optimizers.Optimizer` for the steps of one worker, not yet
            built; it is copied. Or its name or config. Learning rate and iterations of
            this optimizer are its own; it may clip, and accumulate gradients.
        period: number of local steps from one exchange to the next, 1 or more; or a
            schedule: a function of the number of the step that a round begins with, for
            example `tf_dgc.schedules.PiecewiseConstantPeriod`.
        outer: a `keras.optimizers.Optimizer` that applies the mean, likewise; None for
            `SGD(1.0)`, by which the anchor becomes the mean of the workers' weights.
        compressor: a `tf_dgc.compressors.Compressor`, or the name of a method, for how
            far workers moved; the default sends all of it.
        error_feedback: whether to keep what is not sent in `residual` and add it to
            what is to be sent next. None for the method's own choice.
        min_compress_size: number of entries below which tensors, and those of rank
            below 2, are sent whole and without loss.
        seed: seed of all random choices of the method.
        name: name of the optimizer.
        check_every: number of rounds from one in which the workers compare checksums of
            their anchors to the next; the first is one. None for never.
        on_divergence: reaction on all workers if they differ: "raise" or "warn".
        exchange: way of sums and gathers, or its name; or `tf_dgc.collectives.Gossip`,
            by which a worker exchanges with its neighbours only, without `outer`.
        track_drift: whether to measure `drift` as a round ends, which takes one more
            collective, of 4 kB.
        delay: number of steps after a round in which its mean is formed in the
            background, at most a period; 0 to wait for it. See `Delaying`.
        parts: number of parts of the model that take turns: each is exchanged every
            `period` steps, one of them every `period / parts`. With a delay only.

    Attributes:
        inner_optimizer: copy of `inner` that takes local steps.
        outer_optimizer: copy of `outer` that is applied in an exchange.
        anchor: variables, one per model variable, equal on all workers: the weights
            that the round began with; empty with `Gossip`.
        public: variables, one per model variable and worker, flat: what neighbours know
            of this worker's weights; empty but for `Gossip` that compresses. Of a graph
            that changes `[phases, n]`.
        residual: variables, one per model variable and worker, moved and not yet sent;
            empty without error feedback.
        compressor_state: variables of the method's own state by name, for each model
            variable; behind them that of all at once, if there is one.
        communicator: object that runs exchanges.

    Raises:
        ValueError: for settings that do not go together; at build time as
            `CompressedOptimizer`, and for variables that are not each replica's own.
    """

    config_keys: ClassVar[tuple[str, ...]] = (
        "period",
        "compressor",
        "error_feedback",
        "min_compress_size",
        "seed",
        "check_every",
        "on_divergence",
        "exchange",
        "track_drift",
        "delay",
        "parts",
    )
    fixed = frozenset(config_keys)

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str | dict,
        period: int | Callable,
        *,
        outer: keras.optimizers.Optimizer | str | dict | None = None,
        compressor: Compressor | str = "none",
        error_feedback: bool | None = None,
        min_compress_size: int = 1024,
        seed: int = 0,
        name: str = "local_optimizer",
        check_every: int | None = 1000,
        on_divergence: str = "raise",
        exchange: CollectiveAlgorithm | str = "ring",
        track_drift: bool = False,
        delay: int = 0,
        parts: int = 1,
    ):
        period = schedules.get_period(period)
        compressor = compressors.get(compressor)
        delay, parts = streaming.check_fragments(
            delay, parts, period, compressor, exchange
        )
        feedback = validation.uses_error_feedback(compressor, error_feedback)
        validation.check_min_compress_size(min_compress_size)
        algorithm = validation.get_exchange(exchange, compressor, feedback, gossip=True)
        divergence.check_divergence_settings(check_every, on_divergence)
        strategy = prepare(tf.distribute.get_strategy())
        number = strategy.num_replicas_in_sync
        gossip.check_gossip(algorithm, compressor, error_feedback, outer, number)
        rule = create_inner(inner)
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
            rule, settings, name, strategy, Communicator(strategy, algorithm, hook)
        )
        self.background = background
        self.outer_optimizer = create_outer(outer, compressor, feedback, parts)
        keras_optimizers.load_only_if(self.outer_optimizer, lambda: self._is_loaded)
        self.period = period
        self.compressor = compressor
        self.error_feedback = error_feedback
        self.min_compress_size = settings.min_compress_size
        self.seed = settings.seed
        self.check_every = check_every and int(check_every)
        self.on_divergence = on_divergence
        self.exchange = exchange  # by name, if it was given so
        self.delay, self.parts = delay, parts
        self.anchor: list[SharedVariable] = []
        self.public: list[PerWorkerVariable] = []
        self.track_drift = bool(track_drift)

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
        drift = self._synchronizer.drift
        self._drift = drift and drift.variable
        self._shown = SwappedWeights(self._strategy, variables)
        self._rounds = RoundCounter(streaming.fragment_period(self), self._strategy)
        self._progress = self._rounds.variable

    def _create_synchronizer(
        self, state: OptimizerState, variables: list[keras.Variable]
    ) -> Synchronizer:
        if self.delay:
            delayed = DelayedSynchronizer(self, state, variables)
            self._moved, self._received = delayed.moved, delayed.received
            return delayed
        if not state.tuned.algorithm.is_neighbor_exchange:
            return AveragingSynchronizer(self, state, variables)
        gossip_synchronizer = GossipSynchronizer(self, state, variables)
        if known := gossip_synchronizer.known:
            self.public, self._pull = known.public, known.pull
            self.compressor_state = known.states
        return gossip_synchronizer

    # --- in every step --------------------------------------------------------------

    def step(
        self, state: OptimizerState, grads: list, variables: list[keras.Variable]
    ) -> None:
        """Take one local step, and synchronize the workers if the round ends."""
        rounds, synchronizer = self._rounds, self._synchronizer
        assert rounds is not None
        assert synchronizer is not None
        ends = rounds.ends()
        synchronizer.begin(rounds)
        taken = averaging.local_step(
            self.inner_optimizer, grads, variables, self.num_workers, state.use_native
        )
        rounds.count_call(taken)
        if isinstance(synchronizer, DelayedSynchronizer):
            synchronizer.receive(rounds, ends)
        rounds.end(ends, lambda: synchronizer.end(rounds))

    # --- what users read ------------------------------------------------------------

    @property
    def variables(self) -> list[keras.Variable]:
        """The optimizer's variables, those of inner and outer optimizer included."""
        own = super().variables
        return [*own, *self.outer_optimizer.variables] if own else []

    def finalize_variable_values(self, var_list: Any) -> None:
        """Let both optimizers set final values, as the outer one its averages."""
        super().finalize_variable_values(var_list)
        self.outer_optimizer.finalize_variable_values(var_list)
        if self.outer_optimizer.use_ema:  # of the anchor, so that all have the same
            self.weights_were_set()

    @property
    def wrapped_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """Optimizers that Keras saves beside this one."""
        return [*super().wrapped_optimizers, self.outer_optimizer]

    def _repr_arguments(self) -> list[str]:
        if isinstance(self.exchange, Gossip):
            return super()._repr_arguments()
        rule = self.outer_optimizer
        text = inner_hyperparameters.describe_constructor(
            type(rule), keras_optimizers.arguments_of(rule)
        )
        return [*super()._repr_arguments(), f"outer={text}"]

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, with the current learning rate.

        Raises:
            ValueError: as `save_own_variables`, if a file of HDF5 is being written.
        """
        self.in_hdf5()
        return super().get_config()

    def collect_config(self, serialize: Serialize) -> dict[str, Any]:
        """Return the constructor's arguments: see `OptimizerWrapper`."""
        gossips = isinstance(self.exchange, Gossip)
        outer = None if gossips else serialize(self.outer_optimizer)
        return {**super().collect_config(serialize), "outer": outer}

    def consensus_config(self) -> dict[str, Any]:
        """Return the config that must be equal on all workers."""
        lane = self.background.number if self.background else None
        return {**super().consensus_config(), "lane": lane}

    def schedule_functions(self) -> dict[str, Any]:
        """Return settings, by name, that may be functions of the iteration."""
        return {**super().schedule_functions(), "period": self.period}
