"""The end of a round: by a mean of this worker's weights and its neighbours'."""

import zlib
from collections.abc import Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import clipping, metrics
from tf_dgc.arguments import show
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import CollectiveAlgorithm, Gossip, Rank, neighbors
from tf_dgc.compressors import Compressor, NoCompression
from tf_dgc.local import synchronizer
from tf_dgc.local.rounds import RoundCounter
from tf_dgc.local.synchronizer import Synchronizer
from tf_dgc.multiworker.consensus import wait_for_workers
from tf_dgc.multiworker.worker_variables import PerWorkerVariable
from tf_dgc.optimizers.state import OptimizerState
from tf_dgc.smart_cond import add_counts
from tf_dgc.steps.generic_step import StateTensors, aggregate_tensors
from tf_dgc.steps.neighbors import NeighborCoder, NeighborMessage
from tf_dgc.steps.state import initial_value

# --- Neighbours of a worker in gossip, and what they are to agree about.


class Neighbors:
    """Whom a worker hears in a round, and how much of each it takes.

    Args:
        gossip: graph of the workers.
        place: place of this worker.
        number: number of the round, scalar int64.

    Attributes:
        workers: index of each neighbour, ascending, ints or scalar integer tensors.
        shares: weight of each, scalar float64 tensors.
        step_size: share of the way that a worker goes.
        most: number of neighbours of the worker that has most.
    """

    def __init__(self, gossip: Gossip, place: Rank, number: tf.Tensor):
        matrices = gossip.weights(place.num_workers)
        phases = range(len(matrices))
        near = [gossip.neighbours(place, phase) for phase in phases]
        found = np.array(near, np.int64)
        weights = [m[place.worker, f] for m, f in zip(matrices, found, strict=True)]
        turn = number % len(matrices)
        self.shares = tf.unstack(tf.gather(tf.constant(np.array(weights)), turn))
        self.workers: list[Any] = found[0].tolist()
        if len(phases) > 1:
            self.workers = tf.unstack(tf.gather(tf.constant(found), turn))
        self.step_size = 1.0 if gossip.step_size is None else gossip.step_size
        some = [(m > 0).sum(axis=0) - (np.diag(m) > 0) for m in matrices]
        self.most = int(np.max(some))


class MixingTerm(PerWorkerVariable):
    """What draws a worker to its neighbours: a sum of theirs, by weights of a graph.

    It is saved with a checksum of these weights, as another graph cannot go on with it.

    Args:
        shape: shape on one worker, `[n]`, or `[phases, n]`.
        dtype: name of a dtype, float32 or float64.
        name: name of the variable, without slashes.
        gossip: graph of the workers.
    """

    def __init__(self, shape: Any, dtype: str, name: str, gossip: Gossip):
        self._gossip = gossip
        super().__init__(shape, dtype, name, "zero")

    def gather(self, local: bool = False) -> np.ndarray:
        """Return the values of all workers, `[N, ..., n + 1]`, checksums last.

        Args:
            local: whether to return those of this process only, and contact nobody.
        """
        values = super().gather(local)
        widths = [(0, 0)] * (values.ndim - 1) + [(0, 1)]
        return np.pad(values, widths, constant_values=self._checksum())

    def scatter(self, values: np.ndarray) -> None:
        """Restore what `gather` returned, here or on another number of workers.

        Args:
            values: values of all workers, `[N, ..., n + 1]`, N their number then.

        Raises:
            ValueError: for values of another graph of as many workers that differ, and
                as other variables.
        """
        as_many = len(values) == self._strategy.num_replicas_in_sync
        if not as_many:  # begin with nothing
            super().scatter(np.zeros([len(values), *self.shape]))
            return
        if np.ndim(values) < 2:
            super().scatter(values)  # which says so
            return
        kept = values[..., :-1]
        if np.any(kept) and np.any(values[..., -1] != self._checksum()):
            raise ValueError(
                "What compressing workers know of their neighbours belongs to the "
                f"graph they gossip by, and {self.path!r} was saved with another. Load "
                "with the graph it was saved with; or call `optimizer.consensus()` "
                "there on every worker, and save again, before the graph is changed. "
                f"Received: exchange={show(self._gossip)}"
            )
        super().scatter(kept)

    def _checksum(self) -> int:
        matrices = self._gossip.weights(self._strategy.num_replicas_in_sync)
        checksum = zlib.crc32(np.stack(matrices).tobytes())
        return checksum % 2**24  # which float32 holds exactly


