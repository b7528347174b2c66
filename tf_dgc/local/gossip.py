"""Gossip: synchronization with the neighbors in a graph, D-PSGD or Choco-SGD."""

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import clipping
from tf_dgc.arguments import show
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import CollectiveAlgorithm, Gossip, Rank
from tf_dgc.collectives.neighbors import gather_from_neighbors
from tf_dgc.compressors import Compressor, NoCompression
from tf_dgc.conditions import add_counts
from tf_dgc.local.rounds import RoundCounter
from tf_dgc.local.synchronizer import Synchronizer, assign_weights
from tf_dgc.multiworker.consensus import wait_for_workers
from tf_dgc.multiworker.worker_variables import PerWorkerVariable
from tf_dgc.optimizers.state import OptimizerState
from tf_dgc.steps.generic_step import StateTensors
from tf_dgc.steps.neighbors import NeighborCoder, NeighborMessage
from tf_dgc.steps.state import initial_value

if TYPE_CHECKING:
    from tf_dgc.local.optimizer import LocalOptimizer

NeighborValues = list[tf.Tensor]  # one flat tensor `[n]` per model variable


class GossipSynchronizer(Synchronizer):
    """Moves each worker toward its neighbors' weights: D-PSGD, or Choco-SGD.

    Without compression, x_i moves by the step size times the sum over neighbors j of
    w_ij (x_j - x_i). With compression, worker i sends the compressed difference of x_i
    and x-hat_i, the replica of its weights that all neighbors hold; replicas follow
    what is sent, and take the place of x in the sum.

    Attributes:
        replicas: replicas of weights; None without compression.
    """

    def __init__(
        self,
        optimizer: "LocalOptimizer",
        state: OptimizerState,
        variables: Sequence[keras.Variable],
    ):
        super().__init__(optimizer, state, variables)
        self._gossip = cast(Gossip, optimizer.collective)
        self.replicas: NeighborReplicas | None = None
        if not isinstance(optimizer.compressor, NoCompression):
            self.replicas = NeighborReplicas(
                self._gossip,
                optimizer.compressor,
                state.tensors,
                optimizer.num_workers,
            )

    def start_round(self, rounds: RoundCounter) -> None:
        """Set the replicas to the weights if all workers have the same.

        That is in the first call, and after weights were set.
        """
        replicas = self.replicas
        if replicas is None:
            return

        def reset() -> tf.Tensor:
            replicas.reset(self._weights())
            return tf.constant(True)

        tf.cond(rounds.weights_equal(), reset, lambda: tf.constant(True))

    def synchronize(self, rounds: RoundCounter) -> None:
        """Exchange with the neighbors, mix, and count the round."""
        optimizer, state, round_number = self._optimizer, self._state, rounds.number
        weights = self._weights()
        finite = clipping.all_finite(weights, state.use_native)
        state.worker_state.warn_if_nonfinite(finite, round_number)
        was_reset = self._inner_state.reset_if_nonfinite(weights, state.use_native)
        entries, num_bytes, nonfinite = 0, 0, 0
        if optimizer.num_workers > 1:
            entries, num_bytes, nonfinite = self._mix(weights, finite, round_number)
        self._inner_state.copy_weights(was_reset)
        if self.consensus_distance is not None:
            num_bytes += self._measure_distance(self._weights(), round_number)
        self._count(entries, num_bytes, self._variables, nonfinite)
        rounds.count_round(was_reset, weights_equal=False)

    def _mix(
        self, weights: NeighborValues, finite: tf.Tensor, round_number: tf.Tensor
    ) -> tuple[Any, Any, Any]:
        """Move toward the neighbors; return entries, bytes and nonfinite messages."""
        optimizer, replicas = self._optimizer, self.replicas
        rank = Rank(_worker_index(), optimizer.num_workers)
        neighbors = Neighbors(self._gossip, rank, round_number)
        coder = NeighborCoder(
            optimizer.compressor, self._state.tensors, optimizer.seed, round_number
        )
        zeros = [tf.zeros_like(w) for w in weights]
        own_replica = replicas.read(round_number) if replicas else zeros
        values = [
            tf.where(finite, w - x, z)
            for w, x, z in zip(weights, own_replica, zeros, strict=True)
        ]
        states = [
            replicas.states_of(i, round_number) if replicas else None
            for i in range(1 + len(neighbors.workers))
        ]
        words, own_message = coder.encode(values, finite, rank.worker, states[0])
        rows = gather_from_neighbors(words, self._gossip, round_number, rank)
        received = [
            coder.decode(rows[i], values, worker, states[1 + i])
            for i, worker in enumerate(neighbors.workers)
        ]
        if replicas:
            new_replica, mixing_term = replicas.update(
                own_message, received, neighbors, round_number
            )
            new_weights = [
                tf.where(finite, w, x) + tf.cast(neighbors.step_size, w.dtype) * m
                for w, x, m in zip(weights, new_replica, mixing_term, strict=True)
            ]
        else:
            new_weights = mix_weights(weights, finite, received, neighbors)
        self._set_weights(new_weights)
        nonfinite = [tf.logical_not(m.finite) for m in (own_message, *received)]
        return (
            own_message.entries * neighbors.max_receivers,
            4 * neighbors.max_receivers * tf.size(words, tf.int64),
            add_counts([tf.cast(flag, tf.int64) for flag in nonfinite]),
        )

    def reach_consensus(self, rounds: RoundCounter) -> None:
        """Set all workers' weights to their mean."""
        weights = self._weights()
        was_reset = self._inner_state.reset_if_nonfinite(
            weights, self._state.use_native
        )
        mean, num_bytes, nonfinite = self._mean(weights, rounds.number)
        if self.replicas:
            self.replicas.set_all(mean)
        self._set_weights(mean)
        self._inner_state.copy_weights(was_reset)
        entries = sum(t.size for t in self._state.tensors)
        self._count(entries, num_bytes, self._variables, nonfinite)
        rounds.count_round(was_reset, weights_equal=True)

    def consensus_weights(self, use: str) -> list[list[tf.Tensor]]:
        """Return the mean of all workers' weights, by one collective of all.

        Raises:
            ValueError: for a use that not all workers take part in.
        """
        if use not in ("test", "save", "keep"):
            raise ValueError(
                "Workers that gossip have different weights, and computing their mean "
                "takes all workers. Call `optimizer.consensus()` on every worker "
                f"before; it sets all weights to the mean. Received: to {use}, with "
                f"collective={show(self._gossip)}"
            )
        wait_for_workers(self._strategy, f"average their weights to {use}")

        def mean() -> NeighborValues:
            values, *_ = self._mean(self._weights(), tf.constant(0, tf.int64))
            return self._shaped(values)

        local = self._strategy.experimental_local_results
        return [list(local(value)) for value in self._strategy.run(mean)]

    def _mean(
        self, weights: NeighborValues, round_number: tf.Tensor
    ) -> tuple[NeighborValues, Any, Any]:
        """Return the mean of all finite weights, the bytes, and how many are not.

        If no worker's weights are finite, the mean is NaN, so that users notice.
        """
        num_workers = self._optimizer.num_workers
        finite = clipping.all_finite(weights, self._state.use_native)
        shares = [tf.where(finite, w / num_workers, tf.zeros_like(w)) for w in weights]
        coder = NeighborCoder(NoCompression(), self._state.tensors, 0, round_number)
        step = coder.start_step(shares, finite, _worker_index())
        (sums, _), _ = self._optimizer.communicator.run(step)
        num_finite = tf.cast(num_workers - sums.nonfinite, tf.float64)
        finite_share = num_finite / num_workers
        mean = [
            tf.reshape(r.sum, w.shape) / tf.cast(finite_share, w.dtype)
            for r, w in zip(sums.results, weights, strict=True)
        ]
        return mean, sums.sent_bytes, sums.nonfinite

    def _weights(self) -> NeighborValues:
        """Return the weights in the dtype in which they are summed."""
        return [
            tf.reshape(tf.cast(tf.convert_to_tensor(v.value), t.dtype), [t.size])
            for v, t in zip(self._variables, self._state.tensors, strict=True)
        ]

    def _shaped(self, values: NeighborValues) -> list[tf.Tensor]:
        return [
            tf.reshape(tf.cast(value, v.dtype), v.shape)
            for value, v in zip(values, self._variables, strict=True)
        ]

    def _set_weights(self, weights: NeighborValues) -> None:
        assign_weights(self._variables, self._shaped(weights))


