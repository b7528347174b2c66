"""Advising: which way to train is the fastest for a model on some links."""

import dataclasses
import math
import numbers
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.advice import timing
from tf_dgc.advice.prediction import (
    Prediction,
    best_prediction,
    links_of,
    predict_step,
    predictions_at_rates,
    reliable_up_to,
    round_trip_of,
    turning_point,
)
from tf_dgc.advice.timing import Timed
from tf_dgc.arguments import check_whole, show
from tf_dgc.collectives import LinkSpeeds, link_benchmark
from tf_dgc.multiworker import tf_config
from tf_dgc.multiworker.strategy import prepare
from tf_dgc.optimizers import autotune
from tf_dgc.optimizers.base import OptimizerWrapper
from tf_dgc.reports import advice_page

# --- Units: rates and times as people write them, "1gbit" and "0.2ms".

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def parse_bits_per_second(rate: float | str) -> float:
    """Return a rate in bits per second.

    Args:
        rate: number of bits per second, or text as `tc` has it: "1gbit", "100 Mbit/s".

    Raises:
        ValueError: for anything else, and for what is not above 0.
    """
    found = _number(rate, {**_RATES, **{f"{u}/s": f for u, f in _RATES.items()}})
    if not 0 < found < math.inf:
        raise ValueError(
            "`bandwidth` must be above 0: bits per second, or a text with a unit of "
            f'{", ".join(_RATES)}, as "1gbit". Received: bandwidth={show(rate)}'
        )
    return found


def parse_seconds(time: float | str) -> float:
    """Return a time in seconds.

    Args:
        time: number of seconds, or a text with a unit: "0.2ms".

    Raises:
        ValueError: for anything else, and for what is below 0.
    """
    found = _number(time, _TIMES)
    if not 0 <= found < math.inf:
        raise ValueError(
            "`latency` must be 0 or more: seconds, or a text with a unit of "
            f'{", ".join(_TIMES)}, as "0.2ms". Received: latency={show(time)}'
        )
    return found


def parse_budget(time: float | str) -> float:
    """Return seconds to spend on something.

    Args:
        time: number of seconds, or a text with a unit.

    Raises:
        ValueError: for anything else, and for what is not above 0.
    """
    found = _number(time, _TIMES)
    if not 0 < found < math.inf:
        raise ValueError(
            "`seconds` must be above 0: time to spend on timed steps. "
            f"Received: seconds={show(time)}"
        )
    return found


