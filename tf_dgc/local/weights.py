"""Reading, saving and restoring weights that differ between workers."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import keras_rules, save_hooks
from tf_dgc.local.rounds import RoundCounter
from tf_dgc.local.synchronizer import Synchronizer
from tf_dgc.multiworker import worker_parts
from tf_dgc.multiworker.background import BackgroundReduction
from tf_dgc.multiworker.consensus import wait_for_workers
from tf_dgc.multiworker.worker_variables import ReplicaCopies
from tf_dgc.optimizers import validation
from tf_dgc.optimizers.collective import CollectiveOptimizer


class LocalWeightsOptimizer(CollectiveOptimizer):
    """Base class of optimizers whose workers have different weights for a while."""

    steps_locally = True
    background: BackgroundReduction | None = None  # computes delayed means
    num_full_loads = 0  # number of loaded states that hold the weights of each worker

    _progress: keras.Variable | None = None
    _rounds: RoundCounter | None = None
    _swapped_weights: "SwappedWeights | None" = None
    _synchronizer: Synchronizer | None = None

    # Public.

    @property
    def skipped(self) -> int:
        """Steps that this worker skipped because its gradient held NaN or Inf."""
        return self._rounds.skipped if self._rounds else 0

    @property
    def resets(self) -> int:
        """Rounds after which this worker reset its inner state after NaN or Inf."""
        return self._rounds.resets if self._rounds else 0

    @property
    def consensus_distance(self) -> float | None:
        """Largest L2 distance of a worker's weights from the mean in the last round.

        Equal on all workers, accurate to a few percent; None without
        `Diagnostics(track_consensus_distance=True)`.
        """
        if self._synchronizer is None or self._synchronizer.consensus_distance is None:
            return None
        return float(self._synchronizer.consensus_distance.numpy())

    def consensus(self) -> None:
        """End the round now, so that all workers have the same weights.

        Call it on every worker, outside of steps, for example before saving a model
        that will be used without this optimizer. Does nothing if the weights are the
        same already.

        Raises:
            RuntimeError: if a worker does not call it within `TF_DGC_TIMEOUT` seconds;
                and within `consensus_weights()`.
        """
        self.check_not_swapped("come to a consensus")
        rounds = self._rounds
        if rounds is None or not rounds.calls_since_consensus:
            return
        wait_for_workers(self._strategy, "come to a consensus")
        synchronizer = cast(Synchronizer, self._synchronizer)
        self._strategy.run(lambda: synchronizer.reach_consensus(rounds))

    @contextlib.contextmanager
    def consensus_weights(self, what: str = "look at") -> Iterator[None]:
        """Give the model the weights that all workers agree on, within the context.

        These are the anchor, which every worker holds, so no worker is contacted. Call
        it outside of steps. `evaluate`, `predict`, `save`, and callbacks that save do
        so by themselves. Does nothing where workers do not differ: after a consensus,
        and with one worker.

        Workers that gossip have no anchor. Evaluations, saves and callbacks of `fit`
        that get weights, in which all workers take part, use the mean of the weights,
        by a collective as large as the model. Other uses raise an error until
        `consensus()` is called.

        >>> with optimizer.consensus_weights():
        ...     outputs = model(x)

        Args:
            what: verb that says what the weights are for, for errors.
        """
        swapped, synchronizer = self._swapped_weights, self._synchronizer
        if (
            swapped is None
            or synchronizer is None
            or swapped.own_values
            or not self._weights_differ()
        ):
            yield
            return
        with swapped.swap(synchronizer.consensus_weights(what)):
            yield

    # For training loops and models, `multiworker/consensus_weights.py`.

    @property
    def is_swapped(self) -> bool:
        """Whether the model has the consensus weights now."""
        return bool(self._swapped_weights and self._swapped_weights.own_values)

    def check_not_swapped(self, what: str) -> None:
        """Raise `RuntimeError` within `consensus_weights()`, which would undo a change.

        Args:
            what: verb that says what is about to be done.
        """
        if self.is_swapped:
            raise RuntimeError(
                f"To {what} would be lost here: the model has the consensus weights, "
                "as within `optimizer.consensus_weights()` and during evaluation and "
                "saving, and gets its own weights back afterwards. Do it then."
            )

    def restart_round(self) -> None:
        """Begin a round, after all workers set the same weights.

        Waits for a mean that is being computed, and discards it.
        """
        self._discard_pending_mean()
        if self._rounds is not None:
            self._rounds.restart()

    def trains_any(self, variables: Sequence[keras.Variable]) -> bool:
        """Whether this optimizer trains at least one of these variables."""
        return not self._trained_ids.isdisjoint(map(id, variables))

    def trains_only(self, variables: Sequence[keras.Variable]) -> bool:
        """Whether this optimizer trains no other variables than these."""
        return self._trained_ids.issubset(map(id, variables))

    @property
    def _trained_ids(self) -> set[int]:
        return {id(v) for v in self._trainable_variables}

    def _weights_differ(self) -> bool:
        """Whether this worker may have other weights than other workers."""
        several = self._strategy.num_replicas_in_sync > 1
        rounds = self._rounds
        return several and rounds is not None and rounds.calls_since_consensus > 0

    # Saving.

    @property
    def differing_variables(self) -> list[keras.Variable]:
        """Variables whose value differs between workers, so that each saves its own."""
        if self._progress is None:
            return []
        inner = self.inner_optimizer.variables
        return [*self._trainable_variables, *inner, self._progress]

    def save_own_variables(self, store: Any) -> None:
        """Save the state of all workers, and their weights; call it on every worker.

        Raises:
            ValueError: within a round, if Keras is about to save one worker's weights
                as the model's; and as other optimizers.
        """
        if (
            save_hooks.saving_of("keras") is not None
            and not worker_parts.part_being_written()
        ):
            self._check_saves_consensus()
        if self.background:  # the mean is saved, and applied when it is due
            self.background.finish()
        super().save_own_variables(store)

    def _check_saves_consensus(self) -> None:
        consensus = self.is_swapped or not self._weights_differ()
        validation.check_consensus(self, consensus)

    def load_own_variables(self, store: Any) -> None:
        """Load the state of all workers, and their weights: see `CollectiveOptimizer`.

        Raises:
            RuntimeError: within `consensus_weights()`; and as other optimizers.
        """
        self.check_not_swapped("load the optimizer's state")
        self._discard_pending_mean()
        super().load_own_variables(store)
        if self._is_loaded:  # otherwise a round begins with the model's weights
            self.num_full_loads += 1

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Set all of `variables`: see `OptimizerWrapper`."""
        self._discard_pending_mean()
        super().set_weights(weights)

    def in_restoring(self) -> None:
        """Discard a pending mean, so that it does not change what is restored."""
        self._discard_pending_mean()

    def _discard_pending_mean(self) -> None:
        if self.background:
            self.background.finish()
            self.background.forget()

    def restore_copies(self, copies: ReplicaCopies, values: np.ndarray) -> None:
        """Restore each worker's value of a variable: see `OptimizerWrapper`.

        Raises:
            ValueError: for integers of the inner optimizer, other than counts, if the
                number of workers differs: the mean of them is not defined.
        """
        variable = copies.local[0]
        counts = keras_rules.counts_age(self.inner_optimizer)
        if self._progress is not None:
            counts = [*counts, self._progress]
        is_count = any(
            variable is ReplicaCopies(self._strategy, v.value).local[0] for v in counts
        )
        if (
            not variable.dtype.is_floating
            and not is_count
            and len(values) != self._strategy.num_replicas_in_sync
            and np.any(values != values[:1])
        ):
            raise ValueError(
                "With another number of workers, each begins with the mean of what was "
                f"saved, and {variable.name!r} of the inner optimizer, of dtype "
                f"{variable.dtype.name}, has none. Load with as many workers as saved "
                "it, or load the model's weights alone. Received: different values "
                f"of {len(values)} workers"
            )
        super().restore_copies(copies, values)

    def _copies_of(self, variable: keras.Variable) -> ReplicaCopies:
        swapped = self._swapped_weights
        own_values = swapped.own_values.get(id(variable)) if swapped else None
        return ReplicaCopies(self._strategy, variable.value, own_values)

    def in_checkpoint(self) -> None:
        """Refuse `tf.train.Checkpoint` with several workers: it saves one's weights."""
        if save_hooks.saving_of("checkpoint") or save_hooks.saving_of("restore"):
            validation.check_one_worker(self, self._strategy.num_replicas_in_sync)
            if self.background:
                self.background.finish()

    def in_saved_model(self) -> None:
        """Refuse a SavedModel of one worker's weights."""
        self._check_saves_consensus()

    def in_hdf5(self) -> None:
        """Refuse an HDF5 file of one worker's weights; called to read the config."""
        if save_hooks.saving_of("hdf5"):
            self._check_saves_consensus()


