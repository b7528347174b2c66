"""Predicts a step of several workers from one worker's step and the links."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tf_dgc.advice.timing import DENSE, StepTiming
from tf_dgc.collectives import (
    Auto,
    CollectiveAlgorithm,
    LinkSpeeds,
    Ring,
    cost_model,
    predict_seconds,
)

# Cost besides the links, measured between two processes on one machine: seconds of a
# collective, of a round, and per byte (docs/research/advice.md).
LAUNCH, ROUND, PER_BYTE = 3e-4, 1e-4, 2.4e-9
_GOODPUT = 0.956  # share of a link's rate that is not packet headers
_LONG = 64e3  # bytes in flight above which TCP carries less, as measured
_LONG_GOODPUT = 0.8  # with two to four workers at 100 Mbit/s and 20 ms
_SLOWEST = 1e4  # bit/s, lower end of the search for the turning point


class Prediction(NamedTuple):
    """Predicted step of one method with some number of workers."""

    timing: StepTiming
    num_workers: int
    collective: str  # name of the algorithm that `collective="auto"` would choose
    seconds: float  # seconds of a step, averaged over the period of local steps
    sent: float  # bytes that a worker sends per step, averaged likewise

    @property
    def name(self) -> str:
        """Name of the method."""
        return self.timing.candidate.name

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of `seconds` with regard to the noise of the timed steps."""
        exchange = self.seconds - self.timing.seconds
        low, high = (self.timing.seconds * factor for factor in self.timing.interval)
        return low + exchange, high + exchange


def links_of(
    bandwidth: float,
    latency: float,
    speeds: Sequence[float] = (0.0, 0.0, 0.0),
    sharing: float = 1.0,
) -> LinkSpeeds:
    """Return links of `bandwidth` bits/s and a round trip of `latency` seconds."""
    # A worker requests another one's data when a collective begins, so each begins with
    # half a round trip, as measured links do. Processing of bytes overlaps with the
    # transfer of later ones. `speeds` are seconds per byte, as `autotune.local_speeds`
    # measures them.
    half = latency / 2
    per_byte = max(_seconds_per_byte(bandwidth, latency), sharing * PER_BYTE)
    links = LinkSpeeds(LAUNCH + half, ROUND + half, per_byte, *speeds)
    return links._replace(start=LAUNCH)


def round_trip_of(links: LinkSpeeds) -> float:
    """Return the seconds of a round trip of measured links."""
    return 2 * max(0.0, links.latency - ROUND)


def predict_step(timing: StepTiming, num_workers: int, links: LinkSpeeds) -> Prediction:
    """Predict a step with the algorithm that `collective="auto"` would choose."""
    requests = timing.requests(num_workers)
    period = timing.candidate.period
    algorithms = _algorithms(timing, num_workers)
    exchange_seconds = [
        predict_seconds(a, requests, num_workers, links) for a in algorithms
    ]
    best = cost_model.first_of_the_fastest(exchange_seconds)
    algorithm = algorithms[best]
    # One worker's step and the exchange both include decoding the worker's own words.
    counted_twice = 0.0
    if num_workers > 1:
        counted_twice = sum(cost_model.decode_seconds(r, links) for r in requests)
    seconds = timing.seconds + max(0.0, exchange_seconds[best] - counted_twice) / period
    sent = 0.0
    if num_workers > 1:
        costs = [cost_model.request_cost(algorithm, r, num_workers) for r in requests]
        sent = sum(cost.sent for cost in costs) / period
    return Prediction(timing, num_workers, algorithm.name, seconds, sent)


def _algorithms(timing: StepTiming, num_workers: int) -> list[CollectiveAlgorithm]:
    if timing.candidate.name == DENSE:  # stock Keras has no other
        return [Ring()]
    return Auto().candidates(num_workers, timing.merges)


def best_prediction(predictions: Sequence[Prediction]) -> Prediction:
    """Return the advised prediction, the dense one if no other is faster for certain.

    It is the first one that may be within 5 % of the fastest.
    """
    dense = predictions[0]
    limit = cost_model.EQUALLY_FAST * min(p.seconds for p in predictions)
    for prediction in predictions:
        low, high = prediction.interval
        if low <= limit and (prediction is dense or high < dense.seconds):
            return prediction
    return dense


def reliable_up_to(links: LinkSpeeds, round_trip: float) -> float:
    """Return the bandwidth in bits/s up to which predictions depend on it."""
    # On faster links the processing time per byte dominates, fitted on other machines.
    short, long = (
        8 / (goodput * _min_per_byte(links)) for goodput in (_GOODPUT, _LONG_GOODPUT)
    )
    return long if _is_long(short, round_trip) else short


def turning_point(
    timings: Sequence[StepTiming],
    num_workers: int,
    links: LinkSpeeds,
    round_trip: float,
) -> float:
    """Return the bandwidth in bits/s from which on dense steps are advised."""
    # 0 if at any, infinity if at none up to `reliable_up_to`. `timings` are in the
    # order of preference, the dense one first.

    def compression_pays(bandwidth: float) -> bool:
        replaced = _with_bandwidth(links, round_trip, bandwidth)
        predictions = [predict_step(t, num_workers, replaced) for t in timings]
        return best_prediction(predictions).name != DENSE

    low, high = _SLOWEST, reliable_up_to(links, round_trip)
    if compression_pays(high):
        return math.inf
    # A link that becomes long carries less, so compression may pay again from there.
    long = 1.001 * 8 * _LONG / round_trip if round_trip else math.inf
    if low < long < high:
        low, high = (long, high) if compression_pays(long) else (low, long)
    if not compression_pays(low):
        return 0.0
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if compression_pays(middle) else (low, middle)
    return low


def predictions_at_rates(
    timings: Sequence[StepTiming],
    num_workers: int,
    links: LinkSpeeds,
    round_trip: float,
    rates: Sequence[float],
) -> dict[str, list[float]]:
    """Return the seconds of each method's step at several bandwidths, in bits/s."""
    links_at_rates = [_with_bandwidth(links, round_trip, rate) for rate in rates]
    return {
        t.candidate.name: [
            predict_step(t, num_workers, links).seconds for links in links_at_rates
        ]
        for t in timings
    }


def _with_bandwidth(
    links: LinkSpeeds, round_trip: float, bandwidth: float
) -> LinkSpeeds:
    per_byte = max(_seconds_per_byte(bandwidth, round_trip), _min_per_byte(links))
    return links._replace(per_byte=per_byte)


def _min_per_byte(links: LinkSpeeds) -> float:
    """Return the processing seconds per byte; a measured link may be faster."""
    return min(PER_BYTE, links.per_byte)


def _seconds_per_byte(bandwidth: float, round_trip: float) -> float:
    goodput = _LONG_GOODPUT if _is_long(bandwidth, round_trip) else _GOODPUT
    return 8 / (goodput * bandwidth)


def _is_long(bandwidth: float, round_trip: float) -> bool:
    return bandwidth * round_trip / 8 > _LONG