def _number(value: Any, units: dict[str, float]) -> float:
    """Return a value in the unit whose factor is 1; NaN if it is none."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, str):
        return math.nan
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z/]*)\s*", value.lower())
    try:
        number, unit = float(match[1]), match[2]  # type: ignore[index]
        return number * (units[unit] if unit else 1.0)
    except (TypeError, ValueError, KeyError):
        return math.nan


def rate_text(bits: float) -> str:
    """Return a rate as people write it, with two digits."""
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        number = bits / factor
        if number >= 99.5:
            return f"{number:,.0f} {unit}"
        if number >= 0.9995:  # or it would be rounded to 1,000 of the next one
            return f"{number:.2g} {unit}"
    return f"{bits:.0f} bit/s"


# --- Batches: inputs that a model takes, made up where none are given.

_WORDS = 32  # of a text


def create_batch(
    model: keras.Model, batch_size: int, length: int | None = None, seed: int = 0
) -> Any:
    """Return made-up inputs: normal numbers, valid integers, and texts of known words.

    Args:
        model: model whose inputs are known, as those of a functional one are.
        batch_size: number of examples.
        length: length of axes that may have any, and number of words of a text; None
            if there are no such axes, and for 32 words.
        seed: seed of the numbers.

    Returns:
        Tensors of the structure of the model's inputs.

    Raises:
        ValueError: if the model does not say what it takes, or has axes of any length
            without `length`.
    """
    if length is not None:
        length = check_whole("length", length)
    inputs = _inputs(model)
    if inputs is None:
        raise ValueError(
            "A step is timed with inputs of the model's shapes, and this one does not "
            "say them: pass a batch of yours as `data`, or a functional model. "
            f"Received: model={show(model)}"
        )
    random = np.random.default_rng(seed)
    vocabulary = _vocabulary(model)
    words, number = _words(model), _words_of_a_text(model, length)

    def values(tensor: Any) -> tf.Tensor:
        sizes = [length if size is None else size for size in tensor.shape[1:]]
        if None in sizes:
            raise ValueError(
                f"The input {tensor.name!r} has axes of any length: say of which by "
                "`length` (`--length N`), or pass a batch of yours as `data`. "
                f"Received: shape={tuple(tensor.shape)}"
            )
        shape: Any = [batch_size, *sizes]
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if dtype == "string":
            texts = random.choice(words, [*shape, number]).reshape(-1, number)
            return tf.reshape(tf.constant([" ".join(t) for t in texts]), shape)
        if "int" in dtype:
            return tf.constant(random.integers(0, vocabulary, shape), dtype)
        return tf.cast(tf.constant(random.normal(size=shape), tf.float32), dtype)

    return keras.tree.map_structure(values, inputs)


def _inputs(model: keras.Model) -> Any:
    """Return what a model says that it takes, in the structure of it; None if not."""
    if isinstance(model, keras.Sequential):
        return model.inputs[0] if model.built and model.inputs else None
    return getattr(model, "input", None)


def _vocabulary(model: keras.Model) -> int:
    """Return how many integers all embeddings of a model know; 2 without any."""
    known = [
        x.input_dim for x in _parts(model) if isinstance(x, keras.layers.Embedding)
    ]
    return min(known, default=2)


def _words(model: keras.Model) -> list[str]:
    """Return words that all layers for texts know; some if there are none."""
    known = [
        set(map(str, x.get_vocabulary(include_special_tokens=False)))
        for x in _parts(model)
        if isinstance(x, keras.layers.TextVectorization | keras.layers.StringLookup)
    ]
    common = set.intersection(*known) if known else set()
    return sorted(common) or [f"word{i}" for i in range(100)]


def _words_of_a_text(model: keras.Model, length: int | None) -> int:
    texts = any(isinstance(x, keras.layers.TextVectorization) for x in _parts(model))
    return (length or _WORDS) if texts else 1


def _parts(layer: keras.Layer) -> Iterator[keras.Layer]:
    """Yield a layer and all that are within it."""
    yield layer
    for part in getattr(layer, "layers", ()):
        yield from _parts(part)


# --- Measuring: the links of workers that are there, and the slowest of them.


def measured_links(strategy: tf.distribute.Strategy) -> LinkSpeeds:
    """Return the numbers of the links, as `exchange="auto"` measures them.

    All workers call it.

    Raises:
        ValueError: for a strategy of one worker.
    """
    if strategy.num_replicas_in_sync == 1:
        raise ValueError(
            "`strategy` must have two workers or more, between which there is "
            "something to measure: start them by `tf-dgc run`, or set TF_CONFIG. "
            f"Received: strategy={show(strategy)}"
        )
    return autotune.measure_links(prepare(strategy))


def slowest_links(
    timed: Sequence[Timed], strategy: tf.distribute.Strategy | None
) -> list[Timed]:
    """Return the same with the seconds of the worker that takes longest.

    All workers call it; without a strategy there is one.
    """
    if strategy is None:
        return list(timed)
    found = link_benchmark.run_probe(
        strategy, autotune.share_slowest([t.seconds for t in timed])
    )
    pairs = zip(timed, found, strict=True)
    return [each._replace(seconds=seconds) for each, seconds in pairs]


@dataclasses.dataclass(frozen=True)
class Advice:
    """What `advise` found.

    Attributes:
        model: name of the model.
        batch_size: examples of a worker's step.
        predictions: a list for each number of workers, with one of each way to train.
        links: numbers of the links that were taken.
        round_trip: seconds of a round trip between two workers.
        turning_points: bandwidths in bits/s from which on dense steps are advised, by
            number of workers; 0 if they are at any, infinity if at none up to
            `known_up_to`.
        known_up_to: bandwidth in bits/s of the fastest links that predictions are for.
    """

    model: str
    batch_size: int
    predictions: dict[int, list[Prediction]]
    links: LinkSpeeds
    round_trip: float
    turning_points: dict[int, float]
    known_up_to: float

    def best(self, num_workers: int) -> Prediction:
        """Return what is advised for so many workers."""
        return best_prediction(self.predictions[num_workers])

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per number of workers and way to train."""
        return [
            self._row(prediction, found[0])
            for found in self.predictions.values()
            for prediction in found
        ]

    def _row(self, prediction: Prediction, dense: Prediction) -> dict[str, Any]:
        examples = self.batch_size * prediction.num_workers
        return {
            "workers": prediction.num_workers,
            "method": prediction.name,
            "exchange": prediction.exchange,
            "step_ms": 1000 * prediction.seconds,
            "alone_ms": 1000 * prediction.timed.seconds,
            "examples_per_second": examples / prediction.seconds,
            "sent_bytes": round(prediction.sent),
            "of_dense": prediction.seconds / dense.seconds,
            "advised": prediction is self.best(prediction.num_workers),
        }

    def sentences(self) -> list[str]:
        """Return what to do, a sentence or two per number of workers."""
        return [self._sentence(number) for number in self.predictions if number > 1]

    def _sentence(self, number: int) -> str:
        chosen, dense = self.best(number), self.predictions[number][0]
        if chosen is dense:
            said = f"{number} workers: do not compress."
        else:
            times = dense.seconds / chosen.seconds
            said = (
                f"{number} workers: {chosen.name}, {times:.1f} times as fast as dense; "
                f"{_code(chosen)}."
            )
        turn = self.turning_points[number]
        if turn == 0:
            return f"{said} Dense is advised at any bandwidth."
        if math.isfinite(turn):
            return f"{said} Dense is advised from {rate_text(turn)} on."
        known = rate_text(self.known_up_to)
        return (
            f"{said} Dense is advised at no bandwidth up to {known}; of faster links "
            "nothing is known."
        )

    def record(self) -> dict[str, Any]:
        """Return all of it, for JSON: rows, what to do, links, turning points.

        A turning point of infinity is None.
        """
        turns = self.turning_points.items()
        return {
            "model": self.model,
            "batch_size": self.batch_size,
            "rows": self.rows(),
            "advice": self.sentences(),
            "links": {**self.links._asdict(), "round_trip": self.round_trip},
            "turning_points": {
                str(n): turn if math.isfinite(turn) else None for n, turn in turns
            },
            "known_up_to": self.known_up_to,
        }

    def html(self) -> str:
        """Return a page with pictures that needs no other file.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        rates = [10 ** (6 + i / 5) for i in range(21)]  # 1 Mbit/s to 10 Gbit/s
        found = {n: some for n, some in self.predictions.items() if n > 1}
        by_rate = {
            n: predictions_at_rates(
                [p.timed for p in some], n, self.links, self.round_trip, rates
            )
            for n, some in found.items()
        }
        given = advice_page.AdviceInput(
            f"{self.model}, batches of {self.batch_size} for each worker",
            *(self.sentences(), self.rows(), rates, by_rate),
            {k: f"{v:.3g} s" for k, v in self.links._asdict().items()},
        )
        return advice_page.advice_page(given)


def advise(
    model: keras.Model,
    *,
    batch_size: int = 32,
    num_workers: Sequence[int] | int | None = None,
    bandwidth: float | str = "1gbit",
    latency: float | str = "0.2ms",
    methods: Sequence[str] | str = timing.DEFAULT,
    data: Any = None,
    length: int | None = None,
    links: LinkSpeeds | None = None,
    strategy: tf.distribute.Strategy | None = None,
    seconds: float = 20.0,
) -> Advice:
    """Say which way to train a model is the fastest, before the first run.

    Times a step of the model on this machine by each way, and predicts what several
    workers take, each on a machine as this one, by the model of `exchange="auto"`. It
    knows nothing of accuracy.

    Args:
        model: model, functional or with `data`; compiled or not. It is not changed.
        batch_size: examples of a worker's step.
        num_workers: numbers of workers, each 1 or more; None for 2, 4 and 8, or those
            of `strategy`.
        bandwidth: rate of a worker's link, both ways at once: bits per second, or as
            "1gbit".
        latency: round trip between two workers, as `ping` says: seconds, or "0.2ms".
        methods: ways to train: "dgc", "dgc 0.99", "local_sgd 16", or names of methods;
            dense is always among them. Of equally fast ones the first is advised.
        data: inputs of one worker's step, of `batch_size` examples; None for made-up
            ones of the model's shapes.
        length: length of all axes of made-up inputs that may have any, and number of
            words of a text; None if there are no such axes, and for 32 words.
        links: numbers that were measured, instead of `bandwidth` and `latency`.
        strategy: strategy of several workers, all of which call this outside of its
            scope, with a model that each made outside of it: their links are measured,
            and of each step the time of the slowest worker counts.
        seconds: seconds to spend on timed steps, tracing apart.

    Returns:
        An `Advice`.

    Raises:
        ValueError: for arguments that cannot be, and models that do not say their
            inputs, or of axes of any length without `length`.
    """
    numbers = _numbers(num_workers, strategy)
    batch_size = check_whole("batch_size", batch_size)
    rate, round_trip = parse_bits_per_second(bandwidth), parse_seconds(latency)
    seconds = parse_budget(seconds)
    wanted = timing.find_candidates(methods)
    inner = _inner(model)
    with tf_config.single_worker():
        timing.check_candidates(wanted, inner)
    if data is None:
        data = create_batch(model, batch_size, length)
    if strategy is not None:
        links = measured_links(strategy)
    with (
        tf_config.single_worker()
    ):  # of a cluster, if there is one, each takes its own steps
        timed = timing.time_steps(model, data, inner, wanted, seconds)
        timed = slowest_links(timed, strategy)
    if links is None:
        links = links_of(rate, round_trip, autotune.local_speeds())
    else:
        round_trip = round_trip_of(links)
    return _predicted(model.name, batch_size, timed, numbers, links, round_trip)


def _predicted(
    name: str,
    batch_size: int,
    timed: list[timing.Timed],
    numbers: list[int],
    links: LinkSpeeds,
    round_trip: float,
) -> Advice:
    of_each = {
        number: [predict_step(t, number, links) for t in timed]
        for number in sorted(set(numbers))
    }
    turns = {
        number: turning_point(timed, number, links, round_trip)
        for number in of_each
        if number > 1
    }
    known = reliable_up_to(links, round_trip)
    return Advice(name, batch_size, of_each, links, round_trip, turns, known)


def _numbers(
    num_workers: Sequence[int] | int | None, strategy: tf.distribute.Strategy | None
) -> list[int]:
    if num_workers is None:
        num_workers = strategy.num_replicas_in_sync if strategy else (2, 4, 8)
    numbers = [num_workers] if isinstance(num_workers, int) else list(num_workers)
    return [check_whole("num_workers", number) for number in numbers]


def _inner(model: keras.Model) -> keras.optimizers.Optimizer:
    """Return the optimizer of the model that is to be wrapped, of one call a step."""
    found = getattr(model, "optimizer", None)
    if isinstance(found, keras.optimizers.LossScaleOptimizer):
        found = found.inner_optimizer
    if isinstance(found, OptimizerWrapper):
        found = found.unwrap()
    if found is None:
        return keras.optimizers.SGD(0.01, momentum=0.9)
    again = timing.copy_model(found)
    again.gradient_accumulation_steps = None
    return again


def _code(prediction: Prediction) -> str:
    code = prediction.timed.candidate.code
    return code if prediction.exchange == "ring" else f'{code[:-1]}, exchange="auto")'