class Neighbors:
    """A worker's neighbors in one round, and their weights in the mixing matrix.

    Attributes:
        workers: index of each neighbor, ascending, ints or scalar integer tensors.
        weights: mixing weight of each, scalar float64 tensors.
        step_size: gamma in Choco-SGD.
        max_receivers: largest number of neighbors that a worker sends to.
    """

    def __init__(self, gossip: Gossip, rank: Rank, round_number: tf.Tensor):
        matrices = gossip.weights(rank.num_workers)
        num_phases = len(matrices)
        workers = np.array(
            [gossip.neighbors(rank, phase) for phase in range(num_phases)], np.int64
        )
        weights = [m[rank.worker, w] for m, w in zip(matrices, workers, strict=True)]
        phase = round_number % num_phases
        self.weights = tf.unstack(tf.gather(tf.constant(np.array(weights)), phase))
        self.workers: list[Any] = workers[0].tolist()
        if num_phases > 1:
            self.workers = tf.unstack(tf.gather(tf.constant(workers), phase))
        self.step_size = 1.0 if gossip.step_size is None else gossip.step_size
        self.max_receivers = _max_degree(matrices, axis=0)


def _max_degree(matrices: Sequence[np.ndarray], axis: int) -> int:
    """Return the largest number of a worker's receivers (axis 0) or senders (1)."""
    return max(int(np.max((m > 0).sum(axis) - (np.diag(m) > 0))) for m in matrices)


