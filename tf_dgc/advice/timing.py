"""Timing: a step of a model on this machine, by each way to train, by turns."""

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

# --- Candidates: the ways to train that are compared.

DENSE = "dense"
PERIOD = 16
"""Steps between two exchanges of local SGD, as a candidate."""
DEFAULT = (DENSE, "float16", "uniform_8bit", "power_sgd", "dgc", f"local_sgd {PERIOD}")
"""What is compared by itself, and of equally fast ones the first is advised."""


class Candidate(NamedTuple):
    """A way to train.

    Attributes:
        name: name of it, as `advise(methods=...)` takes it.
        make: function of an inner optimizer that returns the one whose step is timed.
        period: number of steps from one exchange to the next.
        code: text to write in a script, where the optimizer was.
    """

    name: str
    make: Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer]
    period: int = 1
    code: str = "optimizer"


def find_candidates(names: Sequence[str] | str) -> list[Candidate]:
    """Return candidates by name; the dense one is always among them, and first.

    Args:
        names: "dense", "dgc", "dgc SPARSITY", "local_sgd PERIOD", or methods as
            `tf-dgc methods` lists them; one alone, too.

    Raises:
        ValueError: for other names.
    """
    names = [names] if isinstance(names, str) else names
    wanted = [DENSE, *(name for name in names if name != DENSE)]
    return [_find(name) for name in dict.fromkeys(wanted)]


