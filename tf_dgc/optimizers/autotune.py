"""Choosing: what `exchange="auto"` comes to, when the optimizer is built."""

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_dgc import native_library, schedules
from tf_dgc.arguments import show
from tf_dgc.codecs import buffer, value_types
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import (
    Auto,
    CollectiveAlgorithm,
    LinkSpeeds,
    Rank,
    RequestSize,
    Ring,
    cost_model,
    link_benchmark,
    predict_seconds,
    sparse_merge,
)
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.cost_model import TransferTimes, first_of_the_fastest
from tf_dgc.collectives.requests import AllGather, BufferLayout, Primitive, SendRecv
from tf_dgc.compressors import Compressor, Float16, ScaleCom, TopK
from tf_dgc.compressors.common.one_round import TwoRounds
from tf_dgc.multiworker import consensus, workers
from tf_dgc.optimizers.inner_hyperparameters import InnerHyperparameters
from tf_dgc.steps import native, tensorflow_ops
from tf_dgc.steps import plan as plans
from tf_dgc.steps.plan import StepPlan

# --- Probing: what links and processors take, measured by all workers together.

Clock: TypeAlias = Callable[[], float]
Probe: TypeAlias = Generator[list[Primitive], list[tf.Tensor], LinkSpeeds]
_Timed: TypeAlias = Generator[list[Primitive], list[tf.Tensor], float]
SharedNumbers: TypeAlias = Generator[list[Primitive], list[tf.Tensor], list[float]]

_TIMES = 5
_COLD = 5  # turns, in which connections are made and grow
_SEVERAL = 4  # collectives of a probe, one behind the other
_PATHS = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  # bytes that go around the ring
_LEAST = 1e-10  # seconds per byte, 80 Gbit/s
_ENOUGH = 0.06  # seconds of a probe that tells the bandwidth


def probe_links(
    place: Rank, local: Callable[[], Sequence[float]], clock: Clock = time.perf_counter
) -> Probe:
    """Measure, and take of each number the largest that a worker found.

    Args:
        place: place of this worker, of two or more.
        local: function that returns what this worker takes for merging, decoding and
            rounding, as `Links` has them.
        clock: function that returns the time, in seconds.

    Yields:
        Requests of all workers, one behind the other.

    Returns:
        The same numbers on all workers.
    """
    others = place.num_workers - 1
    words, partner = tf.zeros([4], tf.int32), place.worker ^ 1
    gather: list[Primitive] = [AllGather(words)]
    # Of an odd number, the last one has no partner.
    swap: list[Primitive] = [SendRecv(words, partner)] if partner <= others else []
    probes = [gather, gather * _SEVERAL, swap, swap * _SEVERAL]
    times: list[list[float]] = [[] for _ in probes]
    # By turns, as other work on a machine comes and goes.
    for _ in range(_COLD + _TIMES):
        for probe, found in zip(probes, times, strict=True):
            yield gather  # who had less to do before waits here, and not below
            found.append((yield from _time(probe, clock)))
    medians = [float(np.median(found[_COLD:])) for found in times]
    one, ring, pair, pairs, *speeds = yield from share_slowest([*medians, *local()])
    around = max(0.0, ring - one) / (_SEVERAL - 1)
    swapped = min(max(0.0, pairs - pair) / (_SEVERAL - 1), around)
    # Both are one collective, of one round and of as many as there are others.
    latency = swapped / 2 if others == 1 else (around - swapped) / (others - 1)
    latency = min(latency, swapped)
    per_byte = yield from _bandwidth(place.num_workers, one, clock)
    links = LinkSpeeds(swapped - latency, latency, per_byte, *speeds)
    return links._replace(start=max(0.0, one - around))


