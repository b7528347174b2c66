"""Advising: which way to train is the fastest for a model on some links."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.advice import batches, candidates, measuring, predicting, timing, units
from tf_dgc.advice.predicting import Prediction
from tf_dgc.arguments import check_whole
from tf_dgc.cluster import tf_config
from tf_dgc.exchanges import Links
from tf_dgc.inner.wrapper import OptimizerWrapper
from tf_dgc.optimizers import probing
from tf_dgc.reports import of_advice


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
    links: Links
    round_trip: float
    turning_points: dict[int, float]
    known_up_to: float

    def best(self, num_workers: int) -> Prediction:
        """Return what is advised for so many workers."""
        return predicting.best(self.predictions[num_workers])

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
            return f"{said} Dense is advised from {units.rate_text(turn)} on."
        known = units.rate_text(self.known_up_to)
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
            n: predicting.at_rates(
                [p.timed for p in some], n, self.links, self.round_trip, rates
            )
            for n, some in found.items()
        }
        given = of_advice.Given(
            f"{self.model}, batches of {self.batch_size} for each worker",
            *(self.sentences(), self.rows(), rates, by_rate),
            {k: f"{v:.3g} s" for k, v in self.links._asdict().items()},
        )
        return of_advice.make(given)


def advise(
    model: keras.Model,
    *,
    batch_size: int = 32,
    num_workers: Sequence[int] | int | None = None,
    bandwidth: float | str = "1gbit",
    latency: float | str = "0.2ms",
    methods: Sequence[str] | str = candidates.DEFAULT,
    data: Any = None,
    length: int | None = None,
    links: Links | None = None,
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
    rate, round_trip = units.bits_per_second(bandwidth), units.seconds(latency)
    seconds = units.budget(seconds)
    wanted = candidates.find(methods)
    inner = _inner(model)
    with tf_config.alone():
        candidates.check(wanted, inner)
    if data is None:
        data = batches.make(model, batch_size, length)
    if strategy is not None:
        links = measuring.links_of(strategy)
    with tf_config.alone():  # of a cluster, if there is one, each takes its own steps
        timed = timing.time_steps(model, data, inner, wanted, seconds)
        timed = measuring.slowest(timed, strategy)
    if links is None:
        links = predicting.links_of(rate, round_trip, probing.local_speeds())
    else:
        round_trip = predicting.round_trip_of(links)
    return _predicted(model.name, batch_size, timed, numbers, links, round_trip)


def _predicted(
    name: str,
    batch_size: int,
    timed: list[timing.Timed],
    numbers: list[int],
    links: Links,
    round_trip: float,
) -> Advice:
    of_each = {
        number: [predicting.predict_step(t, number, links) for t in timed]
        for number in sorted(set(numbers))
    }
    turns = {
        number: predicting.turning_point(timed, number, links, round_trip)
        for number in of_each
        if number > 1
    }
    known = predicting.known_up_to(links, round_trip)
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
    again = candidates.copy_of(found)
    again.gradient_accumulation_steps = None
    return again


def _code(prediction: Prediction) -> str:
    code = prediction.timed.candidate.code
    return code if prediction.exchange == "ring" else f'{code[:-1]}, exchange="auto")'
