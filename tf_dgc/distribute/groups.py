"""Collectives of groups of workers, of pairs too, beside those of all."""

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_dgc._internals import groups, launching
from tf_dgc._internals.groups import GroupLauncher
from tf_dgc.choice import choose
from tf_dgc.cluster.positions import Group
from tf_dgc.collectives.groups import members_of
from tf_dgc.collectives.requests import (
    Both,
    Broadcast,
    Either,
    Gather,
    Message,
    Reply,
    Spread,
    Sum,
    Swap,
)
from tf_dgc.distribute import pieces


class Asked:
    """What one replica asks for; no tuple, which a strategy would take apart.

    Args:
        message: its request.
        worker: its index among all.
        num_workers: number of replicas in sync, N.

    Raises:
        ValueError: as `members_of`.
    """

    def __init__(self, message: Message, worker: int, num_workers: int):
        self.message = message
        self.worker = worker
        self.members = members_of(message, worker, num_workers)


class Groups:
    """Launches what the local replicas ask for within groups.

    Args:
        collective_ops: TensorFlow's `CollectiveAllReduce` for all replicas.
        lane: number of its lane; 0 for that of the steps.
    """

    def __init__(self, collective_ops: Any, lane: int = 0):
        self._lane = lane
        self._stock = launching.launchers(collective_ops)
        self._launchers: dict[tuple[int, tuple[int, ...]], GroupLauncher] = {}

    def answer(self, replica: int, asked: Asked) -> Reply:
        """Return the reply to what a local replica asks for.

        Args:
            replica: index of it among the local ones.
            asked: its request.
        """
        message = asked.message
        if len(asked.members) == 1:
            return alone(message)
        if not isinstance(message, Either) and 0 in message[0].shape:
            return _nothing(asked)  # TensorFlow's gather of nothing crashes
        launcher = self._launcher(replica, asked)
        if isinstance(message, Either):
            return Both(*_either(launcher, asked, message))
        return _ANSWERS[type(message)](launcher, asked, message)

    def count(self) -> dict[Group, list[int]]:
        """Return how many collectives were started and finished, by group of workers.

        What replicas of one worker do among themselves waits for nobody else.
        """
        found: dict[Group, list[int]] = {}
        for group, launcher in self._launchers_of_groups():
            pair = found.get(group, [0, 0])
            more = launcher.counters.read()
            found[group] = [a + b for a, b in zip(pair, more, strict=True)]
        return found

    def pending_keys(self) -> dict[Group, int]:
        """Return the key of the collective that has started and not finished, or 0.

        By the group of workers. Also 0 where several replicas of this worker are in
        collectives of the same workers.
        """
        keys: dict[Group, int] = {}
        for group, launcher in self._launchers_of_groups():
            keys[group] = 0 if group in keys else launcher.counters.pending_key()
        return keys

    def _launchers_of_groups(self) -> Iterator[tuple[Group, GroupLauncher]]:
        """Yield each launcher, after the group of workers that it is for."""
        num_local = len(self._stock)
        for (_, members), launcher in list(self._launchers.items()):
            group = tuple(sorted({member // num_local for member in members}))
            if len(group) > 1:
                yield group, launcher

    @property
    def num_keys(self) -> int:
        """How many keys of collectives are in use."""
        return len(set().union(*(x.kinds for x in self._launchers.values())))

    def _launcher(self, replica: int, asked: Asked) -> GroupLauncher:
        key = replica, asked.members
        if key not in self._launchers:
            rank = asked.members.index(asked.worker)
            place = self._stock[replica], asked.members, rank
            self._launchers[key] = groups.GroupLauncher(*place, self._lane)
        return self._launchers[key]


def alone(message: Message) -> Reply:
    """Return the reply to a group of one worker."""
    if isinstance(message, Either):
        return Both(message.vector, message.words[tf.newaxis])
    value = message[0]
    return value[tf.newaxis] if isinstance(message, Gather) else tf.identity(value)


def _nothing(asked: Asked) -> tf.Tensor:
    """Return the reply where there is nothing to ask for."""
    value: Any = asked.message[0]
    if isinstance(asked.message, Gather):
        return tf.zeros([len(asked.members), *value.shape], value.dtype)
    return tf.identity(value)


def _either(
    launcher: GroupLauncher, asked: Asked, either: Either
) -> tuple[tf.Tensor, tf.Tensor]:
    vector, words = either.vector, either.words
    none = tf.zeros([len(asked.members), 0], tf.int32)
    return choose(
        either.dense,
        lambda: (_sum(launcher, asked, Sum(vector)), none),
        lambda: (vector[:0], _gather(launcher, asked, Gather(words))),
    )


def _sum(launcher: GroupLauncher, asked: Asked, message: Sum) -> tf.Tensor:
    if launcher.on_gpu:
        return launcher.all_reduce(message.values)
    return pieces.all_reduce(launcher.all_reduce, message.values)


def _gather(launcher: GroupLauncher, asked: Asked, message: Gather) -> tf.Tensor:
    return _rows(launcher, asked, message.words)


def _swap(launcher: GroupLauncher, asked: Asked, message: Swap) -> tf.Tensor:
    rows = _rows(launcher, asked, tf.reshape(message.values, [-1]))
    theirs = rows[asked.members.index(message.partner)]
    return _shaped_like(message.values, theirs)


def _rows(launcher: GroupLauncher, asked: Asked, vector: tf.Tensor) -> tf.Tensor:
    """Return the vectors of all members, `[members, n]`."""
    number = len(asked.members)
    if launcher.on_gpu:
        gathered = launcher.all_gather(vector)
    else:
        gathered = pieces.all_gather(launcher.all_gather, vector, number)
    return tf.reshape(
        gathered, [number, -1 if None in vector.shape else vector.shape[0]]
    )


def _spread(launcher: GroupLauncher, asked: Asked, message: Spread) -> tf.Tensor:
    if launcher.on_gpu:
        return launcher.all_to_all(message.rows)
    return pieces.all_to_all(launcher.all_to_all, message.rows)


def _broadcast(launcher: GroupLauncher, asked: Asked, message: Broadcast) -> tf.Tensor:
    launch = functools.partial(launcher.broadcast, source=message.source)
    if launcher.on_gpu:
        return launch(message.values)
    return pieces.all_reduce(launch, message.values)


def _shaped_like(values: tf.Tensor, flat: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(values) if None in values.shape else values.shape
    return tf.reshape(flat, shape)


_ANSWERS: dict[type, Any] = {
    Sum: _sum,
    Gather: _gather,
    Swap: _swap,
    Spread: _spread,
    Broadcast: _broadcast,
}
