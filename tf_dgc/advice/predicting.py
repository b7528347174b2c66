"""Predicting: a step of several workers, from what one takes and from the links."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tf_dgc.advice.candidates import DENSE
from tf_dgc.advice.timing import Timed
from tf_dgc.exchanges import Asked, Auto, Exchange, Links, Ring, model, predict

# Beside the links themselves, as two processes on one machine find it: seconds of a
# collective, of a round, and per byte (docs/advice.md).
LAUNCH, ROUND, PER_BYTE = 3e-4, 1e-4, 2.4e-9
_CARRIED = 0.956  # of a link's rate, the rest are heads of packets
_LONG = 64e3  # bytes that are on a link at once, from which on TCP carries less, as
_CARRIED_FAR = 0.8  # two to four workers at 100 Mbit/s and 20 ms found
_SLOWEST, _FASTEST = 1e4, 1e13  # bit/s between which the turning point is looked for


class Prediction(NamedTuple):
    """A step of so many workers, by one way to train.

    Attributes:
        timed: way to train, as timed on one worker.
        num_workers: number of workers.
        exchange: name of the exchange that `exchange="auto"` chooses of those it can
            have.
        seconds: seconds of a step, in the mean over the period of local steps.
        sent: bytes that a worker sends in a step, in the mean.
    """

    timed: Timed
    num_workers: int
    exchange: str
    seconds: float
    sent: float

    @property
    def name(self) -> str:
        """Name of the way to train."""
        return self.timed.candidate.name


def links_of(
    bandwidth: float,
    latency: float,
    speeds: Sequence[float] = (0.0, 0.0, 0.0),
    sharing: float = 1.0,
) -> Links:
    """Return the numbers of links that were described, not measured.

    A worker asks for what another one has, so that the first round begins with half a
    round trip. While bytes are on a link, processors work on those before them.

    Args:
        bandwidth: bits per second of each worker's link, both ways at once.
        latency: seconds of a round trip, as `ping` says.
        speeds: seconds per byte of merging, decoding and rounding, as
            `probing.local_speeds` measures them here.
        sharing: number of workers that share what one has by itself on a machine of
            its own.
    """
    half = latency / 2
    per_byte = max(_on_link(bandwidth, latency), sharing * PER_BYTE)
    links = Links(LAUNCH, ROUND + half, per_byte, *speeds)
    return links._replace(start=LAUNCH + half)


def predict_step(timed: Timed, num_workers: int, links: Links) -> Prediction:
    """Return what a step takes so many workers, by the exchange that "auto" chooses.

    Args:
        timed: way to train, as timed on one worker.
        num_workers: number of workers, N.
        links: numbers of the links.
    """
    asked = timed.asked(num_workers)
    period = timed.candidate.period
    twice = _counted_twice(asked, num_workers, links)
    exchanges = _exchanges(timed, num_workers)
    taken = [predict(e, asked, num_workers, links) for e in exchanges]
    chosen = model.as_fast_as_any(taken)  # by itself, as `exchange="auto"` chooses
    exchange = exchanges[chosen]
    seconds = timed.seconds + max(0.0, taken[chosen] - twice) / period
    sent = sum(model.cost_of(exchange, a, num_workers).sent for a in asked)
    sent = sent / period if num_workers > 1 else 0.0
    return Prediction(timed, num_workers, exchange.name, seconds, sent)


def _exchanges(timed: Timed, num_workers: int) -> list[Exchange]:
    if timed.candidate.name == DENSE:  # stock Keras has no other
        return [Ring()]
    merges = timed.candidate.name.partition(" ")[0] == "dgc"
    return Auto().candidates(num_workers, merges)


def _counted_twice(asked: Sequence[Asked], num_workers: int, links: Links) -> float:
    """Return what decoding its own words takes a worker, which its own step has too."""
    if num_workers == 1:
        return 0.0
    return sum(model.decoding(each, links) for each in asked)


def best(predictions: Sequence[Prediction]) -> Prediction:
    """Return the one to be advised: the first of those that are as fast as any.

    Args:
        predictions: predictions of one number of workers, in the order of preference.
    """
    return predictions[model.as_fast_as_any([p.seconds for p in predictions])]


def turning_point(
    timed: Sequence[Timed], num_workers: int, latency: float, speeds: Sequence[float]
) -> float:
    """Return the bandwidth from which on nothing is to be compressed, in bits/s.

    0 if that is so at any, infinity if at none. Local steps, which save round trips,
    have no part in it.

    Args:
        timed: ways to train, in the order of preference, the dense one first.
        num_workers: number of workers, N.
        latency: seconds of a round trip.
        speeds: see `links_of`.
    """
    every_step = [t for t in timed if t.candidate.period == 1]

    def pays(bandwidth: float) -> bool:
        links = links_of(bandwidth, latency, speeds)
        found = [predict_step(t, num_workers, links) for t in every_step]
        return best(found).name != DENSE

    low, high = _SLOWEST, _FASTEST
    if not pays(low):
        return 0.0
    if pays(high):
        return math.inf
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def at_rates(
    timed: Sequence[Timed], num_workers: int, links: Links, rates: Sequence[float]
) -> dict[str, list[float]]:
    """Return the seconds of a step at other bandwidths, by way to train.

    Args:
        timed: ways to train.
        num_workers: number of workers, N.
        links: numbers of the links, of which all but the bandwidth stay.
        rates: bandwidths, in bits/s.
    """
    some = [
        links._replace(per_byte=max(_on_link(rate, 2 * links.latency), PER_BYTE))
        for rate in rates
    ]
    return {
        t.candidate.name: [predict_step(t, num_workers, each).seconds for each in some]
        for t in timed
    }


def _on_link(bandwidth: float, latency: float) -> float:
    is_long = bandwidth * latency / 8 > _LONG
    return 8 / ((_CARRIED_FAR if is_long else _CARRIED) * bandwidth)
