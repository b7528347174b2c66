"""The end of a round: by a mean of this worker's weights and its neighbours'."""

from collections.abc import Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.choice import add_up
from tf_dgc.cluster import meeting
from tf_dgc.compressors import NoCompression
from tf_dgc.distribute import near
from tf_dgc.exchanges import Place
from tf_dgc.local import drift
from tf_dgc.local.ending import Ending
from tf_dgc.local.known import Known, Values, weighted
from tf_dgc.local.neighbours import Neighbours
from tf_dgc.local.rounds import Rounds
from tf_dgc.metrics import counting
from tf_dgc.optimizers.kept import Kept
from tf_dgc.steps.composed import States, run_exchanges
from tf_dgc.steps.near import Coder, Sent
from tf_dgc.transforms import clipping


class Gossiping(Ending):
    """Moves each worker towards the mean of its neighbours: D-PSGD, or Choco-SGD.

    Without loss, x_i moves by the step size times the sum over neighbours j of
    w_ij (x_j - x_i). What is compressed is x_i minus the public copy of x_i that all
    neighbours have; copies follow what is sent, and take the place of x in the sum.

    Args:
        optimizer: `LocalOptimizer` whose rounds they are, its inner optimizer built.
        kept: variables that it keeps.
        variables: variables of the model.

    Attributes:
        known: public copies; None without loss.
    """

    def __init__(self, optimizer: Any, kept: Kept, variables: Sequence[keras.Variable]):
        super().__init__(optimizer, kept, variables)
        self.known: Known | None = None
        if not optimizer.compressor.lossless:
            method, number = optimizer.compressor, optimizer.num_workers
            self.known = Known(optimizer.exchange, method, kept.tensors, number)

    # --- in replica context ---------------------------------------------------------

    def begin(self, rounds: Rounds) -> None:
        """Let the public copies be what all workers begin with, as in the first call.

        And behind weights that were set: what was known was of others.
        """
        known = self.known
        if known is None:
            return

        def copy() -> tf.Tensor:
            known.begin(self._weights())
            return tf.constant(True)

        tf.cond(rounds.alike(), copy, lambda: tf.constant(True))

    def end(self, rounds: Rounds) -> None:
        """Exchange with the neighbours, and count the round."""
        optimizer, made, number = self._optimizer, self._kept, rounds.number
        weights = self._weights()
        finite = clipping.all_finite(weights, made.natively)
        made.memory.warn_of(finite, number)
        anew = self._inner.begin_anew_unless_finite(weights, made.natively)
        place = Place(_worker(), optimizer.num_workers)
        entries, nonfinite, num_bytes = 0, 0, 0
        if place.num_workers > 1:
            them = Neighbours(optimizer.exchange, place, number)
            coder = Coder(optimizer.compressor, made.tensors, optimizer.seed, number)
            zeros = [tf.zeros_like(w) for w in weights]
            public = self.known.read(number) if self.known else zeros
            wanted = [
                tf.where(finite, w - p, z)
                for w, p, z in zip(weights, public, zeros, strict=True)
            ]
            states = [self._states(i, number) for i in range(1 + len(them.workers))]
            asks = wanted, finite, place.worker, states[0]
            words, mine = coder.encode(*asks)
            rows = near.gather(words, optimizer.exchange, number, place)
            theirs = [
                coder.decode(rows[i], wanted, worker, states[1 + i])
                for i, worker in enumerate(them.workers)
            ]
            if self.known:
                self._move_by_copies(weights, finite, mine, theirs, them, number)
            else:
                self._move(weights, finite, theirs, them)
            entries = mine.entries * them.most
            num_bytes = 4 * them.most * tf.size(words, tf.int64)
            flags = [tf.logical_not(s.finite) for s in (mine, *theirs)]
            nonfinite = add_up([tf.cast(f, tf.int64) for f in flags])
        self._inner.copy_weights(anew)
        if self.drift:
            by = optimizer.communicator, optimizer.seed, number
            self.drift.measure(self._weights(), *by)
            num_bytes += drift.NUM_BYTES
        self._count(entries, num_bytes, nonfinite)
        rounds.count_round(anew, alike=False)

    def _move(
        self,
        weights: Values,
        finite: tf.Tensor,
        theirs: Sequence[Sent],
        them: Neighbours,
    ) -> None:
        """Move towards the neighbours' weights, or to them if the own are lost."""
        there = [tf.cast(s.finite, tf.float64) for s in theirs]
        shares = [s * t for s, t in zip(them.shares, there, strict=True)]
        total = tf.add_n(shares)
        new = []
        for i, own in enumerate(weights):
            heard = weighted(shares, [s.values[i] for s in theirs])
            moved = own + tf.cast(them.step_size, own.dtype) * weighted(
                shares, [s.values[i] - own for s in theirs]
            )
            mean = tf.math.divide_no_nan(heard, tf.cast(total, own.dtype))
            new.append(tf.where(finite, moved, tf.where(total > 0, mean, own)))
        self._set(new)

    def _move_by_copies(
        self,
        weights: Values,
        finite: tf.Tensor,
        mine: Sent,
        theirs: Sequence[Sent],
        them: Neighbours,
        number: tf.Tensor,
    ) -> None:
        """Move as the public copies differ, once they have followed what was sent."""
        known, values = cast(Known, self.known), [s.values for s in theirs]
        public, pull = known.follow(mine.values, values, them, number)
        known.store_states([s.states for s in (mine, *theirs)], number)
        new = [
            tf.where(finite, own, copy) + tf.cast(them.step_size, own.dtype) * drawn
            for own, copy, drawn in zip(weights, public, pull, strict=True)
        ]
        self._set(new)

    def _states(self, place: int, number: tf.Tensor) -> list[States] | None:
        return self.known.states_of(place, number) if self.known else None

    def consensus(self, rounds: Rounds) -> None:
        """Let all workers have the mean of their weights; otherwise as `end`."""
        weights = self._weights()
        anew = self._inner.begin_anew_unless_finite(weights, self._kept.natively)
        mean, num_bytes, nonfinite = self._mean(weights, rounds.number)
        if self.known:
            self.known.agree(mean)
        self._set(mean)
        self._inner.copy_weights(anew)
        self._count(sum(t.size for t in self._kept.tensors), num_bytes, nonfinite)
        rounds.count_round(anew, alike=True)

    def _mean(self, weights: Values, number: tf.Tensor) -> tuple[Values, Any, Any]:
        """Return the mean of all that are finite, the bytes, and how many are not.

        Of none it is NaN, so that who looks sees that all of them broke.
        """
        workers = self._optimizer.num_workers
        finite = clipping.all_finite(weights, self._kept.natively)
        parts = [tf.where(finite, w / workers, tf.zeros_like(w)) for w in weights]
        coder = Coder(NoCompression(), self._kept.tensors, 0, number)
        step = run_exchanges(*coder.given(parts, finite, _worker()))
        (merged, _), _ = self._optimizer.communicator.run(step)
        left = tf.cast(workers - merged.nonfinite, tf.float64)
        share = left / workers
        mean = [
            tf.reshape(r.sum, w.shape) / tf.cast(share, w.dtype)
            for r, w in zip(merged.results, weights, strict=True)
        ]
        return mean, merged.sent_bytes, merged.nonfinite

    def _weights(self) -> Values:
        """Return the weights, `[n]` of each variable, as wide as they are summed."""
        pairs = zip(self._variables, self._kept.tensors, strict=True)
        return [
            tf.reshape(tf.cast(tf.convert_to_tensor(v.value), t.dtype), [t.size])
            for v, t in pairs
        ]

    def _set(self, weights: Values) -> None:
        for variable, value in zip(self._variables, weights, strict=True):
            shaped = tf.reshape(tf.cast(value, variable.dtype), variable.shape)
            handle = variable.value.handle  # this replica's own copy
            tf.raw_ops.AssignVariableOp(resource=handle, value=shaped)

    def _count(self, entries: Any, num_bytes: Any, nonfinite: Any) -> None:
        counting.count_step(
            self._kept.memory.counters,
            entries=entries,
            sent_bytes=num_bytes,
            dense_bytes=counting.dense_bytes(self._variables),
            nonfinite=nonfinite,
        )

    # --- outside of steps -----------------------------------------------------------

    def agreed(self, what: str) -> list[list[tf.Tensor]]:
        """Return the mean of all workers' weights, by one collective of all.

        Args:
            what: name of the use.

        Returns:
            Values of each variable, one per local replica.

        Raises:
            ValueError: for what need not be called on all workers.
        """
        if what not in ("test", "save", "keep"):
            raise ValueError(
                "Workers that gossip have weights of their own, and their mean takes "
                "all of them. Call `optimizer.consensus()` on every worker before, by "
                f"which all have that mean. Received: to {what}, with "
                f"exchange={show(self._optimizer.exchange)}"
            )
        meeting.rendezvous(self._strategy, f"average their weights to {what}")

        def mean() -> Values:
            found, *_ = self._mean(self._weights(), tf.constant(0, tf.int64))
            pairs = zip(found, self._variables, strict=True)
            return [tf.reshape(tf.cast(m, v.dtype), v.shape) for m, v in pairs]

        local = self._strategy.experimental_local_results
        return [list(local(value)) for value in self._strategy.run(mean)]


def _worker() -> int:
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))
