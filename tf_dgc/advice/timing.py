"""Times a step of a model on this machine with each method, in turns."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dgc import compressors
from tf_dgc._internals.optimizer_copies import copy_optimizer
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
_TURNS = 3


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
) -> list[StepTiming]:
    """Time candidates for `budget` seconds; restore the model's variables."""
    # The steps of each candidate alternate with those of the first, the dense one,
    # which show how fast the machine was meanwhile. The loss is the mean square of the
    # outputs.
    first, *others = candidates
    seconds_each = budget / max(1, len(others)) / 2
    with _restored(model):
        dense = _Steps(model, data, first.wrap(copy_inner(inner)))
        dense_seconds = statistics.median(dense.time(seconds_each))
        timings = [StepTiming(first, dense_seconds, dense.requests)]
        for candidate in others:
            optimizer = candidate.wrap(copy_inner(inner))
            if candidate.period > 1:  # takes dense steps
                timings.append(StepTiming(candidate, dense_seconds, dense.requests))
                continue
            steps = _Steps(model, data, optimizer)
            seconds = _time_ratio(steps, dense, seconds_each) * dense_seconds
            timings.append(StepTiming(candidate, seconds, steps.requests, steps.merges))
    return timings


def _time_ratio(steps: "_Steps", reference: "_Steps", seconds: float) -> float:
    """Return the time of steps relative to others, the median of several turns."""
    ratios = []
    for _ in range(_TURNS):
        median = statistics.median(steps.time(seconds / _TURNS))
        ratios.append(median / statistics.median(reference.time(seconds / _TURNS)))
    return statistics.median(ratios)


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
            step_begin = time.perf_counter()
            self._step().numpy()
            times.append(time.perf_counter() - step_begin)
        return times

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
