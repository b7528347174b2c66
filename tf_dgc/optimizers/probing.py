"""Probing: what links and processors take, measured by all workers together."""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_dgc.codecs import value_types, wire
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.collectives import entries
from tf_dgc.collectives.requests import Form, Gather, Primitive, Swap
from tf_dgc.exchanges import Links, Place
from tf_dgc.ops import loader
from tf_dgc.steps import native, operations
from tf_dgc.steps.plan import Plan

Clock: TypeAlias = Callable[[], float]
Probe: TypeAlias = Generator[list[Primitive], list[tf.Tensor], Links]
_Timed: TypeAlias = Generator[list[Primitive], list[tf.Tensor], float]
Shared: TypeAlias = Generator[list[Primitive], list[tf.Tensor], list[float]]

_TIMES = 5
_COLD = 5  # turns, in which connections are made and grow
_SEVERAL = 4  # collectives of a probe, one behind the other
_PATHS = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  # bytes that go around the ring
_LEAST = 1e-10  # seconds per byte, 80 Gbit/s
_ENOUGH = 0.06  # seconds of a probe that tells the bandwidth


def measure(
    place: Place, local: Callable[[], Sequence[float]], clock: Clock = time.perf_counter
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
    gather: list[Primitive] = [Gather(words)]
    # Of an odd number, the last one has no partner.
    swap: list[Primitive] = [Swap(words, partner)] if partner <= others else []
    probes = [gather, gather * _SEVERAL, swap, swap * _SEVERAL]
    times: list[list[float]] = [[] for _ in probes]
    # By turns, as other work on a machine comes and goes.
    for _ in range(_COLD + _TIMES):
        for probe, found in zip(probes, times, strict=True):
            yield gather  # who had less to do before waits here, and not below
            found.append((yield from _time(probe, clock)))
    medians = [float(np.median(found[_COLD:])) for found in times]
    one, ring, pair, pairs, *speeds = yield from share([*medians, *local()])
    around = max(0.0, ring - one) / (_SEVERAL - 1)
    swapped = min(max(0.0, pairs - pair) / (_SEVERAL - 1), around)
    # Both are one collective, of one round and of as many as there are others.
    latency = swapped / 2 if others == 1 else (around - swapped) / (others - 1)
    latency = min(latency, swapped)
    per_byte = yield from _bandwidth(place.num_workers, one, clock)
    links = Links(swapped - latency, latency, per_byte, *speeds)
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
            taken.append((yield from _time([Gather(words)], clock)))
        # What comes in between only ever makes it longer.
        (found,) = yield from share([float(np.percentile(taken[1:], 25))])
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


def share(numbers: Sequence[float]) -> Shared:
    """Return the largest that a worker has of each number, the same on all.

    Args:
        numbers: numbers of this worker, as many as the others have.

    Yields:
        A request of all workers.
    """
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
    return min(taken[1:])  # what comes in between only ever makes it longer


# An eighth of a tensor's entries.
_FORM = Form([Tensor("probe", (1 << 16,), tf.float32, False)], [1 << 13])


def _words(first: int) -> tf.Tensor:
    """Return a buffer of that form, of every eighth entry from the given one on."""
    values = value_types.encode(tf.ones([1 << 13]), "float32")
    selection = wire.Selection(tf.range(first, 1 << 16, 8), values)
    return wire.encode(*_FORM, [selection], tf.constant(True))
