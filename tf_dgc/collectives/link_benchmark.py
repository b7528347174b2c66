"""Probes: requests before the first step, by all workers, in graphs as steps are."""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import tensorflow as tf

from tf_dgc.collectives.algorithm import Rank
from tf_dgc.collectives.cross_device import CompressedCrossDeviceOps, cross_device_ops
from tf_dgc.collectives.requests import Primitive, SendRecv
from tf_dgc.multiworker import workers

Outcome = TypeVar("Outcome")


def local_places(strategy: tf.distribute.Strategy) -> list[Rank]:
    """Return the places of the replicas of this worker."""
    number = len(strategy.extended.worker_devices)
    first = workers.index(strategy) * number
    return [Rank(first + i, strategy.num_replicas_in_sync) for i in range(number)]


def run_probe(
    strategy: tf.distribute.Strategy,
    steps: Generator[list[Primitive], list[tf.Tensor], Outcome],
) -> Outcome:
    """Do what is asked for; call it on all workers, eagerly, outside of steps.

    Args:
        strategy: strategy of several replicas.
        steps: generator of requests of the first replica of this worker. The others ask
            for the same, and where it swaps with a neighbour, they do with theirs.

    Returns:
        What the generator returns.
    """
    hook, places = cross_device_ops(strategy), local_places(strategy)
    made: dict[str, Callable] = {}
    replies: Any = None
    while True:
        try:
            requests = steps.send(replies)
        except StopIteration as end:
            return end.value
        key = str([(type(r), r[0].dtype, r[0].shape) for r in requests])
        if key not in made:
            made[key] = _make_graph(hook, places, requests)
        replies = made[key](*(request[0] for request in requests))


def _make_graph(
    hook: CompressedCrossDeviceOps, places: list[Rank], requests: list[Primitive]
) -> Callable:
    """Return a function of what is sent that returns what the first replica gets."""
    answer = hook.answer_each(places)

    def ask(*values: tf.Tensor) -> list[tf.Tensor]:
        pairs = list(zip(requests, values, strict=True))
        asked = [[_asked_by(place, *pair) for pair in pairs] for place in places]
        return list(answer([[a for a in some if a is not None] for some in asked])[0])

    return tf.function(ask, autograph=False)


def _asked_by(place: Rank, request: Any, value: tf.Tensor) -> Primitive | None:
    """Return what a replica asks for where its first one asks for this.

    Of an odd number of replicas, the last one has no neighbour, and asks for no swap.
    """
    if isinstance(request, SendRecv):
        neighbour = place.worker ^ 1
        return SendRecv(value, neighbour) if neighbour < place.num_workers else None
    return type(request)(value)