def _worker_index() -> int:
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def weighted_sum(weights: Sequence[tf.Tensor], values: NeighborValues) -> tf.Tensor:
    """Return the sum of values of one shape by scalar float64 weights."""
    return tf.add_n(
        [tf.cast(w, v.dtype) * v for w, v in zip(weights, values, strict=True)]
    )


def mix_weights(
    weights: NeighborValues,
    finite: tf.Tensor,
    received: Sequence[NeighborMessage],
    neighbors: Neighbors,
) -> NeighborValues:
    """Return weights moved toward the neighbors'.

    If they are not finite, return the mean of the neighbors' weights instead.
    """
    mixing_weights = [
        w * tf.cast(m.finite, tf.float64)
        for w, m in zip(neighbors.weights, received, strict=True)
    ]
    total = tf.add_n(mixing_weights)
    new_weights = []
    for i, weight in enumerate(weights):
        values = [m.values[i] for m in received]
        moved = weight + tf.cast(neighbors.step_size, weight.dtype) * weighted_sum(
            mixing_weights, [v - weight for v in values]
        )
        mean = tf.math.divide_no_nan(
            weighted_sum(mixing_weights, values), tf.cast(total, weight.dtype)
        )
        new_weights.append(tf.where(finite, moved, tf.where(total > 0, mean, weight)))
    return new_weights