class SwappedWeights:
    """Gives model variables other values for a while; outside of steps.

    Values are exchanged rather than copied, so this takes no memory.

    Args:
        strategy: strategy of the variables.
        variables: variables of the model, without aggregation.

    Attributes:
        own_values: the variables' own values meanwhile, by the variable's id, one per
            local replica; empty if nothing is swapped.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable]
    ):
        self._strategy, self._variables = strategy, variables
        self.own_values: dict[int, list[tf.Tensor]] = {}

    @contextlib.contextmanager
    def swap(self, values: Sequence[Sequence[tf.Tensor]]) -> Iterator[None]:
        """Set other values until the context ends, also by an exception.

        Args:
            values: values of each variable, one per local replica.
        """
        copies = [ReplicaCopies(self._strategy, v.value).local for v in self._variables]
        own_values = [[c.read_value() for c in replicas] for replicas in copies]
        self.own_values = dict(zip(map(id, self._variables), own_values, strict=True))
        try:
            _assign(copies, values)
            yield
        finally:
            _assign(copies, own_values)
            self.own_values = {}


def _assign(
    copies: Sequence[Sequence[tf.Variable]], values: Sequence[Sequence[tf.Tensor]]
) -> None:
    for replicas, replica_values in zip(copies, values, strict=True):
        for copy, value in zip(replicas, replica_values, strict=True):
            copy.assign(value)
