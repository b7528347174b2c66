"""Times a step of a model on this machine with each method, in turns."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dgc import compressors
from tf_dgc._internals.optimizer_copies import copy_optimizer
from tf_dgc.advice import machine_load
from tf_dgc.arguments import show
from tf_dgc.collectives import RequestSize
from tf_dgc.optimizers import autotune
from tf_dgc.optimizers.compressed import CompressedOptimizer
from tf_dgc.optimizers.dgc import DGCOptimizer
from tf_dgc.schedules import check_period

DENSE = "dense"
PERIOD = 16
"""Default period of local SGD as a candidate."""
DEFAULT = (DENSE, "float16", "uniform_8bit", "power_sgd", "dgc", f"local_sgd {PERIOD}")
"""Methods compared by default, in the order of preference."""

_WARM_UP_STEPS = 3
_MIN_STEPS = 5


class Candidate(NamedTuple):
    """A method that `advise` compares."""

    name: str
    wrap: Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer]
    period: int = 1  # number of steps between two exchanges
    code: str = "optimizer"  # code for the user's script, where `optimizer` was


class StepTiming(NamedTuple):
    """A method's step on one worker with its own words, without waiting for others."""

    candidate: Candidate
    seconds: float  # a step on one worker, with its own words
    requests: Callable[[int], list[RequestSize]]  # by number of workers
    merges: bool = False  # whether algorithms that merge entries can carry them
    interval: tuple[float, float] = (1.0, 1.0)  # 95 %, of `seconds`, relative to it


class Timings(NamedTuple):
    """Timed steps of all candidates, the dense one first."""

    steps: list[StepTiming]
    slowdown: float  # factor by which other processes slowed the steps, or 1


def find_candidates(names: Sequence[str] | str) -> list[Candidate]:
    """Return candidates by name, after the dense one."""
    names = [names] if isinstance(names, str) else names
    return [_find(name) for name in dict.fromkeys([DENSE, *names])]


def _find(name: str) -> Candidate:
    kind, _, number = name.partition(" ")
    try:
        if name == DENSE:
            return Candidate(name, lambda inner: inner)
        if kind == "dgc":
            sparsity = float(number or 0.999)
            arguments = f"optimizer, {sparsity}" if number else "optimizer"
            return Candidate(
                name,
                lambda inner: DGCOptimizer(inner, sparsity),
                code=f"tf_dgc.DGCOptimizer({arguments})",
            )
        if kind == "local_sgd":
            period = check_period(int(number or PERIOD))
            code = f"tf_dgc.local_sgd(optimizer, {period})"
            # A local step is the inner optimizer's own.
            return Candidate(name, lambda inner: inner, period, code)
        compressor = compressors.METHODS[name]
    except (KeyError, ValueError):
        raise ValueError(
            '`methods` must be of "dense", "dgc", "dgc 0.99", "local_sgd 16" and '
            f"{', '.join(sorted(compressors.METHODS))}. Received: {show(name)}"
        ) from None
    return Candidate(
        name,
        lambda inner: CompressedOptimizer(inner, compressor()),
        code=f'tf_dgc.CompressedOptimizer(optimizer, "{name}")',
    )


def check_candidates(
    candidates: Sequence[Candidate], inner: keras.optimizers.Optimizer
) -> None:
    """Raise `ValueError` if a candidate cannot wrap an inner optimizer."""
    for candidate in candidates:
        try:
            candidate.wrap(copy_inner(inner))
        except ValueError as error:
            raise ValueError(f"{candidate.name!r} is not possible: {error}") from error


