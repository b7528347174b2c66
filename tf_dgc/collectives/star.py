"""Star: some workers collect the values of all and send back the result."""

from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tf_dgc.arguments import check_whole
from tf_dgc.collectives.algorithm import (
    AlgorithmSteps,
    CollectiveAlgorithm,
    Cost,
    Rank,
    first_dimension,
    send_to,
    sum_rows,
)
from tf_dgc.collectives.requests import Primitive, SendRecv

_Shards: TypeAlias = Generator[
    list[Primitive], list[tf.Tensor], Sequence[tf.Tensor | None]
]


@keras.saving.register_keras_serializable(package="tf_dgc")
class Star(CollectiveAlgorithm):
    """Sums and gathers at servers, each with a shard of the values.

    The first workers are the servers. All others send each server its shard and
    receive it summed or gathered, as with a synchronous parameter server. With one
    server its links carry everything; with one per worker the load is balanced.

    Args:
        shards: number of servers, 1 or more; all workers if there are fewer.
    """

    name = "star"
    reference = "Li et al., Parameter Server, OSDI 2014"

    def __init__(self, shards: int = 1):
        self.shards = check_whole("shards", shards, 1, " of workers that collect")

    def sum(self, values: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Sum each shard at its server, in the order of workers."""
        shards = self._split(values, rank)
        rows = yield from _collect(shards, rank)
        result = sum_rows(rows) if rows else None
        results = yield from _distribute(result, shards[0], len(shards), rank)
        return tf.concat(results, axis=0)[: first_dimension(values)]

    def gather(self, words: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Gather each shard at its server."""
        shards = self._split(words, rank)
        rows = yield from _collect(shards, rank)
        result = tf.concat(rows, axis=0) if rows else None
        placeholder = tf.tile(shards[0], [rank.num_workers])
        results = yield from _distribute(result, placeholder, len(shards), rank)
        columns = [tf.reshape(r, [rank.num_workers, -1]) for r in results]
        gathered = tf.concat(columns, axis=1)[:, : first_dimension(words)]
        return tf.ensure_shape(gathered, [rank.num_workers, words.shape[0]])

    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost of a server, which is a worker, too."""
        servers = min(self.shards, num_workers)
        total = (num_workers + servers - 2) * num_bytes / servers
        launches = 2 * self._num_rounds(num_workers)
        path = launches * num_bytes / servers
        return Cost(2 * (num_workers - 1), total, total, path, launches)

    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost of a server, which sends all shards it collected to all."""
        servers = min(self.shards, num_workers)
        shard, others = num_bytes / servers, servers - 1
        sent = (num_workers - 1) * num_workers * shard + others * shard
        received = (num_workers - 1) * shard + others * num_workers * shard
        if servers < num_workers:  # a worker that is no server receives all shards
            received = max(received, num_workers * num_bytes)
        rounds = self._num_rounds(num_workers)
        path = rounds * (1 + num_workers) * shard
        return Cost(2 * (num_workers - 1), sent, received, path, 2 * rounds)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"shards": self.shards}

    def _num_rounds(self, num_workers: int) -> int:
        """Return the rounds in each direction; a server may sit out one of them."""
        waits = self.shards > 1 and num_workers > 2
        return num_workers if waits else num_workers - 1

    def _split(self, values: tf.Tensor, rank: Rank) -> list[tf.Tensor]:
        """Return the shard of each server, all of the same length."""
        servers = min(self.shards, rank.num_workers)
        padded = tf.pad(values, [[0, -first_dimension(values) % servers]])
        shards: list[tf.Tensor] = tf.split(padded, servers)
        return shards


def _collect(shards: Sequence[tf.Tensor], rank: Rank) -> _Shards:
    """Return this server's shard of all workers, by worker; [] if it is no server."""
    worker, servers = rank.worker, len(shards)
    rows = {worker: shards[worker]} if worker < servers else {}
    for other in _partners(rank):
        if other == worker or min(worker, other) >= servers:
            yield []
        elif max(worker, other) < servers:
            (rows[other],) = yield [SendRecv(shards[other], other)]
        elif worker < servers:
            (rows[other],) = yield [send_to(shards[worker], other, worker)]
        else:
            yield [send_to(shards[other], worker, other)]
    return [rows[i] for i in range(rank.num_workers)] if rows else []


def _distribute(
    result: tf.Tensor | None, placeholder: tf.Tensor, servers: int, rank: Rank
) -> _Shards:
    """Return each server's result; receivers pass a placeholder of its shape."""
    worker = rank.worker
    results = {worker: result}
    for other in _partners(rank):
        if other == worker or min(worker, other) >= servers:
            yield []
        elif max(worker, other) < servers:
            (results[other],) = yield [SendRecv(result, other)]
        elif worker < servers:
            yield [send_to(result, worker, other)]
        else:
            (results[other],) = yield [send_to(placeholder, other, worker)]
    return [results[i] for i in range(servers)]


def _partners(rank: Rank) -> list[int]:
    """Return the partner of each round; the worker itself in the one it sits out.

    As in a tournament, partners of round r have indices whose sum is r modulo N.
    """
    return [(r - rank.worker) % rank.num_workers for r in range(rank.num_workers)]
