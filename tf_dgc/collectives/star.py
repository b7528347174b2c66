"""Star: some workers collect what all have, and send back what comes of it."""

from typing import Any

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
)
from tf_dgc.collectives.requests import SendRecv


@keras.saving.register_keras_serializable(package="tf_dgc")
class Star(CollectiveAlgorithm):
    """Sums and gathers at servers, each with a shard of the values.

    The first workers are the servers: all others send them the shard that is theirs,
    and get it back summed or gathered, as with a synchronous parameter server. With one
    the links of that one carry everything; with as many as there are workers it is
    balanced.

    Args:
        shards: number of servers, 1 or more; all workers if there are fewer.
    """

    name = "star"
    reference = "Li et al., Parameter Server, OSDI 2014"

    def __init__(self, shards: int = 1):
        self.shards = check_whole("shards", shards, 1, " of workers that collect")

    def sum(self, values: tf.Tensor, place: Rank) -> AlgorithmSteps:
        """Sum each shard at its server, worker after worker."""
        shards = self._split(values, place)
        rows = yield from self._collect(shards, place)
        mine = None if rows is None else _add(rows)
        back = yield from self._send_back(mine, shards[0], place)
        return tf.concat(back, axis=0)[: first_dimension(values)]

    def gather(self, words: tf.Tensor, place: Rank) -> AlgorithmSteps:
        """Gather each shard at its server."""
        shards = self._split(words, place)
        rows = yield from self._collect(shards, place)
        mine = None if rows is None else tf.concat(rows, axis=0)
        empty = tf.tile(shards[0], [place.num_workers])
        back = yield from self._send_back(mine, empty, place)
        columns = [tf.reshape(b, [place.num_workers, -1]) for b in back]
        everyone = tf.concat(columns, axis=1)[:, : first_dimension(words)]
        return tf.ensure_shape(everyone, [place.num_workers, words.shape[0]])

    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return that of a server, which is a worker as well."""
        servers = min(self.shards, num_workers)
        each = (num_workers + servers - 2) * num_bytes / servers
        meetings = 2 * self._meetings(num_workers)
        path = meetings * num_bytes / servers
        return Cost(2 * (num_workers - 1), each, each, path, meetings)

    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return that of a server, which sends what it has of all to all."""
        servers = min(self.shards, num_workers)
        shard, others = num_bytes / servers, servers - 1
        sent = (num_workers - 1) * num_workers * shard + others * shard
        received = (num_workers - 1) * shard + others * num_workers * shard
        if servers < num_workers:  # who is none gets all shards back
            received = max(received, num_workers * num_bytes)
        meetings = self._meetings(num_workers)
        path = meetings * (1 + num_workers) * shard
        return Cost(2 * (num_workers - 1), sent, received, path, 2 * meetings)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"shards": self.shards}

    def _meetings(self, num_workers: int) -> int:
        """Return the rounds that go by, each way; in one of them a server waits."""
        waits = self.shards > 1 and num_workers > 2
        return num_workers if waits else num_workers - 1

    def _servers(self, place: Rank) -> int:
        return min(self.shards, place.num_workers)

    def _split(self, values: tf.Tensor, place: Rank) -> list[tf.Tensor]:
        """Return the shard of each server, all of one length."""
        servers = self._servers(place)
        padded = tf.pad(values, [[0, -first_dimension(values) % servers]])
        return tf.split(padded, servers)

    def _collect(self, shards: list[tf.Tensor], place: Rank) -> Any:
        """Return the shard of all workers, by worker, if this one is a server."""
        worker, servers = place.worker, len(shards)
        rows = {worker: shards[worker]} if worker < servers else {}
        for other in _partners(place):
            if other == worker or min(worker, other) >= servers:
                yield []
            elif max(worker, other) < servers:
                (rows[other],) = yield [SendRecv(shards[other], other)]
            elif worker < servers:
                (rows[other],) = yield [send_to(shards[worker], other, worker)]
            else:
                yield [send_to(shards[other], worker, other)]
        return [rows[i] for i in range(place.num_workers)] if rows else None

    def _send_back(self, mine: tf.Tensor | None, empty: tf.Tensor, place: Rank) -> Any:
        """Return what each server has; `empty` has the shape of it."""
        worker, servers = place.worker, self._servers(place)
        found = {worker: mine}
        for other in _partners(place):
            if other == worker or min(worker, other) >= servers:
                yield []
            elif max(worker, other) < servers:
                (found[other],) = yield [SendRecv(mine, other)]
            elif worker < servers:
                yield [send_to(mine, worker, other)]
            else:
                (found[other],) = yield [send_to(empty, other, worker)]
        return [found[i] for i in range(servers)]


def _partners(place: Rank) -> list[int]:
    """Return whom a worker meets round by round, all once: itself, and it sits out.

    As in a tournament, in round r those whose indices add up to r modulo N.
    """
    return [(r - place.worker) % place.num_workers for r in range(place.num_workers)]


def _add(rows: list[tf.Tensor]) -> tf.Tensor:
    total = rows[0]
    for row in rows[1:]:
        total += row
    return total