def copy_inner(inner: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return an unbuilt copy of an optimizer."""
    if inner.built:
        return type(inner).from_config(inner.get_config())
    return copy_optimizer(inner)


def time_steps(
    model: keras.Model,
    data: Any,
    inner: keras.optimizers.Optimizer,
    candidates: Sequence[Candidate],
    budget: float,
    on_progress: Callable[[int, int], None] | None = None,
) -> Timings:
    """Time candidates for `budget` seconds; restore the model's variables."""
    # Every step of a candidate follows a dense one, so that both meet the same load of
    # other processes, and only their ratio counts. The dense step's time is corrected
    # for that load. The loss is the mean square of the outputs.
    first, *others = candidates
    timed = [c for c in others if c.period == 1]  # the others take dense steps
    seconds_each = budget / max(1, len(timed))
    load = machine_load.Load()
    dense_times: list[float] = []
    timings: dict[str, StepTiming] = {}
    with _restored(model):
        dense = _Steps(model, data, first.wrap(copy_inner(inner)))
        if not timed:
            dense_times = dense.time(budget)
        for done, candidate in enumerate(timed, start=1):
            compressed = _Steps(model, data, candidate.wrap(copy_inner(inner)))
            pairs = _time_pairs(dense, compressed, seconds_each)
            dense_times += [pair[0] for pair in pairs]
            ratio, interval = median_with_interval([b / a for a, b in pairs])
            timings[candidate.name] = StepTiming(
                candidate, ratio, compressed.requests, compressed.merges, interval
            )
            if on_progress:
                on_progress(done, len(timed))
    slowdown = load.slowdown()
    seconds = statistics.median(dense_times) / slowdown
    untimed = StepTiming(first, 1.0, dense.requests)
    steps = [timings.get(c.name, untimed._replace(candidate=c)) for c in candidates]
    return Timings([s._replace(seconds=s.seconds * seconds) for s in steps], slowdown)


def _time_pairs(
    first: "_Steps", second: "_Steps", seconds: float
) -> list[tuple[float, float]]:
    """Return the seconds of alternating steps, of at least five pairs."""
    pairs: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while len(pairs) < _MIN_STEPS or time.perf_counter() - begin < seconds:
        pairs.append((first.time_one(), second.time_one()))
    return pairs


def median_with_interval(
    values: Sequence[float],
) -> tuple[float, tuple[float, float]]:
    """Return the median and its 95 % interval relative to it, by order statistics."""
    ordered, count = sorted(values), len(values)
    median = statistics.median(ordered)
    rank = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return median, (ordered[rank] / median, ordered[count - 1 - rank] / median)


class _Steps:
    def __init__(
        self, model: keras.Model, data: Any, optimizer: keras.optimizers.Optimizer
    ):
        self._optimizer = optimizer
        weights = map(tf.convert_to_tensor, model.trainable_variables)
        self._num_bytes = sum(w.shape.num_elements() * w.dtype.size for w in weights)
        optimizer.build(model.trainable_variables)

        @tf.function
        def step() -> tf.Tensor:
            variables = model.trainable_variables
            with tf.GradientTape() as tape:
                loss = _loss(model, data)
            optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        self._step = step
        for _ in range(_WARM_UP_STEPS):
            step().numpy()

    def time(self, seconds: float) -> list[float]:
        """Return the seconds of each step of at least five."""
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < _MIN_STEPS or time.perf_counter() - begin < seconds:
            times.append(self.time_one())
        return times

    def time_one(self) -> float:
        """Return the seconds of one step."""
        begin = time.perf_counter()
        self._step().numpy()
        return time.perf_counter() - begin

    @property
    def merges(self) -> bool:
        """See `StepTiming`."""
        optimizer = self._optimizer
        if not isinstance(optimizer, CompressedOptimizer):
            return False
        return optimizer.settings.allows_merging

    def requests(self, num_workers: int) -> list[RequestSize]:
        """Return the step's requests with some number of workers."""
        optimizer = self._optimizer
        if not isinstance(optimizer, CompressedOptimizer):
            return [RequestSize("sum", float(self._num_bytes))]
        sizes = autotune.request_sizes(
            optimizer.compressor, optimizer.tensors, num_workers
        )
        # Sizes that are known only at run time: those of the timed steps.
        return sizes or [RequestSize("gather", float(optimizer.stats.bytes_per_step))]


def _loss(model: keras.Model, data: Any) -> tf.Tensor:
    outputs = tf.nest.flatten(model(data, training=True))
    squares = [tf.reduce_mean(tf.square(tf.cast(o, tf.float32))) for o in outputs]
    return tf.add_n([*squares, *(tf.cast(loss, tf.float32) for loss in model.losses)])


@contextlib.contextmanager
def _restored(model: keras.Model) -> Iterator[None]:
    values = [tf.identity(v.value) for v in model.variables]
    try:
        yield
    finally:
        for variable, value in zip(model.variables, values, strict=True):
            variable.assign(value)
