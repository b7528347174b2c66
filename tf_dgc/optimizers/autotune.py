"""Decides `collective="auto"` and the buckets of `Overlapped` at build time."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_dgc import native_library, schedules
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
from tf_dgc.collectives.overlapped import Overlap, OverlapMode
from tf_dgc.collectives.requests import AllGather, BufferLayout, Primitive, SendRecv
from tf_dgc.compressors import Compressor, Float16, ScaleCom, TopK
from tf_dgc.compressors.common.one_round import TwoRounds
from tf_dgc.compressors.topk import is_top_k
from tf_dgc.multiworker import consensus, workers
from tf_dgc.optimizers.inner_hyperparameters import InnerHyperparameters
from tf_dgc.steps import native, tensorflow_ops
from tf_dgc.steps.base import StepPlan, plan_step, split_uncompressed


@dataclasses.dataclass(frozen=True)
class TunedExchange:
    """The compressor, algorithm and buckets of the steps, equal on all workers.

    Attributes:
        name: name of the algorithm, after "float16, " if nothing is compressed, and
            followed by the number of buckets if there are several.
        compressor: method of the steps.
        algorithm: collective algorithm of the steps.
        seconds: predicted seconds of each candidate, by name.
        links: measured links; None if nothing was measured.
        buckets: indices of the tensors of each bucket, in the order of their exchange;
            empty if all tensors are exchanged after the backward pass.
    """

    name: str
    compressor: Compressor
    algorithm: CollectiveAlgorithm
    seconds: dict[str, float]
    links: LinkSpeeds | None = None
    buckets: Sequence[Sequence[int]] = ()


# The algorithm


def choose_algorithm(
    algorithm: CollectiveAlgorithm,
    compressor: Compressor,
    tensors: Sequence[TensorSpec],
    keeps_residual: bool,
    allows_merging: bool,
    overlaps: bool,
    strategy: tf.distribute.Strategy,
    communicator: Communicator,
) -> TunedExchange:
    """Choose the algorithm of the steps, and let the communicator use it.

    Call it on all workers after they have met. Links are measured only between several
    processes, and only if the choice or the buckets depend on them. `overlaps` says
    whether the exchange overlaps with the backward pass.
    """
    num_workers, is_auto = communicator.num_workers, isinstance(algorithm, Auto)
    resolved = Ring() if is_auto else algorithm
    if num_workers > 1 and not is_auto:  # it may depend on the workers' hosts
        resolved = algorithm.resolve(workers.hosts(strategy))
    tuned = TunedExchange(resolved.name, compressor, resolved, {})
    if not (is_auto or overlaps) or not consensus.is_multi_worker(strategy):
        return tuned
    links = measure_links(strategy)
    if not isinstance(algorithm, Auto):
        return dataclasses.replace(tuned, links=links)
    tuned = decide_algorithm(
        algorithm,
        compressor,
        tensors,
        keeps_residual,
        allows_merging,
        num_workers,
        links,
    )
    communicator.use_algorithm(tuned.algorithm)
    return tuned


def decide_algorithm(
    auto: Auto,
    compressor: Compressor,
    tensors: Sequence[TensorSpec],
    keeps_residual: bool,
    allows_merging: bool,
    num_workers: int,
    links: LinkSpeeds,
) -> TunedExchange:
    """Return the simplest of the fastest candidates, as predicted by the cost model."""
    candidates: dict[str, tuple[Compressor, CollectiveAlgorithm]] = {}
    seconds: dict[str, float] = {}
    sizes = request_sizes(compressor, tensors, num_workers)
    if sizes:
        entries = sum(t.size for t in tensors if not t.uncompressed)
        for algorithm in auto.candidates(num_workers, allows_merging, entries):
            candidates[algorithm.name] = compressor, algorithm
            seconds[algorithm.name] = predict_seconds(
                algorithm, sizes, num_workers, links
            )
    if auto.dense and is_top_k(compressor) and keeps_residual:
        dense = Float16()
        sizes = request_sizes(dense, tensors, num_workers)
        rounding = sizes[-1].num_bytes * links.rounding
        for algorithm in auto.candidates(num_workers, merges=False):
            name = f"{dense.name}, {algorithm.name}"
            candidates[name] = dense, algorithm
            exchange = predict_seconds(algorithm, sizes, num_workers, links)
            seconds[name] = exchange + rounding
    if not seconds:  # the sizes are known only when a step runs
        ring = auto.candidates(num_workers, merges=False)[0]
        candidates["ring"] = compressor, ring
        seconds["ring"] = 0.0
    name = list(seconds)[first_of_the_fastest(list(seconds.values()))]
    return TunedExchange(name, *candidates[name], seconds, links)


def request_sizes(
    compressor: Compressor, tensors: Sequence[TensorSpec], num_workers: int
) -> list[RequestSize]:
    """Return the sizes of a step's requests; none if they depend on the gradients."""
    if is_top_k(compressor):
        return _top_k_request_sizes(compressor, tensors, num_workers)
    tensor_bytes: Any = [
        compressor.bytes(t.shape, t.dtype) for t in tensors if not t.uncompressed
    ]
    if None in tensor_bytes:
        return []
    kind = "sum" if compressor.aggregation == "sum" else "gather"
    uncompressed = sum(t.size * t.dtype.size for t in tensors if t.uncompressed)
    if kind == "gather":
        separate = len(split_uncompressed(tensors, num_workers)) > 1
    else:  # sums of one dtype are one collective
        first_sum_has_other_dtype = isinstance(compressor, (Float16, ScaleCom))
        separate = first_sum_has_other_dtype or any(
            t.uncompressed_dtype for t in tensors if t.uncompressed
        )
    rounds = 2 if isinstance(compressor, TwoRounds) else 1
    per_round = sum(tensor_bytes) / rounds
    sizes = [RequestSize(kind, per_round)] * rounds
    if separate:
        sizes.insert(0, RequestSize("sum", uncompressed))
    else:
        sizes[0] = RequestSize(kind, uncompressed + per_round)
    return [size for size in sizes if size.num_bytes]


