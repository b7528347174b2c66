"""Probing: what links and processors take, measured by all workers together."""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_dgc.codecs import value_types, wire
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.collectives import entries
from tf_dgc.collectives.requests import Form, Gather, Sum
from tf_dgc.exchanges import Links
from tf_dgc.ops import loader
from tf_dgc.steps import native, operations
from tf_dgc.steps.plan import Plan

Clock: TypeAlias = Callable[[], float]
Probe: TypeAlias = Generator[list[Sum | Gather], list[tf.Tensor], Links]
_Timed: TypeAlias = Generator[list[Sum | Gather], list[tf.Tensor], float]
_Shared: TypeAlias = Generator[list[Sum | Gather], list[tf.Tensor], list[float]]

_TIMES = 5
_PATHS = (1 << 16, 1 << 19, 1 << 22)  # bytes that go around the ring
_ENOUGH = 0.03  # seconds of a probe that tells the bandwidth


def measure(
    num_workers: int,
    local: Callable[[], Sequence[float]],
    clock: Clock = time.perf_counter,
) -> Probe:
    """Measure, and take of each number the largest that a worker found.

    Args:
        num_workers: number of workers, N, at least 2.
        local: function that returns what this worker takes for merging, decoding and
            rounding, as `Links` has them.
        clock: function that returns the time, in seconds.

    Yields:
        One request at a time, of all workers.

    Returns:
        The same numbers on all workers.
    """
    steps = num_workers - 1
    gather = yield from _time(Gather(tf.zeros([4], tf.int32)), clock)
    total = yield from _time(Sum(tf.zeros([4 * num_workers])), clock)
    found = yield from _share([gather, total, *local()])
    gather, total, *speeds = found
    # A sum is one collective of twice as many rounds.
    latency = min(max(0.0, total - gather), gather) / steps
    per_byte = 0.0
    for path in _PATHS:
        words = tf.zeros([max(1, path // 4 // steps)], tf.int32)
        mine = yield from _time(Gather(words), clock, 2)
        (seconds,) = yield from _share([mine])
        per_byte = max(0.0, seconds - gather) / (4 * words.shape[0] * steps)
        if seconds > _ENOUGH:
            break
    return Links(gather - steps * latency, latency, per_byte, *speeds)


def _time(request: Sum | Gather, clock: Clock, times: int = _TIMES) -> _Timed:
    """Return the median of the seconds that it takes; the first time is not counted."""
    taken = []
    for _ in range(times + 1):
        start = clock()
        (reply,) = yield [request]
        np.asarray(reply)  # it is there
        taken.append(clock() - start)
    return float(np.median(taken[1:]))


def _share(numbers: Sequence[float]) -> _Shared:
    """Return the largest that a worker has of each number."""
    mine = tf.bitcast(tf.constant(numbers, tf.float64), tf.int32)
    (rows,) = yield [Gather(tf.reshape(mine, [-1]))]
    pairs = tf.reshape(rows, [-1, len(numbers), 2])
    return list(map(float, np.max(tf.bitcast(pairs, tf.float64), axis=0)))


def local_speeds(clock: Clock = time.perf_counter) -> list[float]:
    """Return what this worker takes for merging, decoding and rounding, per byte."""
    with tf.device("CPU:0"):
        buffers = tf.stack([_words(0), _words(1)])
        path: Any = operations if loader.native().library is None else native
        sent = Plan(_FORM.layout, _FORM.counts, False)
        vector = tf.zeros([1 << 18])
        num_bytes = 4.0 * buffers.shape[0] * buffers.shape[1]

        def rounded() -> tf.Tensor:
            narrow = tf.cast(vector, tf.float16)
            return tf.cast(narrow + narrow, tf.float32)

        merge = lambda: entries.merge(buffers[0], buffers[1], _FORM)  # noqa: E731
        decode = lambda: path.unpack(sent, vector[:0], buffers)  # noqa: E731
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
    return float(np.median(taken[1:]))


# An eighth of a tensor's entries.
_FORM = Form([Tensor("probe", (1 << 16,), tf.float32, False)], [1 << 13])


def _words(first: int) -> tf.Tensor:
    """Return a buffer of that form, of every eighth entry from the given one on."""
    values = value_types.encode(tf.ones([1 << 13]), "float32")
    selection = wire.Selection(tf.range(first, 1 << 16, 8), values)
    return wire.encode(*_FORM, [selection], tf.constant(True))
