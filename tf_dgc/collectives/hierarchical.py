"""Two levels: dense inside a machine, between machines what is compressed."""

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
)
from tf_dgc.collectives.requests import AllGather, AllReduce, AllToAll

Machines: TypeAlias = list[list[int]]
"""Workers of each machine, ascending; machines by their first worker."""


@keras.saving.register_keras_serializable(package="tf_dgc")
class Hierarchical(CollectiveAlgorithm):
    """Sums and gathers inside each machine, and between machines by counterparts.

    The i-th workers of all machines are counterparts. A vector that is summed is split
    among the workers of a machine (reduce-scatter), each part summed over counterparts
    and handed to all of the machine. Words are gathered by counterparts first, then
    inside. All of this is TensorFlow's rings and all-to-alls, of groups.

    Of `DGCOptimizer`, and `TopK` with error feedback, the workers of a machine add up
    their gradients before they compress: each owns a shard of every tensor that is not
    exempt, accumulates the machine's sum there, and sends so many entries of it that
    those of the machine together are as many as one worker's else. So what leaves a
    machine is that of one worker, and steps are those of as many workers as there are
    machines.

    Args:
        groups: indices of the workers of each machine, equally many of each, every
            worker in one of them; None for those that have the same host in
            `TF_CONFIG`.
    """

    name = "hierarchical"
    reference = "Cho et al., BlueConnect, MLSys 2019"
    adds_up_first = True

    def __init__(self, groups: Sequence[Sequence[int]] | None = None):
        self.groups = None if groups is None else _checked(groups)

    def settle(self, hosts: Sequence[str]) -> "Hierarchical":
        """Return the same for these workers.

        Raises:
            ValueError: for groups that are not of these workers, and for hosts with
                different numbers of workers.
        """
        if self.groups is None:
            return Hierarchical(_by_host(hosts))
        number = sum(map(len, self.groups))
        if number != len(hosts):
            raise ValueError(
                "`groups` must have every worker in one of them; pass others, or None "
                f"for the hosts in TF_CONFIG. Received: groups={self.groups}, of "
                f"{number} workers, but there are {len(hosts)}"
            )
        return self

    def node_of(self, worker: int) -> tuple[int, ...]:
        """Return the workers of a worker's machine, ascending, itself among them."""
        return next((tuple(g) for g in self.groups or [] if worker in g), (worker,))

    def sum(self, values: tf.Tensor, place: Rank) -> AlgorithmSteps:
        """Sum the own part inside, then between machines; collect the others' parts."""
        machine, counterparts = self._neighbours(place)
        number = len(machine)
        size = first_dimension(values)
        padded = tf.pad(values, [[0, -size % number]])
        (rows,) = yield [AllToAll(tf.reshape(padded, [number, -1]), machine)]
        (part,) = yield [AllReduce(sum_rows(rows), counterparts)]
        # As all-to-all of copies it is of any type.
        (parts,) = yield [AllToAll(tf.tile(part[tf.newaxis], [number, 1]), machine)]
        return tf.ensure_shape(tf.reshape(parts, [-1])[:size], values.shape)

    def gather(self, words: tf.Tensor, place: Rank) -> AlgorithmSteps:
        """Gather between machines, then inside."""
        machine, counterparts = self._neighbours(place)
        (theirs,) = yield [AllGather(words, counterparts)]
        (rows,) = yield [AllGather(tf.reshape(theirs, [-1]), machine)]
        width = first_dimension(words)
        by_rank = tf.reshape(rows, [place.num_workers, width])
        machines = self._machines(place.num_workers)
        by_ranks = zip(*machines, strict=True)
        order = [worker for counterparts in by_ranks for worker in sorted(counterparts)]
        places = sorted(range(len(order)), key=order.__getitem__)
        everyone = tf.gather(by_rank, places)
        return tf.ensure_shape(everyone, [place.num_workers, words.shape[0]])

    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return it; an all-to-all is one round, and so is each step of a ring."""
        machines, inside = self._numbers(num_workers)
        spreads = 2 if inside > 1 else 0
        rounds = 2 * (machines - 1) + spreads
        part = num_bytes / inside
        each = 2 * (inside - 1) * part + 2 * (machines - 1) / machines * part
        return Cost(rounds, each, each, each, spreads + min(machines - 1, 1))

    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return that of M machines: M - 1 words, and inside M for every neighbour."""
        machines, inside = self._numbers(num_workers)
        rounds = machines - 1 + inside - 1
        each = (machines - 1 + (inside - 1) * machines) * num_bytes
        launches = min(machines - 1, 1) + min(inside - 1, 1)
        return Cost(rounds, each, each, each, launches)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"groups": self.groups}

    def _neighbours(self, place: Rank) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the workers of a worker's machine, and its counterparts with it."""
        machine = self.node_of(place.worker)
        rank = machine.index(place.worker)
        machines = self._machines(place.num_workers)
        return machine, tuple(sorted(workers[rank] for workers in machines))

    def _machines(self, num_workers: int) -> Machines:
        """Return the groups; where none are known, every worker is one."""
        return self.groups or [[worker] for worker in range(num_workers)]

    def _numbers(self, num_workers: int) -> tuple[int, int]:
        """Return the number of machines, and of workers on each."""
        inside = len(self.groups[0]) if self.groups else 1
        return num_workers // inside, inside


def sum_rows(rows: tf.Tensor) -> tf.Tensor:
    """Return the sum of rows, `[n]` of `[members, n]`, in their order."""
    first, *others = tf.unstack(rows)
    for row in others:
        first += row
    return first


def _checked(groups: Sequence[Sequence[int]]) -> Machines:
    """Return the groups in order, or raise `ValueError`."""
    try:
        machines = sorted(sorted(int(w) for w in group) for group in groups)
    except (TypeError, ValueError):
        machines = []
    named = sorted(worker for group in machines for worker in group)
    if not named or named != list(range(len(named))):
        raise ValueError(
            "`groups` must be lists of workers, for each machine one, with every "
            "worker from 0 on in one of them, for example [[0, 1], [2, 3]]; None for "
            f"the hosts in TF_CONFIG. Received: groups={show(groups)}"
        )
    if len(set(map(len, machines))) > 1:
        raise ValueError(
            "`groups` must be of one size: every worker has one counterpart on each of "
            "the other machines. Leave out workers, or use another `exchange`. "
            f"Received: groups={show(groups)}"
        )
    return machines


def _by_host(hosts: Sequence[str]) -> Machines:
    found: dict[str, list[int]] = {}
    for worker, host in enumerate(hosts):
        found.setdefault(host, []).append(worker)
    if len(set(map(len, found.values()))) > 1:
        numbers = {host: len(workers) for host, workers in found.items()}
        raise ValueError(
            "`Hierarchical` needs as many workers on each machine: every worker has "
            "one counterpart on each of the others. Start as many on each, pass "
            f"`groups`, or use another `exchange`. Received: workers by host {numbers}"
        )
    return list(found.values())