def _top_k_request_sizes(
    compressor: TopK, tensors: Sequence[TensorSpec], num_workers: int
) -> list[RequestSize]:
    sparsity = schedules.final_sparsity(compressor.sparsity)
    sizes = []
    for indices in split_uncompressed(tensors, num_workers):
        layout = [
            tensors[i]._replace(value_dtype=compressor.value_dtype) for i in indices
        ]
        plan = plan_step(layout, sparsity, num_workers)
        sizes.append(RequestSize("sum" if plan.dense else "entries", plan.num_bytes))
    return sizes


# Overlap and buckets

# Assumed links of 1 Gbit/s, where nothing is measured.
_ASSUMED_LINKS = LinkSpeeds(1e-3, 1e-4, 8e-9, 5e-9, 4e-9, 8e-10)
_WORTH_IT = 0.9  # of the time without overlap
# If the links seem busy until the end, all remaining tensors form one bucket. That
# costs much if they are not busy, and saves little if they are.
_BACKWARD_MARGIN = 1.25


def check_overlap(
    overlap: Overlap,
    compressor: Compressor,
    hyperparameters: InnerHyperparameters,
    track_staleness: bool,
) -> None:
    """Raise `ValueError` if the user passed `Overlapped`, and steps cannot overlap."""
    hindrance = overlap_hindrance(compressor, hyperparameters, track_staleness)
    if overlap.mode is OverlapMode.ALWAYS and hindrance:
        raise ValueError(
            "With `Overlapped` a tensor is exchanged before the gradients of others "
            f"are computed, and {hindrance}. Received: an `Overlapped` collective"
        )


def overlap_hindrance(
    compressor: Compressor, hyperparameters: InnerHyperparameters, track_staleness: bool
) -> str | None:
    """Return why steps cannot overlap, and what to do; None if they can."""
    if compressor.entire_model:
        return f"{compressor!r} sees all of them as one. Use another method"
    if hyperparameters.clipping["global_clipnorm"]:
        return "`global_clipnorm` needs all of them. Use `clipnorm`"
    if hyperparameters.adam:
        return "the Adam correction samples all of them. Use `Corrections(adam=False)`"
    if hyperparameters.accumulation_steps > 1:
        return (
            "with `gradient_accumulation_steps` the last of several calls takes the "
            "step, when all are there. Use one of the two"
        )
    if track_staleness:
        return "`Diagnostics(track_staleness=True)` counts whole steps. Leave it out"
    return None


