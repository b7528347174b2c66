"""Copies: the value that every replica has of one variable."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc._internals import mirrored
from tf_dgc.distribute import cross_device, elastic


class Copies:
    """What the replicas of a strategy have of a variable that may differ among them.

    Args:
        strategy: strategy under which the variable was created.
        variable: distributed variable, or `tf.Variable` of one replica.
        instead: values that are to be gathered, one per local replica; None for those
            that the copies have.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        variable: Any,
        instead: Sequence[tf.Tensor] | None = None,
    ):
        self._strategy = strategy
        self._variable = variable
        self._instead = instead

    @property
    def local(self) -> tuple[tf.Variable, ...]:
        """The copies of this process, one per local replica."""
        return self._strategy.experimental_local_results(self._variable)

    def gather(self, local: bool = False) -> np.ndarray:
        """Return the values of all replicas, `[num_workers, ...]`; call it on all.

        One collective, if there are other processes.

        Args:
            local: whether to return those of this process only, and contact nobody.
        """
        number = self._strategy.num_replicas_in_sync
        given = self._instead or self.local
        pairs = zip(self._pairs(), given, strict=True)
        values = {replica: value.numpy() for (replica, _), value in pairs}
        if local or len(values) == number:
            return np.stack([values[replica] for replica in sorted(values)])
        return self.gather_from_peers(values)

    def gather_from_peers(self, values: dict[int, np.ndarray]) -> np.ndarray:
        """Do what `gather` does, by a collective.

        Args:
            values: values of this process, by the replicas' places among all.
        """
        number = self._strategy.num_replicas_in_sync
        rows = self._gather_words([_to_words(r, v) for r, v in values.items()])
        rows = rows[np.argsort(rows[:, 0])]
        like = next(iter(values.values()))
        content = np.ascontiguousarray(rows[:, 1:]).view(np.uint8)[:, : like.nbytes]
        found = np.ascontiguousarray(content).view(like.dtype)
        return found.reshape(number, *like.shape)

    def scatter(self, values: np.ndarray, rule: str) -> None:
        """Restore what `gather` returned, here or on another number of workers.

        Args:
            values: values of all workers, `[N, ...]`, N the number of workers then.
            rule: name of the rule for another number, one of `elastic.RULES`.
        """
        number = self._strategy.num_replicas_in_sync
        for replica, copy in self._pairs():
            copy.assign(elastic.share(values, replica, number, rule))

    def _pairs(self) -> list[tuple[int, tf.Variable]]:
        """Return the copies of this process, by their places among all."""
        places = self._strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )
        replicas = map(int, self._strategy.experimental_local_results(places))
        return list(zip(replicas, self.local, strict=True))

    def _gather_words(self, words: list[np.ndarray]) -> np.ndarray:
        """Return rows of int32 of all replicas, in any order."""
        none = mirrored.per_replica([tf.zeros([0])] * len(words))
        given = mirrored.per_replica(list(map(tf.constant, words)))
        with self._strategy.scope():
            hook = cross_device.cross_device_ops(self._strategy)
            _, buffers = hook.communicate(False, none, given)
            first = self._strategy.experimental_local_results(buffers)[0]
        return first.numpy().reshape(self._strategy.num_replicas_in_sync, -1)


def _to_words(replica: int, value: np.ndarray) -> np.ndarray:
    """Return a place, and the bits of a value, filled up with zeros, as int32."""
    content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    words = np.zeros(1 + -(-len(content) // 4), np.int32)
    words[0] = replica
    words[1:].view(np.uint8)[: len(content)] = content
    return words
