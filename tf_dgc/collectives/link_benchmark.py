"""Runs requests before the first step, in graphs as steps do, to measure links."""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import tensorflow as tf

from tf_dgc.collectives.algorithm import Rank
from tf_dgc.collectives.requests import Primitive, SendRecv
from tf_dgc.multiworker import workers
from tf_dgc.multiworker.cross_device import WorkerCrossDeviceOps, cross_device_ops

Outcome = TypeVar("Outcome")


def local_ranks(strategy: tf.distribute.Strategy) -> list[Rank]:
    """Return the ranks of this worker's replicas."""
    number = len(strategy.extended.worker_devices)
    first = workers.index(strategy) * number
    return [Rank(first + i, strategy.num_replicas_in_sync) for i in range(number)]


def run_probe(
    strategy: tf.distribute.Strategy,
    steps: Generator[list[Primitive], list[tf.Tensor], Outcome],
) -> Outcome:
    """Run a generator of requests; call it on all workers, eagerly, outside of steps.

    `steps` yields the requests of this worker's first replica. The other replicas make
    the same requests; a `SendRecv` of theirs is with their own neighbor.
    """
    hook, ranks = cross_device_ops(strategy), local_ranks(strategy)
    functions: dict[str, Callable[..., list[tf.Tensor]]] = {}
    replies: Any = None
    while True:
        try:
            requests = steps.send(replies)
        except StopIteration as end:
            return end.value
        key = str([(type(r), r[0].dtype, r[0].shape) for r in requests])
        if key not in functions:
            functions[key] = _make_function(hook, ranks, requests)
        replies = functions[key](*(request[0] for request in requests))


def _make_function(
    hook: WorkerCrossDeviceOps, ranks: list[Rank], requests: list[Primitive]
) -> Callable[..., list[tf.Tensor]]:
    """Return a graph function from values to send to the first replica's replies."""

    def answer(*values: tf.Tensor) -> list[tf.Tensor]:
        requests_by_replica = []
        for rank in ranks:
            adapted = map(_adapt, requests, values, [rank] * len(requests))
            requests_by_replica.append([r for r in adapted if r is not None])
        return hook.answer_round(requests_by_replica, ranks)[0]

    # A concrete function: otherwise TensorFlow takes several of them for retracing of
    # one, and warns about it.
    specs = [tf.TensorSpec(r[0].shape, r[0].dtype) for r in requests]
    function: Callable[..., list[tf.Tensor]] = tf.function(
        answer, autograph=False
    ).get_concrete_function(*specs)
    return function


def _adapt(request: Any, value: tf.Tensor, rank: Rank) -> Primitive | None:
    """Return a replica's version; None for the `SendRecv` of one without a neighbor."""
    if isinstance(request, SendRecv):
        neighbor = rank.worker ^ 1
        return SendRecv(value, neighbor) if neighbor < rank.num_workers else None
    adapted: Primitive = type(request)(value)
    return adapted