def check_gossip(
    exchange: CollectiveAlgorithm,
    compressor: Compressor,
    error_feedback: bool | None,
    outer: Any,
    num_workers: int,
) -> None:
    """Raise `ValueError` for settings that gossip cannot have.

    Args:
        exchange: exchange of a `LocalOptimizer`.
        compressor: method of it.
        error_feedback: choice of the user.
        outer: outer optimizer that was asked for.
        num_workers: number of workers, N.
    """
    if not isinstance(exchange, Gossip):
        return
    exchange.weights(num_workers)  # of another number of workers they are refused
    if outer is not None:
        raise ValueError(
            "With `Gossip` no worker knows the mean that an outer optimizer would "
            "apply. Pass `outer=None`, also to what passes one by itself, such as "
            f"`diloco`. Received: outer={show(outer)}"
        )
    if compressor.lossless:
        return
    _check_method(compressor, error_feedback)
    if exchange.step_size is None:
        raise ValueError(
            "What is compressed needs a `step_size` of the gossip, in (0, 1], that is "
            "the smaller the less is sent, for example "
            "`Gossip(graph, step_size=0.1)`. Received: step_size=None with "
            f"{compressor!r}"
        )


def _check_method(compressor: Compressor, error_feedback: bool | None) -> None:
    states = compressor.state((64, 64)).values()
    reasons = {
        "needs all workers": compressor.needs_others,
        "keeps a state that neighbours cannot follow": bool(
            any(spec.per_worker for spec in states) or compressor.common_state()
        ),
        "looks at a residual": compressor.reads_residual,
        "is not the sum of what each worker sends": not compressor.additive,
        "errs by more than there is": compressor.error_feedback == "forbidden",
        "forgets": compressor.feedback_decay < 1,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found or error_feedback is False:
        why = found[0] if found else "is asked to go without error feedback"
        raise ValueError(
            "With `Gossip` neighbours follow each worker's weights by what it sends, "
            "and what is not sent is sent later. So a method must be of one tensor at "
            "a time, and have error feedback, as `TopK` and `Uniform8Bit`. Received: "
            f"{compressor!r}, which {why}; error_feedback={show(error_feedback)}"
        )


# --- What neighbours know of each other's weights, where they compress: Choco-SGD.

NeighborValues = list[tf.Tensor]


class OwnReplica(PerWorkerVariable):
    """What those who hear a worker know of one of its tensors.

    Another number of workers begins with the mean, in all phases.
    """

    def scatter(self, values: np.ndarray) -> None:
        """Restore what `gather` returned, of as many workers.

        Args:
            values: values of all workers, `[N, ..., n]`, N the number of workers then.
        """
        if len(values) != self._strategy.num_replicas_in_sync:
            mean = values.reshape(-1, values.shape[-1]).mean(axis=0)
            one = np.broadcast_to(mean, tuple(self.shape))
            values = np.stack([one] * self._strategy.num_replicas_in_sync)
        super().scatter(values)


class NeighborMethodState(PerWorkerVariable):
    """State of a method, of a worker and of those that it hears.

    Another number of workers begins with the first value.

    Args:
        shape: shape on one worker, `[phases, 1 + neighbours, ...]`.
        dtype: name of a dtype, float32 or float64.
        name: name of the variable, without slashes.
        first: value that all begin with, of any shape that can be broadcast.
    """

    def __init__(self, shape: Any, dtype: str, name: str, first: np.ndarray):
        self._begins = first
        super().__init__(shape, dtype, name)

    def first(self) -> tf.Tensor:
        """Return the value to begin with."""
        value = np.broadcast_to(self._begins, tuple(self.shape))
        return tf.constant(value, self.dtype)

    def scatter(self, values: np.ndarray) -> None:
        """Restore what `gather` returned, of as many workers.

        Args:
            values: values of all workers, `[N, ...]`, N the number of workers then.
        """
        if len(values) == self._strategy.num_replicas_in_sync:
            super().scatter(values)
        else:
            for copy in self._copies.local:
                copy.assign(self.first())


class NeighborReplicas:
    """Public copies of weights, which follow what is sent; in replica context.

    A graph with another neighbour in each phase has copies of each, as who hears
    nothing in a phase knows nothing of it.

    Args:
        gossip: graph of the workers.
        compressor: method of what is sent.
        tensors: descriptions of all tensors.
        num_workers: number of workers, N.

    Attributes:
        public: copy of each tensor that all have who hear this worker, `[n]`; of
            several phases `[phases, n]`.
        pull: sum over neighbours of their weight times the difference between their
            copies and this worker's, of each tensor; likewise.
        states: state of the method by name, of each tensor.
    """

    def __init__(
        self,
        gossip: Gossip,
        compressor: Compressor,
        tensors: Sequence[TensorSpec],
        num_workers: int,
    ):
        matrices = gossip.weights(num_workers)
        self._phases = len(matrices)
        phases = [self._phases] if self._phases > 1 else []
        self.public = [
            OwnReplica([*phases, t.size], *_named(t, "public")) for t in tensors
        ]
        self.pull = [
            MixingTerm([*phases, t.size], *_named(t, "pull"), gossip) for t in tensors
        ]
        hears = max(
            np.count_nonzero(row) - (row[i] > 0)
            for m in matrices
            for i, row in enumerate(m)
        )
        rows = [self._phases, 1 + int(hears)]
        self.states = [
            {}
            if t.uncompressed
            else {
                name: NeighborMethodState(
                    [*rows, *spec.shape], *_named(t, name), initial_value(spec, i)
                )
                for name, spec in compressor.state(t.shape).items()
            }
            for i, t in enumerate(tensors)
        ]

    def begin(self, weights: NeighborValues) -> None:
        """Let all copies be these, which all workers have, and states as at first."""
        self.agree(weights)
        for state in self.states:
            for variable in state.values():
                variable.assign(variable.first())

    def agree(self, mean: NeighborValues) -> None:
        """Let all copies be what all workers have."""
        for copy, pull, value in zip(self.public, self.pull, mean, strict=True):
            copy.assign(tf.broadcast_to(value, copy.shape))
            pull.assign(tf.zeros(pull.shape, pull.dtype))

    def read(self, number: tf.Tensor) -> NeighborValues:
        """Return the copies that count in a round, `[n]` of each tensor."""
        return [self._read(copy, number) for copy in self.public]

    def states_of(self, place: int, number: tf.Tensor) -> list[StateTensors]:
        """Return the method's state of each tensor.

        Args:
            place: place of whose it is: 0 for this worker, and 1 and so on for its
                neighbours.
            number: number of the round.
        """
        turn = number % self._phases
        return [
            {name: v.local()[turn, place] for name, v in state.items()}
            for state in self.states
        ]

    def follow(
        self,
        mine: NeighborValues,
        theirs: Sequence[NeighborValues],
        them: Neighbors,
        number: tf.Tensor,
    ) -> tuple[NeighborValues, NeighborValues]:
        """Let copies follow what was sent; return copies and pulls of this round.

        Args:
            mine: values that this worker sent of each tensor.
            theirs: values that each neighbour sent.
            them: neighbours of this round.
            number: number of the round.
        """
        public, pull = [], []
        for i, sent in enumerate(mine):
            public.append(self._read(self.public[i], number) + sent)
            differences = [values[i] - sent for values in theirs]
            drawn = self._read(self.pull[i], number)
            pull.append(drawn + weighted_sum(them.shares, differences))
        self._write(self.public, public, number)
        self._write(self.pull, pull, number)
        return public, pull

    def store_states(
        self, everyone: Sequence[list[StateTensors]], number: tf.Tensor
    ) -> None:
        """Store the states of this worker, and of its neighbours.

        Args:
            everyone: states of each of them, those of this worker first.
            number: number of the round.
        """
        turn = number % self._phases
        for i, state in enumerate(self.states):
            for name, variable in state.items():
                rows = tf.stack([states[i][name] for states in everyone])
                at = tf.stack([[turn, place] for place in range(len(everyone))])
                old = variable.local()
                variable.assign(tf.tensor_scatter_nd_update(old, at, rows))

    def _read(self, variable: PerWorkerVariable, number: tf.Tensor) -> tf.Tensor:
        value = variable.local()
        return value if self._phases == 1 else value[number % self._phases]

    def _write(
        self,
        variables: Sequence[PerWorkerVariable],
        values: NeighborValues,
        number: tf.Tensor,
    ) -> None:
        at = tf.reshape(number % self._phases, [1, 1])
        for variable, value in zip(variables, values, strict=True):
            if self._phases == 1:
                variable.assign(value)
            else:
                old, rows = variable.local(), value[tf.newaxis]
                variable.assign(tf.tensor_scatter_nd_update(old, at, rows))


def weighted_sum(shares: Sequence[tf.Tensor], values: NeighborValues) -> tf.Tensor:
    """Return the sum of values by their shares.

    Args:
        shares: weight of each, scalar float64 tensors.
        values: values of one shape.
    """
    return tf.add_n(
        [tf.cast(s, v.dtype) * v for s, v in zip(shares, values, strict=True)]
    )


def _named(tensor: TensorSpec, name: str) -> tuple[str, str]:
    return tensor.dtype.name, f"{tensor.label.replace('/', '_')}_{name}"


class GossipSynchronizer(Synchronizer):
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

    def __init__(
        self, optimizer: Any, kept: OptimizerState, variables: Sequence[keras.Variable]
    ):
        super().__init__(optimizer, kept, variables)
        self.known: NeighborReplicas | None = None
        if not optimizer.compressor.lossless:
            method, number = optimizer.compressor, optimizer.num_workers
            self.known = NeighborReplicas(
                optimizer.exchange, method, kept.tensors, number
            )

    # --- in replica context ---------------------------------------------------------

    def begin(self, rounds: RoundCounter) -> None:
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

    def end(self, rounds: RoundCounter) -> None:
        """Exchange with the neighbours, and count the round."""
        optimizer, made, number = self._optimizer, self._kept, rounds.number
        weights = self._weights()
        finite = clipping.all_finite(weights, made.use_native)
        made.worker_state.warn_of(finite, number)
        anew = self._inner.begin_anew_unless_finite(weights, made.use_native)
        place = Rank(_worker(), optimizer.num_workers)
        entries, nonfinite, num_bytes = 0, 0, 0
        if place.num_workers > 1:
            them = Neighbors(optimizer.exchange, place, number)
            coder = NeighborCoder(
                optimizer.compressor, made.tensors, optimizer.seed, number
            )
            zeros = [tf.zeros_like(w) for w in weights]
            public = self.known.read(number) if self.known else zeros
            wanted = [
                tf.where(finite, w - p, z)
                for w, p, z in zip(weights, public, zeros, strict=True)
            ]
            states = [self._states(i, number) for i in range(1 + len(them.workers))]
            asks = wanted, finite, place.worker, states[0]
            words, mine = coder.encode(*asks)
            rows = neighbors.gather_from_neighbors(
                words, optimizer.exchange, number, place
            )
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
            nonfinite = add_counts([tf.cast(f, tf.int64) for f in flags])
        self._inner.copy_weights(anew)
        if self.drift:
            by = optimizer.communicator, optimizer.seed, number
            self.drift.measure(self._weights(), *by)
            num_bytes += synchronizer.DISTANCE_BYTES
        self._count(entries, num_bytes, nonfinite)
        rounds.count_round(anew, alike=False)

    def _move(
        self,
        weights: NeighborValues,
        finite: tf.Tensor,
        theirs: Sequence[NeighborMessage],
        them: Neighbors,
    ) -> None:
        """Move towards the neighbours' weights, or to them if the own are lost."""
        there = [tf.cast(s.finite, tf.float64) for s in theirs]
        shares = [s * t for s, t in zip(them.shares, there, strict=True)]
        total = tf.add_n(shares)
        new = []
        for i, own in enumerate(weights):
            heard = weighted_sum(shares, [s.values[i] for s in theirs])
            moved = own + tf.cast(them.step_size, own.dtype) * weighted_sum(
                shares, [s.values[i] - own for s in theirs]
            )
            mean = tf.math.divide_no_nan(heard, tf.cast(total, own.dtype))
            new.append(tf.where(finite, moved, tf.where(total > 0, mean, own)))
        self._set(new)

    def _move_by_copies(
        self,
        weights: NeighborValues,
        finite: tf.Tensor,
        mine: NeighborMessage,
        theirs: Sequence[NeighborMessage],
        them: Neighbors,
        number: tf.Tensor,
    ) -> None:
        """Move as the public copies differ, once they have followed what was sent."""
        known, values = cast(NeighborReplicas, self.known), [s.values for s in theirs]
        public, pull = known.follow(mine.values, values, them, number)
        known.store_states([s.states for s in (mine, *theirs)], number)
        new = [
            tf.where(finite, own, copy) + tf.cast(them.step_size, own.dtype) * drawn
            for own, copy, drawn in zip(weights, public, pull, strict=True)
        ]
        self._set(new)

    def _states(self, place: int, number: tf.Tensor) -> list[StateTensors] | None:
        return self.known.states_of(place, number) if self.known else None

    def consensus(self, rounds: RoundCounter) -> None:
        """Let all workers have the mean of their weights; otherwise as `end`."""
        weights = self._weights()
        anew = self._inner.begin_anew_unless_finite(weights, self._kept.use_native)
        mean, num_bytes, nonfinite = self._mean(weights, rounds.number)
        if self.known:
            self.known.agree(mean)
        self._set(mean)
        self._inner.copy_weights(anew)
        self._count(sum(t.size for t in self._kept.tensors), num_bytes, nonfinite)
        rounds.count_round(anew, alike=True)

    def _mean(
        self, weights: NeighborValues, number: tf.Tensor
    ) -> tuple[NeighborValues, Any, Any]:
        """Return the mean of all that are finite, the bytes, and how many are not.

        Of none it is NaN, so that who looks sees that all of them broke.
        """
        workers = self._optimizer.num_workers
        finite = clipping.all_finite(weights, self._kept.use_native)
        parts = [tf.where(finite, w / workers, tf.zeros_like(w)) for w in weights]
        coder = NeighborCoder(NoCompression(), self._kept.tensors, 0, number)
        step = aggregate_tensors(*coder.given(parts, finite, _worker()))
        (merged, _), _ = self._optimizer.communicator.run(step)
        left = tf.cast(workers - merged.nonfinite, tf.float64)
        share = left / workers
        mean = [
            tf.reshape(r.sum, w.shape) / tf.cast(share, w.dtype)
            for r, w in zip(merged.results, weights, strict=True)
        ]
        return mean, merged.sent_bytes, merged.nonfinite

    def _weights(self) -> NeighborValues:
        """Return the weights, `[n]` of each variable, as wide as they are summed."""
        pairs = zip(self._variables, self._kept.tensors, strict=True)
        return [
            tf.reshape(tf.cast(tf.convert_to_tensor(v.value), t.dtype), [t.size])
            for v, t in pairs
        ]

    def _set(self, weights: NeighborValues) -> None:
        for variable, value in zip(self._variables, weights, strict=True):
            shaped = tf.reshape(tf.cast(value, variable.dtype), variable.shape)
            handle = variable.value.handle  # this replica's own copy
            tf.raw_ops.AssignVariableOp(resource=handle, value=shaped)

    def _count(self, entries: Any, num_bytes: Any, nonfinite: Any) -> None:
        metrics.count_step(
            self._kept.worker_state.counters,
            entries=entries,
            sent_bytes=num_bytes,
            dense_bytes=metrics.dense_bytes(self._variables),
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
        wait_for_workers(self._strategy, f"average their weights to {what}")

        def mean() -> NeighborValues:
            found, *_ = self._mean(self._weights(), tf.constant(0, tf.int64))
            pairs = zip(found, self._variables, strict=True)
            return [tf.reshape(tf.cast(m, v.dtype), v.shape) for m, v in pairs]

        local = self._strategy.experimental_local_results
        return [list(local(value)) for value in self._strategy.run(mean)]


def _worker() -> int:
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))
