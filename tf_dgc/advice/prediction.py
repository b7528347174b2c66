"""Predicting: a step of several workers, from what one takes and from the links."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tf_dgc.advice.timing import DENSE, Timed
from tf_dgc.collectives import (
    Auto,
    CollectiveAlgorithm,
    LinkSpeeds,
    RequestSize,
    Ring,
    cost_model,
    predict_seconds,
)

# Beside the links themselves, as two processes on one machine find it: seconds of a
# collective, of a round, and per byte (docs/advice.md).
LAUNCH, ROUND, PER_BYTE = 3e-4, 1e-4, 2.4e-9
_CARRIED = 0.956  # of a link's rate, the rest are heads of packets
_LONG = 64e3  # bytes that are on a link at once, from which on TCP carries less, as
_CARRIED_FAR = 0.8  # two to four workers at 100 Mbit/s and 20 ms found
_SLOWEST = 1e4  # bit/s from which on the turning point is looked for


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
) -> LinkSpeeds:
    """Return the numbers of links that were described, not measured.

    A worker asks for what another one has as soon as a collective begins, so that each
    begins with half a round trip, as `probing.measure` finds it. While bytes are on a
    link, processors work on those before them.

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
    links = LinkSpeeds(LAUNCH + half, ROUND + half, per_byte, *speeds)
    return links._replace(start=LAUNCH)


def round_trip_of(links: LinkSpeeds) -> float:
    """Return the seconds of a round trip, of links that were measured.

    Args:
        links: numbers of the links.
    """
    return 2 * max(0.0, links.latency - ROUND)


def predict_step(timed: Timed, num_workers: int, links: LinkSpeeds) -> Prediction:
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
    taken = [predict_seconds(e, asked, num_workers, links) for e in exchanges]
    chosen = cost_model.first_of_the_fastest(
        taken
    )  # by itself, as `exchange="auto"` chooses
    exchange = exchanges[chosen]
    seconds = timed.seconds + max(0.0, taken[chosen] - twice) / period
    sent = sum(cost_model.request_cost(exchange, a, num_workers).sent for a in asked)
    sent = sent / period if num_workers > 1 else 0.0
    return Prediction(timed, num_workers, exchange.name, seconds, sent)


def _exchanges(timed: Timed, num_workers: int) -> list[CollectiveAlgorithm]:
    if timed.candidate.name == DENSE:  # stock Keras has no other
        return [Ring()]
    return Auto().candidates(num_workers, timed.merges)


def _counted_twice(
    asked: Sequence[RequestSize], num_workers: int, links: LinkSpeeds
) -> float:
    """Return what decoding its own words takes a worker, which its own step has too."""
    if num_workers == 1:
        return 0.0
    return sum(cost_model.decode_seconds(each, links) for each in asked)


def best_prediction(predictions: Sequence[Prediction]) -> Prediction:
    """Return the one to be advised: the first of those that are as fast as any.

    Args:
        predictions: predictions of one number of workers, in the order of preference.
    """
    return predictions[
        cost_model.first_of_the_fastest([p.seconds for p in predictions])
    ]


def reliable_up_to(links: LinkSpeeds, round_trip: float) -> float:
    """Return the bandwidth in bits/s up to which predictions depend on it.

    Of faster links nothing is known: what a byte takes processors, which is then what
    counts, is a constant of those that it was fitted on.

    Args:
        links: numbers of the links.
        round_trip: seconds of a round trip.
    """
    near, far = (8 / (share * _least(links)) for share in (_CARRIED, _CARRIED_FAR))
    return far if _is_long(near, round_trip) else near


def turning_point(
    timed: Sequence[Timed], num_workers: int, links: LinkSpeeds, round_trip: float
) -> float:
    """Return the bandwidth from which on dense steps are advised, in bits/s.

    0 if they are at any, infinity if at none up to `known_up_to`.

    Args:
        timed: ways to train, in the order of preference, the dense one first.
        num_workers: number of workers, N.
        links: numbers of the links, of which all but the bandwidth stay.
        round_trip: seconds of a round trip.
    """

    def pays(bandwidth: float) -> bool:
        there = _at(links, round_trip, bandwidth)
        found = [predict_step(t, num_workers, there) for t in timed]
        return best_prediction(found).name != DENSE

    low, high = _SLOWEST, reliable_up_to(links, round_trip)
    if pays(high):
        return math.inf
    # Where a link begins to be long it carries less, and what did not pay may again.
    longer = 1.001 * 8 * _LONG / round_trip if round_trip else math.inf
    if low < longer < high:
        low, high = (longer, high) if pays(longer) else (low, longer)
    if not pays(low):
        return 0.0
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def predictions_at_rates(
    timed: Sequence[Timed],
    num_workers: int,
    links: LinkSpeeds,
    round_trip: float,
    rates: Sequence[float],
) -> dict[str, list[float]]:
    """Return the seconds of a step at other bandwidths, by way to train.

    Args:
        timed: ways to train.
        num_workers: number of workers, N.
        links: numbers of the links, of which all but the bandwidth stay.
        round_trip: seconds of a round trip.
        rates: bandwidths, in bits/s.
    """
    some = [_at(links, round_trip, rate) for rate in rates]
    return {
        t.candidate.name: [predict_step(t, num_workers, each).seconds for each in some]
        for t in timed
    }


def _at(links: LinkSpeeds, round_trip: float, bandwidth: float) -> LinkSpeeds:
    per_byte = max(_on_link(bandwidth, round_trip), _least(links))
    return links._replace(per_byte=per_byte)


def _least(links: LinkSpeeds) -> float:
    """Return what a byte takes at least; less only where that was measured."""
    return min(PER_BYTE, links.per_byte)


def _on_link(bandwidth: float, round_trip: float) -> float:
    is_long = _is_long(bandwidth, round_trip)
    return 8 / ((_CARRIED_FAR if is_long else _CARRIED) * bandwidth)


def _is_long(bandwidth: float, round_trip: float) -> bool:
    return bandwidth * round_trip / 8 > _LONG
