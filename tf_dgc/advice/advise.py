"""Advises the fastest method for a model on given links, before the first run."""

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.advice import timing
from tf_dgc.advice.known_accuracy import accuracy_sentence
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
from tf_dgc.advice.timing import StepTiming
from tf_dgc.arguments import check_whole, show
from tf_dgc.collectives import LinkSpeeds, cost_model, link_benchmark
from tf_dgc.multiworker import tf_config
from tf_dgc.multiworker.strategy import prepare
from tf_dgc.optimizers import autotune
from tf_dgc.optimizers.base import OptimizerWrapper
from tf_dgc.reports import advice_page


@dataclasses.dataclass(frozen=True)
class Advice:
    """Result of `advise`.

    Attributes:
        model: name of the model.
        batch_size: number of examples of a worker's step.
        predictions: lists by number of workers, with one prediction per method.
        links: parameters of the links.
        round_trip: seconds of a round trip between two workers.
        turning_points: bandwidths in bits/s from which on dense steps are advised, by
            number of workers; 0 if they are advised at any bandwidth, infinity if at
            none up to `max_reliable_bandwidth`.
        max_reliable_bandwidth: bandwidth in bits/s up to which predictions are
            reliable.
        slowdown: factor by which other processes slowed the timed steps, for which the
            times are corrected; 1 if they did not.
        kind_of_model: "convolutional", "language" or "other".
    """

    model: str
    batch_size: int
    predictions: dict[int, list[Prediction]]
    links: LinkSpeeds
    round_trip: float
    turning_points: dict[int, float]
    max_reliable_bandwidth: float
    slowdown: float = 1.0
    kind_of_model: str = "other"

    def best(self, num_workers: int) -> Prediction:
        """Return the advised method's prediction for some number of workers."""
        return best_prediction(self.predictions[num_workers])

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per number of workers and method."""
        return [
            self._row(prediction, predictions[0])
            for predictions in self.predictions.values()
            for prediction in predictions
        ]

    def _row(self, prediction: Prediction, dense: Prediction) -> dict[str, Any]:
        examples = self.batch_size * prediction.num_workers
        return {
            "workers": prediction.num_workers,
            "method": prediction.name,
            "collective": prediction.collective,
            "step_ms": 1000 * prediction.seconds,
            "step_ms_interval": [1000 * s for s in prediction.interval],
            "alone_ms": 1000 * prediction.timing.seconds,
            "examples_per_second": examples / prediction.seconds,
            "sent_bytes": round(prediction.sent),
            "of_dense": prediction.seconds / dense.seconds,
            "advised": prediction is self.best(prediction.num_workers),
        }

    def sentences(self) -> list[str]:
        """Return the advice as text."""
        numbers = [number for number in self.predictions if number > 1]
        best = [self.best(number).name for number in numbers]
        known = (accuracy_sentence(n, self.kind_of_model) for n in dict.fromkeys(best))
        return [*map(self._sentence, numbers), *filter(None, known), *self._warnings()]

    def _sentence(self, num_workers: int) -> str:
        best, dense = self.best(num_workers), self.predictions[num_workers][0]
        advice = f"{num_workers} workers: {self._advice(best, dense)}"
        turning_point = self.turning_points[num_workers]
        if turning_point == 0:
            return f"{advice} Dense is advised at any bandwidth."
        if math.isfinite(turning_point):
            return f"{advice} Dense is advised from {rate_text(turning_point)} on."
        limit = rate_text(self.max_reliable_bandwidth)
        return (
            f"{advice} Dense is advised at no bandwidth up to {limit}; faster links "
            "cannot be predicted."
        )

    def _advice(self, best: Prediction, dense: Prediction) -> str:
        fastest = min(self.predictions[best.num_workers], key=lambda p: p.seconds)
        if best is not dense:
            code = best.timing.candidate.code
            if best.collective != "ring":
                code = f'{code[:-1]}, collective="auto")'
            return f"{best.name}, {_speed_text(best, dense)}; {code}."
        if fastest.seconds * cost_model.EQUALLY_FAST < dense.seconds:
            return (
                f"change nothing. The timings are too noisy to tell: {fastest.name} is "
                f"{_speed_text(fastest, dense)}. Repeat this on an idle machine, or "
                "with more seconds."
            )
        return "do not compress. No method is more than 5 % faster."

    def _warnings(self) -> list[str]:
        if self.slowdown < _BUSY:
            return []
        return [
            f"Other processes slowed the timed steps {self.slowdown:.1f} times; the "
            "times above are corrected for that, and less certain. Repeat this on an "
            "idle machine."
        ]

    def record(self) -> dict[str, Any]:
        """Return rows, advice, links and turning points as JSON.

        A turning point of infinity is None.
        """
        return {
            "model": self.model,
            "batch_size": self.batch_size,
            "rows": self.rows(),
            "advice": self.sentences(),
            "links": {**self.links._asdict(), "round_trip": self.round_trip},
            "turning_points": {
                str(number): bandwidth if math.isfinite(bandwidth) else None
                for number, bandwidth in self.turning_points.items()
            },
            "max_reliable_bandwidth": self.max_reliable_bandwidth,
            "slowdown": self.slowdown,
            "kind_of_model": self.kind_of_model,
        }

    def html(self) -> str:
        """Return a self-contained HTML page with figures.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        rates = [10 ** (6 + i / 5) for i in range(21)]  # 1 Mbit/s to 10 Gbit/s
        seconds = {
            number: predictions_at_rates(
                [p.timing for p in predictions],
                number,
                self.links,
                self.round_trip,
                rates,
            )
            for number, predictions in self.predictions.items()
            if number > 1
        }
        return advice_page.advice_page(
            model=self.model,
            batch_size=self.batch_size,
            sentences=self.sentences(),
            rows=self.rows(),
            rates=rates,
            seconds=seconds,
            links={k: f"{v:.3g} s" for k, v in self.links._asdict().items()},
        )