class NeighborReplicas:
    """Replicas of weights (x-hat) that follow what is sent; in replica context.

    A graph whose edges change has replicas for each of its phases: a worker that is no
    neighbor in a phase receives nothing then.

    Attributes:
        own_replica: replica of this worker's weights, as its neighbors hold it, of each
            tensor, `[n]`; with several phases `[phases, n]`.
        mixing_term: sum over neighbors of their weight times the difference of their
            replica and this worker's, likewise.
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
        self._num_phases = len(matrices)
        phases = [self._num_phases] if self._num_phases > 1 else []
        self.own_replica = [
            OwnReplica([*phases, t.size], t.dtype.name, _variable_name(t, "public"))
            for t in tensors
        ]
        self.mixing_term = [
            MixingTerm(
                [*phases, t.size], t.dtype.name, _variable_name(t, "pull"), gossip
            )
            for t in tensors
        ]
        rows = [self._num_phases, 1 + _max_degree(matrices, axis=1)]
        self.states = [
            {}
            if t.uncompressed
            else {
                name: NeighborMethodState(
                    [*rows, *spec.shape],
                    t.dtype.name,
                    _variable_name(t, name),
                    initial_value(spec, i),
                )
                for name, spec in compressor.state(t.shape).items()
            }
            for i, t in enumerate(tensors)
        ]

    def reset(self, weights: NeighborValues) -> None:
        """Set all replicas to weights that all workers have, and reset the states."""
        self.set_all(weights)
        for state in self.states:
            for variable in state.values():
                variable.assign(variable.first())

    def set_all(self, weights: NeighborValues) -> None:
        """Set all replicas to weights that all workers have."""
        for replica, mixing_term, value in zip(
            self.own_replica, self.mixing_term, weights, strict=True
        ):
            replica.assign(tf.broadcast_to(value, replica.shape))
            mixing_term.assign(tf.zeros(mixing_term.shape, mixing_term.dtype))

    def read(self, round_number: tf.Tensor) -> NeighborValues:
        """Return this round's replica of each tensor of this worker, `[n]`."""
        return [self._read(replica, round_number) for replica in self.own_replica]

    def states_of(self, index: int, round_number: tf.Tensor) -> list[StateTensors]:
        """Return the method's state of each tensor.

        Args:
            index: 0 for this worker, 1 and up for its neighbors.
            round_number: number of the round.
        """
        phase = round_number % self._num_phases
        return [
            {name: v.local()[phase, index] for name, v in state.items()}
            for state in self.states
        ]

    def update(
        self,
        own_message: NeighborMessage,
        received: Sequence[NeighborMessage],
        neighbors: Neighbors,
        round_number: tf.Tensor,
    ) -> tuple[NeighborValues, NeighborValues]:
        """Apply all messages; return this round's replicas and mixing terms."""
        replicas, mixing_terms = [], []
        for i, sent in enumerate(own_message.values):
            replicas.append(self._read(self.own_replica[i], round_number) + sent)
            differences = [m.values[i] - sent for m in received]
            mixing_terms.append(
                self._read(self.mixing_term[i], round_number)
                + weighted_sum(neighbors.weights, differences)
            )
        self._write(self.own_replica, replicas, round_number)
        self._write(self.mixing_term, mixing_terms, round_number)
        self._store_states([m.states for m in (own_message, *received)], round_number)
        return replicas, mixing_terms

    def _store_states(
        self, states: Sequence[list[StateTensors]], round_number: tf.Tensor
    ) -> None:
        phase = round_number % self._num_phases
        positions = tf.stack([[phase, index] for index in range(len(states))])
        for i, variables in enumerate(self.states):
            for name, variable in variables.items():
                rows = tf.stack([state[i][name] for state in states])
                variable.assign(
                    tf.tensor_scatter_nd_update(variable.local(), positions, rows)
                )

    def _read(self, variable: PerWorkerVariable, round_number: tf.Tensor) -> tf.Tensor:
        value = variable.local()
        return (
            value if self._num_phases == 1 else value[round_number % self._num_phases]
        )

    def _write(
        self,
        variables: Sequence[PerWorkerVariable],
        values: NeighborValues,
        round_number: tf.Tensor,
    ) -> None:
        phase = tf.reshape(round_number % self._num_phases, [1, 1])
        for variable, value in zip(variables, values, strict=True):
            if self._num_phases == 1:
                variable.assign(value)
            else:
                old, rows = variable.local(), value[tf.newaxis]
                variable.assign(tf.tensor_scatter_nd_update(old, phase, rows))


def _variable_name(tensor: TensorSpec, suffix: str) -> str:
    return f"{tensor.label.replace('/', '_')}_{suffix}"


class OwnReplica(PerWorkerVariable):
    """Replica of one of this worker's tensors, as its neighbors hold it.

    With another number of workers it is restored as the mean, in all phases.
    """

    def scatter(self, values: np.ndarray) -> None:
        """Restore the values of all workers, `[N, ..., n]`."""
        num_workers = self._strategy.num_replicas_in_sync
        if len(values) != num_workers:
            mean = values.reshape(-1, values.shape[-1]).mean(axis=0)
            values = np.broadcast_to(mean, (num_workers, *self.shape))
        super().scatter(values)


