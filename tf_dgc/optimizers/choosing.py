"""Choosing: what `exchange="auto"` comes to, when the optimizer is built."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.cluster import meeting, workers
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.compressors import Compressor, Float16, ScaleCom, TopK
from tf_dgc.compressors.common.two_rounds import TwoRounds
from tf_dgc.distribute import probes
from tf_dgc.distribute.communicator import Communicator
from tf_dgc.exchanges import Asked, Auto, Exchange, Links, Ring, predict
from tf_dgc.exchanges.model import as_fast_as_any
from tf_dgc.optimizers import probing
from tf_dgc.schedules import asking
from tf_dgc.steps import plan as plans

_SUMS_ANOTHER_DTYPE = (Float16, ScaleCom)  # first, than that of tensors sent whole


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What was chosen, the same on all workers.

    Attributes:
        name: name of it, "float16, " before that of the exchange if nothing is
            compressed, and the number of buckets behind it if there are several.
        compressor: method of the steps.
        exchange: exchange that they go by.
        seconds: seconds that the model has for each candidate, by name.
        links: numbers that the workers measured; None if there was nothing to measure.
        buckets: indices of the tensors that go together, in the order of their
            exchange; empty if all do, at the end of the backward pass.
    """

    name: str
    compressor: Compressor
    exchange: Exchange
    seconds: dict[str, float]
    links: Links | None = None
    buckets: Sequence[Sequence[int]] = ()


def choose(
    ways: Exchange,
    compressor: Compressor,
    tensors: Sequence[Tensor],
    keeps_residual: bool,
    merges: bool,
    overlaps: bool,
    strategy: tf.distribute.Strategy,
    communicator: Communicator,
) -> Chosen:
    """Return what the steps go by, and let the communicator go by it.

    Call it on all workers, after they have met. Without other processes nothing is
    measured, nor where nothing follows from it.

    Args:
        ways: exchange that was asked for.
        compressor: method that was asked for.
        tensors: descriptions of all tensors.
        keeps_residual: whether what is not sent is kept back.
        merges: whether an exchange may merge what the method sends.
        overlaps: whether steps overlap, in buckets that follow from the links.
        strategy: strategy of the workers.
        communicator: communicator of the steps.
    """
    number, chooses = communicator.num_workers, isinstance(ways, Auto)
    settled = Ring() if chooses else ways
    if number > 1 and not chooses:  # what it costs may depend on who is where
        settled = ways.settle(workers.hosts(strategy))
    if not (chooses or overlaps) or not meeting.is_multi_worker(strategy):
        return Chosen(settled.name, compressor, settled, {})
    links = measure(strategy)
    if not isinstance(ways, Auto):
        return Chosen(settled.name, compressor, settled, {}, links)
    chosen = decide(ways, compressor, tensors, keeps_residual, merges, number, links)
    communicator.go_by(chosen.exchange)
    return chosen


def measure(strategy: tf.distribute.Strategy) -> Links:
    """Return the numbers of the links, the same on all workers; all call it.

    Args:
        strategy: strategy of two workers or more, made ready.
    """
    with tf.init_scope():  # the first call may come while a step is being traced
        place, *_ = probes.local_places(strategy)
        return probes.run(strategy, probing.measure(place, probing.local_speeds))


def decide(
    ways: Auto,
    compressor: Compressor,
    tensors: Sequence[Tensor],
    keeps_residual: bool,
    merges: bool,
    num_workers: int,
    links: Links,
) -> Chosen:
    """Return the simplest of the candidates that are as fast as any, by the model.

    Arguments are those of `choose`, with the number of workers, N, and what they found.
    """
    found: dict[str, tuple[Compressor, Exchange]] = {}
    seconds: dict[str, float] = {}
    asked = what_is_asked(compressor, tensors, num_workers)
    size = sum(t.size for t in tensors if not t.exempt)
    for exchange in ways.candidates(num_workers, merges, size) if asked else []:
        found[exchange.name] = compressor, exchange
        seconds[exchange.name] = predict(exchange, asked, num_workers, links)
    if ways.dense and type(compressor) is TopK and keeps_residual:
        dense = Float16()
        vectors = what_is_asked(dense, tensors, num_workers)
        rounding = vectors[-1].num_bytes * links.rounding
        for exchange in ways.candidates(num_workers, merges=False):
            name = f"{dense.name}, {exchange.name}"
            found[name] = dense, exchange
            taken = predict(exchange, vectors, num_workers, links)
            seconds[name] = taken + rounding
    if not seconds:  # what the method sends is known only when it runs
        found["ring"] = compressor, ways.candidates(num_workers, merges=False)[0]
        seconds["ring"] = 0.0
    name = list(seconds)[as_fast_as_any(list(seconds.values()))]
    return Chosen(name, *found[name], seconds, links)


def what_is_asked(
    compressor: Compressor, tensors: Sequence[Tensor], num_workers: int
) -> list[Asked]:
    """Return what a step asks for; nothing if that is known only when it runs.

    Args:
        compressor: method of the tensors that are not exempt.
        tensors: descriptions of all tensors.
        num_workers: number of workers, N.
    """
    if type(compressor) is TopK:
        return _of_top_k(compressor, tensors, num_workers)
    each: Any = [compressor.bytes(t.shape, t.dtype) for t in tensors if not t.exempt]
    if None in each:
        return []
    kind = "sum" if compressor.aggregation == "sum" else "gather"
    exempt = sum(t.size * t.dtype.size for t in tensors if t.exempt)
    apart = len(plans.shares(tensors, num_workers)) > 1
    rounds = 2 if isinstance(compressor, TwoRounds) else 1
    if kind == "sum":  # of one dtype there is one collective in a round
        apart = isinstance(compressor, _SUMS_ANOTHER_DTYPE)
        apart |= any(t.exempt_dtype for t in tensors if t.exempt)
    alone, joined = (exempt, 0) if apart else (0, exempt)
    found = [Asked(kind, sum(each) / rounds)] * rounds
    found[0] = Asked(kind, joined + found[0].num_bytes)
    return [asked for asked in (Asked("sum", alone), *found) if asked.num_bytes]


def _of_top_k(
    compressor: TopK, tensors: Sequence[Tensor], num_workers: int
) -> list[Asked]:
    sparsity = asking.final(compressor.sparsity)
    asked = []
    for places in plans.shares(tensors, num_workers):
        layout = [
            tensors[i]._replace(value_dtype=compressor.value_dtype) for i in places
        ]
        sent = plans.plan(layout, sparsity, num_workers)
        asked.append(Asked("sum" if sent.dense else "entries", sent.num_bytes))
    return asked
