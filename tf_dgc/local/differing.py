"""What is read and saved of workers that have weights of their own for a while."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import keras
import numpy as np

from tf_dgc._internals import ages, checkpoints
from tf_dgc.checkpoint import parts
from tf_dgc.cluster import meeting
from tf_dgc.distribute.background import Background
from tf_dgc.distribute.copies import Copies
from tf_dgc.inner.wrapper import OptimizerWrapper
from tf_dgc.local.ending import Ending
from tf_dgc.local.rounds import Rounds
from tf_dgc.local.shown import Shown
from tf_dgc.optimizers import validation


class DifferingOptimizer(OptimizerWrapper):
    """An optimizer between whose exchanges every worker goes a way of its own."""

    steps_alone = True
    background: Background | None = None  # where means are formed, if that is delayed
    loads = 0  # how often a state was loaded, with weights of each worker

    _progress: keras.Variable | None = None
    _rounds: Rounds | None = None
    _shown: Shown | None = None
    _ending: Ending | None = None

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
        found = self._ending.drift if self._ending else None
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
        meeting.rendezvous(self._strategy, "come to a consensus")
        ending, rounds = cast(Ending, self._ending), self._rounds
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
        with self._shown.instead(self._ending.agreed(what)):  # type: ignore[union-attr]
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
        if checkpoints.closed_last() is not None and not parts.being_written():
            self._check_agreed()
        if self.background:  # what has come is saved, and applied when it is due
            self.background.finish()
        super().save_own_variables(store)

    def _check_agreed(self) -> None:
        validation.check_agreed(self, self.is_shown or not self._differs())

    def load_own_variables(self, store: Any) -> None:
        """Load the state of all workers, and their weights: see `OptimizerWrapper`.

        Raises:
            RuntimeError: within `agreed()`; and as other optimizers.
        """
        self.refuse_while_shown("load the optimizer's state")
        self._drop_what_is_under_way()
        super().load_own_variables(store)
        if self._is_loaded:  # else a round begins, with the model's weights
            self.loads += 1

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Set all of `variables`: see `OptimizerWrapper`."""
        self._drop_what_is_under_way()
        super().set_weights(weights)

    def in_restoring(self) -> None:
        """Let nothing that is under way come behind what a checkpoint restores."""
        self._drop_what_is_under_way()

    def _drop_what_is_under_way(self) -> None:
        if self.background:
            self.background.finish()
            self.background.forget()

    def restore_copies(self, copies: Copies, values: np.ndarray) -> None:
        """Restore what each worker has of a variable: see `OptimizerWrapper`.

        Raises:
            ValueError: for whole numbers of the inner optimizer, other than counts, of
                which another number of workers would need a mean.
        """
        own = copies.local[0]
        counts = ages.counts(self.inner_optimizer)
        known = [Copies(self._strategy, v.value).local[0] for v in counts]
        if self._progress is not None:
            known.append(Copies(self._strategy, self._progress.value).local[0])
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

    def _copies_of(self, variable: keras.Variable) -> Copies:
        hidden = self._shown.hidden.get(id(variable)) if self._shown else None
        return Copies(self._strategy, variable.value, hidden)

    def in_checkpoint(self) -> None:
        """Refuse `tf.train.Checkpoint`, which has one worker's weights of several."""
        if checkpoints.is_checkpointing():
            number = self._strategy.num_replicas_in_sync
            validation.check_one_worker(self, number)
            if self.background:
                self.background.finish()

    def in_saved_model(self) -> None:
        """Refuse a SavedModel of one worker's weights."""
        self._check_agreed()

    def in_hdf5(self) -> None:
        """Refuse a model as HDF5, of one worker's weights, when the config is read."""
        if checkpoints.is_saving_hdf5():
            self._check_agreed()