_BUSY = 1.1  # slowdown from which on the advice mentions other processes


def _speed_text(prediction: Prediction, dense: Prediction) -> str:
    low, high = (dense.seconds / seconds for seconds in prediction.interval[::-1])
    speed = dense.seconds / prediction.seconds
    return f"{speed:.1f} ({low:.1f} to {high:.1f}) times as fast as dense"


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
    on_progress: Callable[[int, int], None] | None = None,
) -> Advice:
    """Advise the fastest method for a model, before the first run.

    Times a step of the model on this machine with each method, and predicts the steps
    of several workers, each on a machine like this one, with the cost model of
    `collective="auto"`. A method is advised only if it is faster than dense steps
    beyond the noise of these timings. The advice does not depend on accuracy, but its
    last sentences state what is known about the advised methods.

    Args:
        model: model, functional or with `data`; compiled or not. It is not changed.
        batch_size: number of examples of a worker's step.
        num_workers: one or more numbers of workers; None for 2, 4 and 8, or the number
            of workers of `strategy`.
        bandwidth: rate of a worker's link, in both directions at once: bits per second,
            or text like "1gbit".
        latency: round trip between two workers, as reported by `ping`: seconds, or text
            like "0.2ms".
        methods: "dgc", "dgc 0.99", "local_sgd 16", or names of compression methods;
            dense is always included. The first of equally fast ones is advised.
        data: inputs of one worker's step, `batch_size` examples; None for random inputs
            of the model's shapes.
        length: length of all axes of random inputs that have no fixed length, and
            number of words of a text; None if there are no such axes, and for 32 words.
        links: measured parameters of the links, instead of `bandwidth` and `latency`.
        strategy: strategy with several workers, to measure their links. All workers
            call `advise` outside of its scope, each with a model created outside of it;
            the slowest worker's time of each step counts.
        seconds: seconds to spend on timed steps, without tracing.
        on_progress: function of the number of methods that have been timed, and of
            their total number; it is called after each.

    Returns:
        An `Advice`.

    Raises:
        ValueError: for invalid arguments, and without `data` for models that do not
            define their inputs, or with axes of no fixed length without `length`.
    """
    numbers = _worker_numbers(num_workers, strategy)
    batch_size = check_whole("batch_size", batch_size)
    bits_per_second = parse_bits_per_second(bandwidth)
    round_trip = parse_seconds(latency)
    budget = parse_budget(seconds)
    candidates = timing.find_candidates(methods)
    inner = _inner_optimizer(model)
    # In a cluster each worker takes its own steps.
    with tf_config.single_worker():
        timing.check_candidates(candidates, inner)
    if data is None:
        data = create_batch(model, batch_size, length)
    if strategy is not None:
        links = measured_links(strategy)
    with tf_config.single_worker():
        timings, slowdown = timing.time_steps(
            model, data, inner, candidates, budget, on_progress
        )
        if strategy is not None:
            timings = slowest_timings(timings, strategy)
    if links is None:
        links = links_of(bits_per_second, round_trip, autotune.local_speeds())
    else:
        round_trip = round_trip_of(links)
    predictions = {
        number: [predict_step(t, number, links) for t in timings]
        for number in sorted(set(numbers))
    }
    turning_points = {
        number: turning_point(timings, number, links, round_trip)
        for number in predictions
        if number > 1
    }
    return Advice(
        model.name,
        batch_size,
        predictions,
        links,
        round_trip,
        turning_points,
        reliable_up_to(links, round_trip),
        slowdown,
        kind_of_model(model),
    )