class MixingTerm(PerWorkerVariable):
    """Weighted sum of the differences to the neighbors' replicas.

    It is saved with a checksum of the graph, as it is valid for that graph only.
    """

    def __init__(self, shape: Any, dtype: str, name: str, gossip: Gossip):
        self._gossip = gossip
        super().__init__(shape, dtype, name, "zero")

    def gather(self, local: bool = False) -> np.ndarray:
        """Return the values of all workers, `[N, ..., n + 1]`, checksums last."""
        values = super().gather(local)
        widths = [(0, 0)] * (values.ndim - 1) + [(0, 1)]
        return np.pad(values, widths, constant_values=self._checksum())

    def scatter(self, values: np.ndarray) -> None:
        """Restore what `gather` returned; zeros with another number of workers.

        Raises:
            ValueError: for values other than zero of another graph of as many workers.
        """
        if len(values) != self._strategy.num_replicas_in_sync:
            super().scatter(np.zeros([len(values), *self.shape]))
            return
        if np.ndim(values) < 2:
            super().scatter(values)  # raises an error about the shape
            return
        saved = values[..., :-1]
        if np.any(saved) and np.any(values[..., -1] != self._checksum()):
            raise ValueError(
                "Replicas of compressing workers belong to the graph by which they "
                f"gossip, and {self.path!r} was saved with another graph. Load with "
                "the graph it was saved with; or, before changing the graph, call "
                "`optimizer.consensus()` there on every worker, and save again. "
                f"Received: collective={show(self._gossip)}"
            )
        super().scatter(saved)

    def _checksum(self) -> int:
        matrices = self._gossip.weights(self._strategy.num_replicas_in_sync)
        checksum = zlib.crc32(np.stack(matrices).tobytes())
        return checksum % 2**24  # float32 is exact up to there


class NeighborMethodState(PerWorkerVariable):
    """State of a method, of a worker and its neighbors: `[phases, 1 + neighbors, ...]`.

    With another number of workers it is restored to its initial value.
    """

    def __init__(self, shape: Any, dtype: str, name: str, initial: np.ndarray):
        self._initial = initial
        super().__init__(shape, dtype, name)

    def first(self) -> tf.Tensor:
        """Return the initial value."""
        value = np.broadcast_to(self._initial, tuple(self.shape))
        return tf.constant(value, self.dtype)

    def scatter(self, values: np.ndarray) -> None:
        """Restore the values of all workers, `[N, ...]`."""
        if len(values) == self._strategy.num_replicas_in_sync:
            super().scatter(values)
        else:
            for copy in self._copies.local:
                copy.assign(self.first())


def check_gossip(
    collective: CollectiveAlgorithm,
    compressor: Compressor,
    error_feedback: bool | None,
    outer: Any,
    num_workers: int,
) -> None:
    """Raise `ValueError` for settings of `LocalOptimizer` that gossip cannot have."""
    if not isinstance(collective, Gossip):
        return
    collective.weights(num_workers)  # raises for a matrix of another size
    if outer is not None:
        raise ValueError(
            "With `Gossip` no worker computes the mean that an outer optimizer would "
            "apply. Pass `outer=None`, also to presets that have an outer optimizer, "
            f"such as `diloco`. Received: outer={show(outer)}"
        )
    if isinstance(compressor, NoCompression):
        return
    _check_method(compressor, error_feedback)
    if collective.step_size is None:
        raise ValueError(
            "Compressed gossip needs a `step_size` in (0, 1]; the less a method "
            "sends, the smaller it must be. For example "
            "`Gossip(graph, step_size=0.1)`. Received: step_size=None with "
            f"{compressor!r}"
        )


def _check_method(compressor: Compressor, error_feedback: bool | None) -> None:
    states = compressor.state((64, 64)).values()
    unsupported = {
        "keeps a state that neighbors cannot reproduce": bool(
            any(spec.per_worker for spec in states) or compressor.common_state()
        ),
        "reads the residual": compressor.reads_residual,
        "is not the sum of what each worker sends": not compressor.additive,
        "has errors larger than its input": compressor.error_feedback == "forbidden",
        "decays the residual": compressor.feedback_decay < 1,
        "is used without error feedback": error_feedback is False,
    }
    reasons = [reason for reason, holds in unsupported.items() if holds]
    if reasons:
        raise ValueError(
            "With `Gossip` neighbors reproduce each worker's weights from what it "
            "sends, and unsent entries are sent later. So a method must compress one "
            "tensor at a time and have error feedback, as `TopK` and `Uniform8Bit`. "
            f"Received: {compressor!r}, which {reasons[0]}; "
            f"error_feedback={show(error_feedback)}"
        )