def copy_model(inner: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return another optimizer of the same settings; of a built one, of its config."""
    if inner.built:
        return type(inner).from_config(inner.get_config())
    return copy_optimizer(inner)


def check_candidates(
    wanted: Sequence[Candidate], inner: keras.optimizers.Optimizer
) -> None:
    """Raise `ValueError` if one cannot be made, before any is timed.

    Args:
        wanted: ways to train.
        inner: optimizer that they are to be made of, which is copied.
    """
    for candidate in wanted:
        try:
            candidate.make(copy_model(inner))
        except ValueError as error:
            raise ValueError(f"{candidate.name!r} cannot be: {error}") from error


def _find(name: str) -> Candidate:
    kind, _, number = name.partition(" ")
    try:
        if name == DENSE:
            return Candidate(name, lambda inner: inner)
        if kind == "dgc":
            sparsity = float(number or 0.999)
            code = "tf_dgc.DGCOptimizer(optimizer" + (
                f", {sparsity})" if number else ")"
            )
            return Candidate(name, lambda i: DGCOptimizer(i, sparsity), code=code)
        if kind == "local_sgd":
            period = check_period(int(number or PERIOD))
            code = f"tf_dgc.local_sgd(optimizer, {period})"
            # A local step is the inner optimizer's own.
            return Candidate(name, lambda inner: inner, period, code)
        method = compressors.METHODS[name]
    except (KeyError, ValueError):
        raise ValueError(
            '`methods` must be of "dense", "dgc", "dgc 0.99", "local_sgd 16" and '
            f"{', '.join(sorted(compressors.METHODS))}. Received: {show(name)}"
        ) from None
    code = f'tf_dgc.CompressedOptimizer(optimizer, "{name}")'
    return Candidate(name, lambda i: CompressedOptimizer(i, method()), code=code)


_WARM_UP = 3
_LEAST = 5
_TURNS = 3


class Timed(NamedTuple):
    """What a step takes one worker that has nobody to wait for.

    Attributes:
        candidate: way to train.
        seconds: seconds of a step: forward and backward pass, compression, decoding of
            its own words, update.
        asked: function of a number of workers that returns what the step asks for.
        merges: whether exchanges that merge entries on the way can carry it.
    """

    candidate: Candidate
    seconds: float
    asked: Callable[[int], list[RequestSize]]
    merges: bool = False


def time_steps(
    model: keras.Model,
    data: Any,
    inner: keras.optimizers.Optimizer,
    candidates: Sequence[Candidate],
    budget: float,
) -> list[Timed]:
    """Time a step by each candidate; the model is afterwards what it was.

    Steps of each take turns with those of the first, whose times tell how much of the
    machine there was meanwhile. The loss is the mean square of the outputs.

    Args:
        model: model whose gradients are formed.
        data: inputs of one worker's step.
        inner: optimizer to be wrapped.
        candidates: ways to train, the dense one first.
        budget: seconds to spend on the steps of all, without tracing.
    """
    first, *others = candidates
    share = budget / max(1, len(others)) / 2
    with _kept(model):
        dense = _Steps(model, data, first.make(copy_model(inner)))
        reference = statistics.median(dense.take(share))
        found = [Timed(first, reference, dense.asked)]
        for candidate in others:
            made = candidate.make(copy_model(inner))
            if candidate.period > 1:  # its steps are those of the first
                found.append(Timed(candidate, reference, dense.asked))
                continue
            steps = _Steps(model, data, made)
            ratio = _ratio(steps, dense, share)
            hyperparameters = ratio * reference
            found.append(Timed(candidate, hyperparameters, steps.asked, steps.merges))
    return found


def _ratio(steps: "_Steps", others: "_Steps", share: float) -> float:
    """Return what steps take by what others take meanwhile, the median of turns."""
    pairs = []
    for _ in range(_TURNS):
        turn = [statistics.median(s.take(share / _TURNS)) for s in (steps, others)]
        pairs.append(turn[0] / turn[1])
    return statistics.median(pairs)


class _Steps:
    """Steps of a model by an optimizer of its own."""

    def __init__(
        self, model: keras.Model, data: Any, optimizer: keras.optimizers.Optimizer
    ):
        self._optimizer = optimizer
        weights = map(tf.convert_to_tensor, model.trainable_variables)
        self._num_bytes = sum(v.shape.num_elements() * v.dtype.size for v in weights)
        optimizer.build(model.trainable_variables)

        @tf.function
        def step() -> tf.Tensor:
            variables = model.trainable_variables
            with tf.GradientTape() as tape:
                loss = _loss(model, data)
            optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        self._step = step
        for _ in range(_WARM_UP):
            step().numpy()

    def take(self, seconds: float) -> list[float]:
        """Return the seconds of each of some steps, some five at least."""
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < _LEAST or time.perf_counter() - begun < seconds:
            start = time.perf_counter()
            self._step().numpy()
            times.append(time.perf_counter() - start)
        return times

    @property
    def merges(self) -> bool:
        """Whether exchanges that merge entries on the way can carry what it sends."""
        optimizer = self._optimizer
        if not isinstance(optimizer, CompressedOptimizer):
            return False
        return optimizer.settings.allows_merging

    def asked(self, num_workers: int) -> list[RequestSize]:
        """Return what a step asks for with so many workers."""
        optimizer = self._optimizer
        if not isinstance(optimizer, CompressedOptimizer):
            return [RequestSize("sum", float(self._num_bytes))]
        asks = optimizer.compressor, optimizer.tensors, num_workers
        # Where it is known only when it runs, as much as in these steps.
        sent = [RequestSize("gather", float(optimizer.stats.bytes_per_step))]
        return autotune.request_sizes(*asks) or sent


def _loss(model: keras.Model, data: Any) -> tf.Tensor:
    outputs = tf.nest.flatten(model(data, training=True))
    squares = [tf.reduce_mean(tf.square(tf.cast(o, tf.float32))) for o in outputs]
    return tf.add_n([*squares, *(tf.cast(loss, tf.float32) for loss in model.losses)])


@contextlib.contextmanager
def _kept(model: keras.Model) -> Iterator[None]:
    """Give all variables back what they hold now."""
    values = [tf.identity(v.value) for v in model.variables]
    try:
        yield
    finally:
        for variable, value in zip(model.variables, values, strict=True):
            variable.assign(value)