def _worker_numbers(
    num_workers: Sequence[int] | int | None, strategy: tf.distribute.Strategy | None
) -> list[int]:
    if num_workers is None:
        num_workers = strategy.num_replicas_in_sync if strategy else (2, 4, 8)
    numbers = [num_workers] if isinstance(num_workers, int) else list(num_workers)
    return [check_whole("num_workers", number) for number in numbers]


def _inner_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if isinstance(optimizer, OptimizerWrapper):
        optimizer = optimizer.unwrap()
    if optimizer is None:
        return keras.optimizers.SGD(0.01, momentum=0.9)
    inner = timing.copy_inner(optimizer)
    inner.gradient_accumulation_steps = None
    return inner


def measured_links(strategy: tf.distribute.Strategy) -> LinkSpeeds:
    """Return measured links, as `collective="auto"` does; all workers call it."""
    if strategy.num_replicas_in_sync == 1:
        raise ValueError(
            "`strategy` must have two or more workers, to measure the links between "
            "them: start them with `tf-dgc run`, or set TF_CONFIG. "
            f"Received: strategy={show(strategy)}"
        )
    return autotune.measure_links(prepare(strategy))


def slowest_timings(
    timings: Sequence[StepTiming], strategy: tf.distribute.Strategy
) -> list[StepTiming]:
    """Return the timings with the slowest worker's seconds; all workers call it."""
    slowest = link_benchmark.run_probe(
        strategy, autotune.share_slowest([t.seconds for t in timings])
    )
    return [
        t._replace(seconds=seconds) for t, seconds in zip(timings, slowest, strict=True)
    ]


_TEXT_WORDS = 32


def create_batch(
    model: keras.Model, batch_size: int, length: int | None = None, seed: int = 0
) -> Any:
    """Return random inputs: normal numbers, valid integers, texts of known words."""
    # `length` is that of axes without a fixed one, and the number of words of a text.
    if length is not None:
        length = check_whole("length", length)
    inputs = _inputs(model)
    if inputs is None:
        raise ValueError(
            "A step is timed with inputs of the model's shapes, and this model does "
            "not define them: pass a batch of yours as `data`, or a functional model. "
            f"Received: model={show(model)}"
        )
    random = np.random.default_rng(seed)
    max_integer = _max_integer(model)
    words, num_words = _known_words(model), 1
    if _layers_of(model, keras.layers.TextVectorization):
        num_words = length or _TEXT_WORDS

    def values(tensor: Any) -> tf.Tensor:
        sizes = [length if size is None else size for size in tensor.shape[1:]]
        if None in sizes:
            raise ValueError(
                f"The input {tensor.name!r} has axes of any length: pass their length "
                "as `length` (`--length N`), or a batch of yours as `data`. "
                f"Received: shape={tuple(tensor.shape)}"
            )
        shape: Any = [batch_size, *sizes]
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if dtype == "string":
            texts = random.choice(words, [*shape, num_words]).reshape(-1, num_words)
            return tf.reshape(tf.constant([" ".join(t) for t in texts]), shape)
        if "int" in dtype:
            return tf.constant(random.integers(0, max_integer, shape), dtype)
        return tf.cast(tf.constant(random.normal(size=shape), tf.float32), dtype)

    return keras.tree.map_structure(values, inputs)


