"""What is read and saved of workers that have weights of their own for a while."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import keras_rules, save_hooks
from tf_dgc.collectives.background import BackgroundReduction
from tf_dgc.local.rounds import RoundCounter
from tf_dgc.local.synchronizer import Synchronizer
from tf_dgc.multiworker import worker_parts
from tf_dgc.multiworker.consensus import wait_for_workers
from tf_dgc.multiworker.worker_variables import ReplicaCopies
from tf_dgc.optimizers import validation
from tf_dgc.optimizers.collective import CollectiveOptimizer

# --- Weights that are shown in place of those that a worker trains.


class SwappedWeights:
    """Lets variables of the model have other values for a while; outside of steps.

    Values change hands and are not copied, so that it takes no memory.

    Args:
        strategy: strategy of the variables.
        variables: variables of the model, of no aggregation.

    Attributes:
        hidden: values of the variables meanwhile, by the variable's id, one per local
            replica; empty if nothing is shown.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable]
    ):
        self._strategy, self._variables = strategy, variables
        self.hidden: dict[int, list[tf.Tensor]] = {}

    @contextlib.contextmanager
    def instead(self, values: Sequence[Sequence[tf.Tensor]]) -> Iterator[None]:
        """Show values until the end of the context, whatever ends it.

        Args:
            values: values of each variable, one per local replica.
        """
        copies = [ReplicaCopies(self._strategy, v.value).local for v in self._variables]
        hidden = [[c.read_value() for c in replicas] for replicas in copies]
        names = map(id, self._variables)
        self.hidden = dict(zip(names, hidden, strict=True))
        try:
            _assign(copies, values)
            yield
        finally:
            _assign(copies, hidden)
            self.hidden = {}


def _assign(
    copies: Sequence[Sequence[tf.Variable]], values: Sequence[Sequence[tf.Tensor]]
) -> None:
    for replicas, given in zip(copies, values, strict=True):
        for copy, value in zip(replicas, given, strict=True):
            copy.assign(value)