def split_into_buckets(
    tuned: TunedExchange,
    overlap: Overlap,
    tensors: Sequence[TensorSpec],
    num_state_variables: int,
    num_workers: int,
) -> TunedExchange:
    """Return the exchange with buckets, if the steps overlap.

    With `IF_FASTER` they do if the cost model predicts that it pays. The backward
    pass is assumed to compute gradients from the last tensor to the first, and to take
    the same time for each entry. A worker has `num_state_variables` for each tensor.
    """
    if_faster = overlap.mode is OverlapMode.IF_FASTER
    is_off = overlap.mode is OverlapMode.NEVER or (if_faster and not tuned.links)
    if is_off or num_workers == 1:
        return tuned
    links = tuned.links or _ASSUMED_LINKS
    order = list(reversed(range(len(tensors))))
    times = _transfer_times(tuned, [tensors[i] for i in order], num_workers, links)
    # If unknown, the backward pass is assumed to take as long as the exchange.
    backward = overlap.backward_seconds or times.alone
    sizes = [tensors[i].size for i in order]
    ready = [backward * n / sum(sizes) for n in itertools.accumulate(sizes)]
    bucket_places = cost_model.plan_buckets(
        [_BACKWARD_MARGIN * s for s in ready], times
    )
    if if_faster:
        # Overlap copies the state, and stores sums before they are applied.
        copies = (num_state_variables + 1) * sum(sizes) * links.rounding
        finish = cost_model.finish_time(ready, bucket_places, times) + copies
        if finish > _WORTH_IT * (backward + times.alone):
            return tuned
    if len(bucket_places) < 2:
        return tuned
    buckets = [
        [order[place] for place in sorted(places, reverse=True)]
        for places in bucket_places
    ]
    name = f"{tuned.name}, {len(buckets)} buckets"
    return dataclasses.replace(tuned, name=name, buckets=buckets)


def _transfer_times(
    tuned: TunedExchange,
    tensors: Sequence[TensorSpec],
    num_workers: int,
    links: LinkSpeeds,
) -> TransferTimes:
    """Return the predicted times of all tensors; unknown sizes count as dense."""

    def sizes(tensors: Sequence[TensorSpec]) -> list[RequestSize]:
        dense_bytes = sum(t.size * t.dtype.size for t in tensors)
        dense = [RequestSize("sum", dense_bytes)]
        return request_sizes(tuned.compressor, tensors, num_workers) or dense

    return cost_model.transfer_times(
        tuned.algorithm,
        [sizes([tensor]) for tensor in tensors],
        sizes(tensors),
        num_workers,
        links,
    )


# Measured links and processors

Clock: TypeAlias = Callable[[], float]  # seconds
_Seconds: TypeAlias = Generator[list[Primitive], list[tf.Tensor], float]

_REPETITIONS = 5
_WARMUP = 5  # repetitions in which connections are opened and buffers grow
_SEVERAL = 4  # collectives of one measurement, one after the other
_PATHS = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  # bytes that pass each link of the ring
_MIN_PER_BYTE = 1e-10  # seconds, 80 Gbit/s
_LONG_ENOUGH = 0.06  # seconds of a collective from which the bandwidth follows


def measure_links(strategy: tf.distribute.Strategy) -> LinkSpeeds:
    """Measure links and processors; call it on all of two or more workers."""
    with tf.init_scope():  # the first call may come while a step is being traced
        rank, *_ = link_benchmark.local_ranks(strategy)
        return link_benchmark.run_probe(strategy, probe_links(rank, local_speeds))


def probe_links(
    rank: Rank,
    local_speeds: Callable[[], Sequence[float]],
    clock: Clock = time.perf_counter,
) -> Generator[list[Primitive], list[tf.Tensor], LinkSpeeds]:
    """Measure the links; of each number all workers take the slowest worker's.

    `local_speeds` returns this worker's seconds per byte for merging, decoding and
    rounding, as in `LinkSpeeds`.
    """
    others = rank.num_workers - 1
    words, partner = tf.zeros([4], tf.int32), rank.worker ^ 1
    gather: list[Primitive] = [AllGather(words)]
    # With an odd number of workers, the last one has no partner.
    swap: list[Primitive] = [SendRecv(words, partner)] if partner <= others else []
    measurements = [gather, gather * _SEVERAL, swap, swap * _SEVERAL]
    times: list[list[float]] = [[] for _ in measurements]
    # Interleaved, because other processes come and go.
    for _ in range(_WARMUP + _REPETITIONS):
        for requests, seconds in zip(measurements, times, strict=True):
            yield gather  # a barrier, so that waiting for others is not measured
            seconds.append((yield from _time(requests, clock)))
    medians = [float(np.median(seconds[_WARMUP:])) for seconds in times]
    slowest = yield from share_slowest([*medians, *local_speeds()])
    one_gather, gathers, one_swap, swaps, *speeds = slowest
    ring = max(0.0, gathers - one_gather) / (_SEVERAL - 1)
    pair = min(max(0.0, swaps - one_swap) / (_SEVERAL - 1), ring)
    # A swap is a collective of one round, a gather is one of N - 1 rounds.
    latency = pair / 2 if others == 1 else (ring - pair) / (others - 1)
    latency = min(latency, pair)
    per_byte = yield from _measure_bandwidth(rank.num_workers, one_gather, clock)
    links = LinkSpeeds(pair - latency, latency, per_byte, *speeds)
    return links._replace(start=max(0.0, one_gather - ring))