def _inputs(model: keras.Model) -> Any:
    if isinstance(model, keras.Sequential):
        return model.inputs[0] if model.built and model.inputs else None
    return getattr(model, "input", None)


def _max_integer(model: keras.Model) -> int:
    """Return the bound of integers that all embeddings accept; 2 without any."""
    embeddings = _layers_of(model, keras.layers.Embedding)
    return min((layer.input_dim for layer in embeddings), default=2)


def _known_words(model: keras.Model) -> list[str]:
    vocabularies = [
        set(map(str, layer.get_vocabulary(include_special_tokens=False)))
        for layer in _layers_of(
            model, keras.layers.TextVectorization, keras.layers.StringLookup
        )
    ]
    common = set.intersection(*vocabularies) if vocabularies else set()
    return sorted(common) or [f"word{i}" for i in range(100)]


def kind_of_model(model: keras.Model) -> str:
    """Return "convolutional", "language" for texts and sequences of ids, or "other"."""
    layers = keras.layers
    if _layers_of(model, layers.Embedding, layers.LSTM, layers.GRU):
        return "language"
    if _layers_of(model, layers.Conv1D, layers.Conv2D, layers.Conv3D):
        return "convolutional"
    return "other"


def _layers_of(model: keras.Model, *classes: type) -> list[Any]:
    return [layer for layer in _all_layers(model) if isinstance(layer, classes)]


def _all_layers(layer: keras.Layer) -> Iterator[keras.Layer]:
    yield layer
    for part in getattr(layer, "layers", ()):
        yield from _all_layers(part)


_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def parse_bits_per_second(bandwidth: float | str) -> float:
    """Return the bits per second of a number or a text like "100 Mbit/s"."""
    units = {**_RATES, **{f"{unit}/s": factor for unit, factor in _RATES.items()}}
    bits_per_second = _parse(bandwidth, units)
    if not 0 < bits_per_second < math.inf:
        raise ValueError(
            "`bandwidth` must be above 0: bits per second, or a text with a unit of "
            f'{", ".join(_RATES)}, as "1gbit". Received: bandwidth={show(bandwidth)}'
        )
    return bits_per_second


def parse_seconds(latency: float | str) -> float:
    """Return the seconds of a number or a text like "0.2ms"."""
    seconds = _parse(latency, _TIMES)
    if not 0 <= seconds < math.inf:
        raise ValueError(
            "`latency` must be 0 or more: seconds, or a text with a unit of "
            f'{", ".join(_TIMES)}, as "0.2ms". Received: latency={show(latency)}'
        )
    return seconds


def parse_budget(budget: float | str) -> float:
    """Return the time to spend on timed steps in seconds."""
    seconds = _parse(budget, _TIMES)
    if not 0 < seconds < math.inf:
        raise ValueError(
            "`seconds` must be above 0: time to spend on timed steps. "
            f"Received: seconds={show(budget)}"
        )
    return seconds


def _parse(value: Any, units: dict[str, float]) -> float:
    """Return a value in the unit with factor 1; NaN for an invalid one."""
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


def rate_text(bits_per_second: float) -> str:
    """Return a bandwidth as text with two digits."""
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        number = bits_per_second / factor
        if number >= 99.5:
            return f"{number:,.0f} {unit}"
        if number >= 0.9995:  # rounds to 1 of this unit, not 1,000 of the next
            return f"{number:.2g} {unit}"
    return f"{bits_per_second:.0f} bit/s"
