"""Hierarchical: collectives within each machine, then between machines."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.collectives.algorithm import (
    AlgorithmSteps,
    CollectiveAlgorithm,
    Cost,
    Rank,
    first_dimension,
    sum_rows,
)
from tf_dgc.collectives.requests import AllGather, AllReduce, AllToAll

Machines: TypeAlias = list[list[int]]
"""Workers of each machine, ascending; machines ordered by their first worker."""


@keras.saving.register_keras_serializable(package="tf_dgc")
class Hierarchical(CollectiveAlgorithm):
    """Sums and gathers within each machine, and between counterparts on all machines.

    The i-th workers of all machines are counterparts. To sum, the workers of a machine
    reduce-scatter the vector, each sums its part with its counterparts, and sends the
    result to all workers of its machine. To gather, words are gathered from the
    counterparts first, then within the machine. All of this uses TensorFlow's rings and
    all-to-alls of groups.

    With `DGCOptimizer`, and with `TopK` with error feedback, the workers of a machine
    sum their gradients before they compress: each owns a shard of every compressed
    tensor, accumulates the machine's sum there, and sends its share of the machine's
    entries. A machine together sends as many entries as one worker otherwise does, and
    training proceeds as with one worker per machine.

    Args:
        groups: indices of the workers of each machine, all groups of the same size,
            every worker in one of them; None to group workers by their host in
            `TF_CONFIG`.
    """

    name = "hierarchical"
    reference = "Cho et al., BlueConnect, MLSys 2019"
    sums_within_groups = True

    def __init__(self, groups: Sequence[Sequence[int]] | None = None):
        self.groups = None if groups is None else _check_groups(groups)

    def resolve(self, hosts: Sequence[str]) -> "Hierarchical":
        """Return the algorithm with the groups of these workers.

        Raises:
            ValueError: if `groups` has another number of workers, or if hosts have
                different numbers of workers.
        """
        if self.groups is None:
            return Hierarchical(_group_by_host(hosts))
        number = sum(map(len, self.groups))
        if number != len(hosts):
            raise ValueError(
                "`groups` must have every worker in one of them; pass others, or None "
                f"for the hosts in TF_CONFIG. Received: groups={self.groups}, of "
                f"{number} workers, but there are {len(hosts)}"
            )
        return self

    def node_of(self, worker: int) -> tuple[int, ...]:
        """Return the workers on a worker's machine, ascending, including itself."""
        return next((tuple(g) for g in self.groups or [] if worker in g), (worker,))

    def sum(self, values: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Reduce-scatter, sum the part between machines, and collect all parts."""
        machine, counterparts = self._peers(rank)
        number = len(machine)
        size = first_dimension(values)
        padded = tf.pad(values, [[0, -size % number]])
        (rows,) = yield [AllToAll(tf.reshape(padded, [number, -1]), machine)]
        part = sum_rows(tf.unstack(rows))
        (part,) = yield [AllReduce(part, counterparts)]
        # An all-gather, by an all-to-all of copies: `AllGather` takes only int32.
        (parts,) = yield [AllToAll(tf.tile(part[tf.newaxis], [number, 1]), machine)]
        return tf.ensure_shape(tf.reshape(parts, [-1])[:size], values.shape)

    def gather(self, words: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Gather from counterparts, then within the machine."""
        machine, counterparts = self._peers(rank)
        (gathered,) = yield [AllGather(words, counterparts)]
        (rows,) = yield [AllGather(tf.reshape(gathered, [-1]), machine)]
        rows = tf.reshape(rows, [rank.num_workers, first_dimension(words)])
        machines = self._machines(rank.num_workers)
        # Rows are ordered by index within a machine, then by worker.
        row_workers = [
            w for group in zip(*machines, strict=True) for w in sorted(group)
        ]
        by_worker = sorted(range(rank.num_workers), key=row_workers.__getitem__)
        rows = tf.gather(rows, by_worker)
        return tf.ensure_shape(rows, [rank.num_workers, words.shape[0]])

    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost; an all-to-all is one round, as is each step of a ring."""
        machines, per_machine = self._sizes(num_workers)
        all_to_alls = 2 if per_machine > 1 else 0
        rounds = 2 * (machines - 1) + all_to_alls
        part = num_bytes / per_machine
        within = 2 * (per_machine - 1) * part
        between = 2 * (machines - 1) / machines * part
        total = within + between
        launches = all_to_alls + min(machines - 1, 1)
        return Cost(rounds, total, total, total, launches)

    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost: M - 1 words of M machines, and M from each local worker."""
        machines, per_machine = self._sizes(num_workers)
        rounds = machines - 1 + per_machine - 1
        total = (machines - 1 + (per_machine - 1) * machines) * num_bytes
        launches = min(machines - 1, 1) + min(per_machine - 1, 1)
        return Cost(rounds, total, total, total, launches)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"groups": self.groups}

    def _peers(self, rank: Rank) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return this machine's workers, and the counterparts, with this worker."""
        machine = self.node_of(rank.worker)
        index = machine.index(rank.worker)
        machines = self._machines(rank.num_workers)
        return machine, tuple(sorted(workers[index] for workers in machines))

    def _machines(self, num_workers: int) -> Machines:
        """Return the groups; without any, each worker is a machine of its own."""
        return self.groups or [[worker] for worker in range(num_workers)]

    def _sizes(self, num_workers: int) -> tuple[int, int]:
        """Return the number of machines, and of workers per machine."""
        per_machine = len(self.groups[0]) if self.groups else 1
        return num_workers // per_machine, per_machine


def _check_groups(groups: Sequence[Sequence[int]]) -> Machines:
    try:
        machines = sorted(sorted(int(w) for w in group) for group in groups)
    except (TypeError, ValueError):
        machines = []
    workers = sorted(worker for group in machines for worker in group)
    if not workers or workers != list(range(len(workers))):
        raise ValueError(
            "`groups` must be lists of workers, for each machine one, with every "
            "worker from 0 on in one of them, for example [[0, 1], [2, 3]]; None for "
            f"the hosts in TF_CONFIG. Received: groups={show(groups)}"
        )
    if len(set(map(len, machines))) > 1:
        raise ValueError(
            "`groups` must be of one size: every worker has one counterpart on each of "
            "the other machines. Leave out workers, or use another `collective`. "
            f"Received: groups={show(groups)}"
        )
    return machines


def _group_by_host(hosts: Sequence[str]) -> Machines:
    groups: dict[str, list[int]] = {}
    for worker, host in enumerate(hosts):
        groups.setdefault(host, []).append(worker)
    if len(set(map(len, groups.values()))) > 1:
        numbers = {host: len(workers) for host, workers in groups.items()}
        raise ValueError(
            "`Hierarchical` needs as many workers on each machine as on the others: "
            "every worker has one counterpart on each. Start as many on each, pass "
            "`groups`, or use another `collective`. Received: workers by host "
            f"{numbers}"
        )
    return list(groups.values())