def _bandwidth(num_workers: int, seconds: float, clock: Clock) -> _Timed:
    """Return the seconds per byte, of gathers that are larger each time.

    Args:
        num_workers: number of workers, N.
        seconds: seconds that a gather of nearly nothing takes.
        clock: function that returns the time, in seconds.
    """
    before, per_byte = 0, 0.0
    for path in _PATHS:
        words = tf.zeros([max(1, path // 4 // (num_workers - 1))], tf.int32)
        taken = []
        for _ in range(_TIMES):
            taken.append((yield from _time([AllGather(words)], clock)))
        # What comes in between only ever makes it longer.
        (found,) = yield from share_slowest([float(np.percentile(taken[1:], 25))])
        sent = 4 * words.shape[0] * (num_workers - 1)
        # What passes at once, before a link is as slow as it is, is in both. By what
        # comes in between, more bytes may seem to take less; none come for nothing.
        per_byte = max(_LEAST, (found - seconds) / (sent - before))
        if found > _ENOUGH:
            break
        before, seconds = sent, found
    return per_byte


def _time(requests: list[Primitive], clock: Clock) -> _Timed:
    """Return the seconds that they take."""
    start = clock()
    for reply in (yield requests):
        np.asarray(reply)  # it is there
    return clock() - start


def share_slowest(numbers: Sequence[float]) -> SharedNumbers:
    """Return the largest that a worker has of each number, the same on all.

    Args:
        numbers: numbers of this worker, as many as the others have.

    Yields:
        A request of all workers.
    """
    mine = tf.bitcast(tf.constant(numbers, tf.float64), tf.int32)
    (rows,) = yield [AllGather(tf.reshape(mine, [-1]))]
    pairs = tf.reshape(rows, [-1, len(numbers), 2])
    return list(map(float, np.max(tf.bitcast(pairs, tf.float64), axis=0)))


def local_speeds(clock: Clock = time.perf_counter) -> list[float]:
    """Return what this worker takes for merging, decoding and rounding, per byte."""
    with tf.device("CPU:0"):
        buffers = tf.stack([_words(0), _words(1)])
        path: Any = (
            tensorflow_ops if native_library.load_library().library is None else native
        )
        sent = StepPlan(_FORM.tensors, _FORM.counts, False)
        vector = tf.zeros([1 << 18])
        num_bytes = 4.0 * buffers.shape[0] * buffers.shape[1]

        def rounded() -> tf.Tensor:
            narrow = tf.cast(vector, tf.float16)
            return tf.cast(narrow + narrow, tf.float32)

        merge = lambda: sparse_merge.merge_buffers(buffers[0], buffers[1], _FORM)  # noqa: E731
        decode = lambda: path.decode_and_sum(sent, vector[:0], buffers)  # noqa: E731
        return [
            _seconds(merge, clock) / num_bytes,
            _seconds(decode, clock) / num_bytes,
            _seconds(rounded, clock) / (2.0 * vector.shape[0]),
        ]


def _seconds(work: Callable, clock: Clock) -> float:
    taken = []
    for _ in range(_TIMES + 1):
        start = clock()
        np.asarray(tf.nest.flatten(work())[0])
        taken.append(clock() - start)
    return min(taken[1:])  # what comes in between only ever makes it longer


# An eighth of a tensor's entries.
_FORM = BufferLayout([TensorSpec("probe", (1 << 16,), tf.float32, False)], [1 << 13])


def _words(first: int) -> tf.Tensor:
    """Return a buffer of that form, of every eighth entry from the given one on."""
    values = value_types.encode_values(tf.ones([1 << 13]), "float32")
    selection = buffer.SelectedEntries(tf.range(first, 1 << 16, 8), values)
    return buffer.encode_sparse(*_FORM, [selection], tf.constant(True))


_SUMS_ANOTHER_DTYPE = (Float16, ScaleCom)  # first, than that of tensors sent whole


@dataclasses.dataclass(frozen=True)
class TunedExchange:
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
    exchange: CollectiveAlgorithm
    seconds: dict[str, float]
    links: LinkSpeeds | None = None
    buckets: Sequence[Sequence[int]] = ()


def choose_algorithm(
    ways: CollectiveAlgorithm,
    compressor: Compressor,
    tensors: Sequence[TensorSpec],
    keeps_residual: bool,
    merges: bool,
    overlaps: bool,
    strategy: tf.distribute.Strategy,
    communicator: Communicator,
) -> TunedExchange:
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
    if not (chooses or overlaps) or not consensus.is_multi_worker(strategy):
        return TunedExchange(settled.name, compressor, settled, {})
    links = measure_links(strategy)
    if not isinstance(ways, Auto):
        return TunedExchange(settled.name, compressor, settled, {}, links)
    chosen = decide_algorithm(
        ways, compressor, tensors, keeps_residual, merges, number, links
    )
    communicator.use_algorithm(chosen.exchange)
    return chosen


def measure_links(strategy: tf.distribute.Strategy) -> LinkSpeeds:
    """Return the numbers of the links, the same on all workers; all call it.

    Args:
        strategy: strategy of two workers or more, made ready.
    """
    with tf.init_scope():  # the first call may come while a step is being traced
        place, *_ = link_benchmark.local_ranks(strategy)
        return link_benchmark.run_probe(strategy, probe_links(place, local_speeds))


def decide_algorithm(
    ways: Auto,
    compressor: Compressor,
    tensors: Sequence[TensorSpec],
    keeps_residual: bool,
    merges: bool,
    num_workers: int,
    links: LinkSpeeds,
) -> TunedExchange:
    """Return the simplest of the candidates that are as fast as any, by the model.

    Arguments are those of `choose`, with the number of workers, N, and what they found.
    """
    found: dict[str, tuple[Compressor, CollectiveAlgorithm]] = {}
    seconds: dict[str, float] = {}
    asked = request_sizes(compressor, tensors, num_workers)
    size = sum(t.size for t in tensors if not t.uncompressed)
    for exchange in ways.candidates(num_workers, merges, size) if asked else []:
        found[exchange.name] = compressor, exchange
        seconds[exchange.name] = predict_seconds(exchange, asked, num_workers, links)
    if ways.dense and type(compressor) is TopK and keeps_residual:
        dense = Float16()
        vectors = request_sizes(dense, tensors, num_workers)
        rounding = vectors[-1].num_bytes * links.rounding
        for exchange in ways.candidates(num_workers, merges=False):
            name = f"{dense.name}, {exchange.name}"
            found[name] = dense, exchange
            taken = predict_seconds(exchange, vectors, num_workers, links)
            seconds[name] = taken + rounding
    if not seconds:  # what the method sends is known only when it runs
        found["ring"] = compressor, ways.candidates(num_workers, merges=False)[0]
        seconds["ring"] = 0.0
    name = list(seconds)[first_of_the_fastest(list(seconds.values()))]
    return TunedExchange(name, *found[name], seconds, links)


def request_sizes(
    compressor: Compressor, tensors: Sequence[TensorSpec], num_workers: int
) -> list[RequestSize]:
    """Return what a step asks for; nothing if that is known only when it runs.

    Args:
        compressor: method of the tensors that are not exempt.
        tensors: descriptions of all tensors.
        num_workers: number of workers, N.
    """
    if type(compressor) is TopK:
        return _of_top_k(compressor, tensors, num_workers)
    each: Any = [
        compressor.bytes(t.shape, t.dtype) for t in tensors if not t.uncompressed
    ]
    if None in each:
        return []
    kind = "sum" if compressor.aggregation == "sum" else "gather"
    uncompressed = sum(t.size * t.dtype.size for t in tensors if t.uncompressed)
    apart = len(plans.split_uncompressed(tensors, num_workers)) > 1
    rounds = 2 if isinstance(compressor, TwoRounds) else 1
    if kind == "sum":  # of one dtype there is one collective in a round
        apart = isinstance(compressor, _SUMS_ANOTHER_DTYPE)
        apart |= any(t.uncompressed_dtype for t in tensors if t.uncompressed)
    alone, joined = (uncompressed, 0) if apart else (0, uncompressed)
    found = [RequestSize(kind, sum(each) / rounds)] * rounds
    found[0] = RequestSize(kind, joined + found[0].num_bytes)
    return [asked for asked in (RequestSize("sum", alone), *found) if asked.num_bytes]


def _of_top_k(
    compressor: TopK, tensors: Sequence[TensorSpec], num_workers: int
) -> list[RequestSize]:
    sparsity = schedules.final_sparsity(compressor.sparsity)
    asked = []
    for places in plans.split_uncompressed(tensors, num_workers):
        layout = [
            tensors[i]._replace(value_dtype=compressor.value_dtype) for i in places
        ]
        sent = plans.plan_step(layout, sparsity, num_workers)
        asked.append(RequestSize("sum" if sent.dense else "entries", sent.num_bytes))
    return asked


# --- Bucketing: which tensors of a step are exchanged together while it goes on.

# Where nothing is measured, as of the replicas of one process: links of 1 Gbit/s.
_ASSUMED = LinkSpeeds(1e-3, 1e-4, 8e-9, 5e-9, 4e-9, 8e-10)
_WORTH_IT = 0.9  # of the time without
# Where the links are found to be busy to the end, all that is left goes together, which
# costs much if they are not, and saves little if they are.
_LONGER = 1.25


def check_overlap(
    overlap: bool | float | None,
    compressor: Compressor,
    hyperparameters: InnerHyperparameters,
    track_staleness: bool,
) -> None:
    """Raise `ValueError` for an overlap that cannot be.

    Args:
        overlap: choice of the user.
        compressor: method of the optimizer.
        hyperparameters: settings of the inner optimizer that are applied in its place.
        track_staleness: whether it is remembered when entries were sent.
    """
    if not (overlap is None or isinstance(overlap, bool) or _is_time(overlap)):
        raise ValueError(
            '`overlap` must be True, False, None (where `exchange="auto"` finds that '
            "it pays), or the seconds that a backward pass takes, a finite number "
            f"above 0. Received: overlap={show(overlap)}"
        )
    found = overlap_hindrance(compressor, hyperparameters, track_staleness)
    if overlap and found:
        raise ValueError(
            "With `overlap` a tensor is exchanged while the gradients of others are "
            f"not there yet, and {found}. Received: overlap={show(overlap)}"
        )


def overlap_hindrance(
    compressor: Compressor, hyperparameters: InnerHyperparameters, track_staleness: bool
) -> str | None:
    """Return why steps cannot overlap, and what to do; None if they can.

    Arguments are those of `check`.
    """
    if compressor.together:
        return f"{compressor!r} sees all of them as one. Use another method"
    if hyperparameters.clipping["global_clipnorm"]:
        return "`global_clipnorm` is about the norm of all. Use `clipnorm`"
    if hyperparameters.adam:
        return "the Adam correction takes a sample of all. Use `adam_correction=False`"
    if hyperparameters.calls > 1:
        return (
            "with `gradient_accumulation_steps` the last of several calls takes the "
            "step, when all are there. Leave one of both out"
        )
    if track_staleness:
        return "`track_staleness` counts whole steps. Leave it out"
    return None


def _is_time(overlap: object) -> bool:
    return isinstance(overlap, int | float) and 0 < overlap < math.inf


def split_into_buckets(
    chosen: TunedExchange,
    wanted: bool | float | None,
    tensors: Sequence[TensorSpec],
    num_kept: int,
    num_workers: int,
) -> TunedExchange:
    """Return what was chosen with the buckets of its steps, if they are to overlap.

    The backward pass is taken to finish tensors from the last to the first, and to take
    as long for each entry.

    Args:
        chosen: method and exchange.
        wanted: choice of the user: whether to overlap, or the seconds that a backward
            pass takes; None if it is to be where the model says that it pays.
        tensors: descriptions of all tensors.
        num_kept: number of variables of a tensor's size that a worker keeps of each.
        num_workers: number of workers, N.
    """
    if wanted is False or num_workers == 1 or (wanted is None and not chosen.links):
        return chosen
    order = list(reversed(range(len(tensors))))
    links = chosen.links or _ASSUMED
    costs = _costs(chosen, [tensors[i] for i in order], num_workers, links)
    # As long as the exchange, where it is not known.
    backward = costs.alone if wanted is None or wanted is True else float(wanted)
    sizes = [tensors[i].size for i in order]
    ready = [backward * done / sum(sizes) for done in accumulate(sizes)]
    places = cost_model.plan_buckets([_LONGER * seconds for seconds in ready], costs)
    if wanted is None:
        # What is kept is copied, and sums are in memory before they are applied.
        passes = (num_kept + 1) * sum(sizes) * links.rounding
        taken = cost_model.finish_time(ready, places, costs) + passes
        if taken > _WORTH_IT * (backward + costs.alone):
            return chosen
    buckets = [[order[place] for place in sorted(some)[::-1]] for some in places]
    if len(buckets) < 2:
        return chosen
    name = f"{chosen.name}, {len(buckets)} buckets"
    return dataclasses.replace(chosen, name=name, buckets=buckets)


def _costs(
    chosen: TunedExchange,
    tensors: Sequence[TensorSpec],
    num_workers: int,
    links: LinkSpeeds,
) -> TransferTimes:
    """Return what exchanging takes; of unknown payloads as if all were sent."""

    def asked(some: Sequence[TensorSpec]) -> list[RequestSize]:
        found = request_sizes(chosen.compressor, some, num_workers)
        return found or [RequestSize("sum", sum(t.size * t.dtype.size for t in some))]

    return cost_model.transfer_times(
        chosen.exchange,
        [asked([tensor]) for tensor in tensors],
        asked(tensors),
        num_workers,
        links,
    )