class LocalWeightsOptimizer(CollectiveOptimizer):
    """An optimizer between whose exchanges every worker goes a way of its own."""

    steps_locally = True
    background: BackgroundReduction | None = (
        None  # where means are formed, if that is delayed
    )
    loads = 0  # how often a state was loaded, with weights of each worker

    _progress: keras.Variable | None = None
    _rounds: RoundCounter | None = None
    _shown: SwappedWeights | None = None
    _synchronizer: Synchronizer | None = None

    @property
    def skipped(self) -> int:
        """Steps that this worker left out, as its gradient held NaN or Inf."""
        return self._rounds.skipped if self._rounds else 0

    @property
    def resets(self) -> int:
        """Rounds after which this worker began with an inner state like a new one."""
        return self._rounds.resets if self._rounds else 0

    @property
    def drift(self) -> float | None:
        """Largest distance of a worker's weights from the mean, by `track_drift`.

        As the last round ended, the same on all workers, right to a few per cent; None
        unless it is tracked.
        """
        found = self._synchronizer.drift if self._synchronizer else None
        return None if found is None else float(found.variable.numpy())

    def consensus(self) -> None:
        """End the round now: exchange, if workers differ.

        Call it on every worker, outside of steps, for example before saving what is to
        be used without this optimizer. All then have the same weights.

        Raises:
            RuntimeError: if a worker does not come within `TF_DGC_TIMEOUT` seconds;
                and within `agreed()`.
        """
        self.refuse_while_shown("come to a consensus")
        if self._rounds is None or not self._rounds.apart:
            return
        wait_for_workers(self._strategy, "come to a consensus")
        ending, rounds = cast(Synchronizer, self._synchronizer), self._rounds
        self._strategy.run(lambda: ending.consensus(rounds))

    @contextlib.contextmanager
    def agreed(self, what: str = "look at") -> Iterator[None]:
        """Let the model have what all workers have alike, and then its own again.

        That is the anchor, which every worker holds, so nobody is contacted. Call it
        outside of steps. `evaluate`, `predict`, `save`, and callbacks that save do
        so by themselves. Where workers do not differ, as at a consensus and with one
        worker, nothing is changed.

        Workers that gossip have no anchor. Evaluations, saves and callbacks of `fit`
        that get weights, which all workers take part in, see the mean of their weights,
        which is a collective as large as the model; all else is refused until
        `consensus()`.

        >>> with optimizer.agreed():
        ...     outputs = model(x)

        Args:
            what: verb of what it is for, for errors.
        """
        if self._shown is None or self._shown.hidden or not self._differs():
            yield
            return
        with self._shown.instead(self._synchronizer.agreed(what)):  # type: ignore[union-attr]
            yield

    def refuse_while_shown(self, what: str) -> None:
        """Raise `RuntimeError` within `agreed()`, whose end would undo it.

        Args:
            what: verb of what is refused, for the error.
        """
        if self.is_shown:
            raise RuntimeError(
                f"To {what} would be lost here: the model has the weights that all "
                "workers agree on, as within `optimizer.agreed()` and while it is "
                "evaluated or saved, and gets its own again behind that. Do it then."
            )

    def weights_were_set(self) -> None:
        """Begin a round, as all workers have been given the same weights.

        What is under way is waited for, and counts for nothing.
        """
        self._drop_what_is_under_way()
        if self._rounds is not None:
            self._rounds.begin_anew()

    @property
    def is_shown(self) -> bool:
        """Whether the model has what all workers have alike, as within `agreed()`."""
        return self._shown is not None and bool(self._shown.hidden)

    def trains_some(self, variables: Sequence[keras.Variable]) -> bool:
        """Whether this optimizer trains one of these variables, or more."""
        return not self._trained.isdisjoint(map(id, variables))

    def trains_only(self, variables: Sequence[keras.Variable]) -> bool:
        """Whether this optimizer trains no other variables than these."""
        return self._trained.issubset(map(id, variables))

    @property
    def _trained(self) -> set[int]:
        return {id(v) for v in self._trainable_variables}

    def _differs(self) -> bool:
        """Whether this worker has weights that others may not have."""
        several = self._strategy.num_replicas_in_sync > 1
        return several and self._rounds is not None and self._rounds.apart > 0

    # --- saving ---------------------------------------------------------------------

    @property
    def differing_variables(self) -> list[keras.Variable]:
        """Variables of which each worker has a value of its own, and saves it."""
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
            save_hooks.closed_last() is not None
            and not worker_parts.part_being_written()
        ):
            self._check_agreed()
        if self.background:  # what has come is saved, and applied when it is due
            self.background.finish()
        super().save_own_variables(store)

    def _check_agreed(self) -> None:
        validation.check_consensus(self, self.is_shown or not self._differs())

    def load_own_variables(self, store: Any) -> None:
        """Load the state of all workers, and their weights: see `CollectiveOptimizer`.

        Raises:
            RuntimeError: within `agreed()`; and as other optimizers.
        """
        self.refuse_while_shown("load the optimizer's state")
        self._drop_what_is_under_way()
        super().load_own_variables(store)
        if self._is_loaded:  # else a round begins, with the model's weights
            self.loads += 1

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Set all of `variables`: see `CollectiveOptimizer`."""
        self._drop_what_is_under_way()
        super().set_weights(weights)

    def in_restoring(self) -> None:
        """Let nothing that is under way come behind what a checkpoint restores."""
        self._drop_what_is_under_way()

    def _drop_what_is_under_way(self) -> None:
        if self.background:
            self.background.finish()
            self.background.forget()

    def restore_copies(self, copies: ReplicaCopies, values: np.ndarray) -> None:
        """Restore what each worker has of a variable: see `CollectiveOptimizer`.

        Raises:
            ValueError: for whole numbers of the inner optimizer, other than counts, of
                which another number of workers would need a mean.
        """
        own = copies.local[0]
        counts = keras_rules.counts_age(self.inner_optimizer)
        known = [ReplicaCopies(self._strategy, v.value).local[0] for v in counts]
        if self._progress is not None:
            known.append(ReplicaCopies(self._strategy, self._progress.value).local[0])
        whole = not own.dtype.is_floating and not any(own is count for count in known)
        as_many = len(values) == self._strategy.num_replicas_in_sync
        if whole and not as_many and np.any(values != values[:1]):
            raise ValueError(
                f"Another number of workers begins with means, and {own.name!r} of the "
                f"inner optimizer, of dtype {own.dtype.name}, has none. Load with as "
                "many workers as saved it, or load the model's weights alone. "
                f"Received: values of {len(values)} workers that differ"
            )
        super().restore_copies(copies, values)

    def _copies_of(self, variable: keras.Variable) -> ReplicaCopies:
        hidden = self._shown.hidden.get(id(variable)) if self._shown else None
        return ReplicaCopies(self._strategy, variable.value, hidden)

    def in_checkpoint(self) -> None:
        """Refuse `tf.train.Checkpoint`, which has one worker's weights of several."""
        if save_hooks.is_checkpointing():
            number = self._strategy.num_replicas_in_sync
            validation.check_one_worker(self, number)
            if self.background:
                self.background.finish()

    def in_saved_model(self) -> None:
        """Refuse a SavedModel of one worker's weights."""
        self._check_agreed()

    def in_hdf5(self) -> None:
        """Refuse a model as HDF5, of one worker's weights, when the config is read."""
        if save_hooks.is_saving_hdf5():
            self._check_agreed()