def _measure_bandwidth(num_workers: int, seconds: float, clock: Clock) -> _Seconds:
    """Return the seconds per byte, measured with increasingly large gathers.

    A tiny gather takes `seconds`.
    """
    num_bytes, per_byte = 0, 0.0
    for path in _PATHS:
        words = tf.zeros([max(1, path // 4 // (num_workers - 1))], tf.int32)
        times = []
        for _ in range(_REPETITIONS):
            times.append((yield from _time([AllGather(words)], clock)))
        # A low percentile, because other processes only ever make it slower.
        quick = float(np.percentile(times[1:], 25))
        (new_seconds,) = yield from share_slowest([quick])
        new_bytes = 4 * words.shape[0] * (num_workers - 1)
        # The difference of two sizes excludes the burst that a link passes at once. It
        # may be negative by chance.
        difference = (new_seconds - seconds) / (new_bytes - num_bytes)
        per_byte = max(_MIN_PER_BYTE, difference)
        if new_seconds > _LONG_ENOUGH:
            break
        num_bytes, seconds = new_bytes, new_seconds
    return per_byte


def _time(requests: list[Primitive], clock: Clock) -> _Seconds:
    """Return the seconds that the requests take."""
    start = clock()
    for reply in (yield requests):
        np.asarray(reply)  # wait for it
    return clock() - start


def share_slowest(
    numbers: Sequence[float],
) -> Generator[list[Primitive], list[tf.Tensor], list[float]]:
    """Return the largest of all workers' values of each number, the same on all."""
    words = tf.bitcast(tf.constant(numbers, tf.float64), tf.int32)
    (rows,) = yield [AllGather(tf.reshape(words, [-1]))]
    pairs = tf.reshape(rows, [-1, len(numbers), 2])
    return list(map(float, np.max(tf.bitcast(pairs, tf.float64), axis=0)))


_PROBE_SIZE = 1 << 16
_PROBE_LAYOUT = BufferLayout(
    [TensorSpec("probe", (_PROBE_SIZE,), tf.float32, False)], [_PROBE_SIZE // 8]
)


def local_speeds(clock: Clock = time.perf_counter) -> list[float]:
    """Return this worker's seconds per byte for merging, decoding and rounding."""
    with tf.device("CPU:0"):
        buffers = tf.stack([_probe_buffer(0), _probe_buffer(1)])
        is_native = native_library.load_library().library is not None
        path: Any = native if is_native else tensorflow_ops
        plan = StepPlan(_PROBE_LAYOUT.tensors, _PROBE_LAYOUT.counts, False)
        vector = tf.zeros([1 << 18])
        merge = functools.partial(
            sparse_merge.merge_buffers, buffers[0], buffers[1], _PROBE_LAYOUT
        )
        decode = functools.partial(path.decode_and_sum, plan, vector[:0], buffers)

        def add_rounded() -> tf.Tensor:
            narrow = tf.cast(vector, tf.float16)
            return tf.cast(narrow + narrow, tf.float32)

        buffers_bytes = 4.0 * buffers.shape[0] * buffers.shape[1]
        return [
            _shortest_time(merge, clock) / buffers_bytes,
            _shortest_time(decode, clock) / buffers_bytes,
            _shortest_time(add_rounded, clock) / (2.0 * vector.shape[0]),
        ]


def _probe_buffer(first: int) -> tf.Tensor:
    """Return a buffer with every eighth entry, from `first` on."""
    values = value_types.encode_values(tf.ones([_PROBE_SIZE // 8]), "float32")
    selection = buffer.SelectedEntries(tf.range(first, _PROBE_SIZE, 8), values)
    return buffer.encode_sparse(*_PROBE_LAYOUT, [selection], tf.constant(True))


def _shortest_time(function: Callable[[], Any], clock: Clock) -> float:
    """Return the shortest seconds, because other processes only make it slower."""
    times = []
    for _ in range(_REPETITIONS + 1):
        start = clock()
        np.asarray(tf.nest.flatten(function())[0])
        times.append(clock() - start)
    return min(times[1:])
