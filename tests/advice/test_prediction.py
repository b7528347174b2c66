"""Step times predicted for several workers from one worker's times and the links."""

import math

import pytest

from tf_dgc.advice import prediction, timing
from tf_dgc.advice.timing import StepTiming
from tf_dgc.collectives import LinkSpeeds, Rank, RequestSize, Ring, predict_seconds
from tf_dgc.collectives.algorithm import run_together
from tf_dgc.collectives.requests import SendRecv
from tf_dgc.optimizers import autotune
from tf_dgc.testing import answer_all

MILLION = 1e6
SPEEDS = (1e-9, 2e-9, 1e-9)
LINKS = prediction.links_of(1e9, 2e-4, SPEEDS)


def make_timing(name, seconds, kind, num_bytes):
    candidate = timing.find_candidates([name])[-1]
    sizes = [RequestSize(kind, num_bytes)]
    merges = name in ("dgc", "top_k")
    return StepTiming(candidate, seconds, lambda _: sizes, merges=merges)


DENSE = make_timing("dense", 0.1, "sum", 100 * MILLION)
HALF = make_timing("float16", 0.11, "sum", 50 * MILLION)
DGC = make_timing("dgc", 0.09, "entries", 0.14 * MILLION)
EIGHT = make_timing("uniform_8bit", 0.12, "gather", 25 * MILLION)


def test_links():
    assert LINKS.per_byte == pytest.approx(8 / 0.956e9)
    assert LINKS.latency == pytest.approx(prediction.ROUND + 1e-4)
    assert LINKS[3:6] == SPEEDS
    assert LINKS.launch == pytest.approx(prediction.LAUNCH + 1e-4)
    assert LINKS.start == prediction.LAUNCH
    assert prediction.round_trip_of(LINKS) == pytest.approx(2e-4)


class FarApart:
    """Answers workers' requests like gRPC over a link with a long round trip.

    When a collective starts, each worker requests the data that it will receive. The
    data arrive half a round trip after the previous worker received its own.
    """

    def __init__(self, round_trip):
        self.half, self.now = round_trip / 2, 0.0

    def answer(self, requests):
        self.now += prediction.LAUNCH
        for message in requests[0]:
            hops = 1 if isinstance(message, SendRecv) else len(requests) - 1
            self.now += prediction.LAUNCH + self.half
            self.now += hops * (prediction.ROUND + self.half)
        return answer_all(requests)


@pytest.mark.parametrize("round_trip", [2e-4, 2e-2])
def test_described_links_equal_measured_links(round_trip):
    """With these, `collective="auto"` chooses the predicted algorithm."""
    network = FarApart(round_trip)
    steps = [
        autotune.probe_links(Rank(w, 4), lambda: SPEEDS, lambda: network.now)
        for w in range(4)
    ]
    measured, *_ = run_together(steps, network.answer)
    described = prediction.links_of(1e8, round_trip, SPEEDS)
    for name in ("launch", "latency", "start"):
        expected = pytest.approx(getattr(measured, name), rel=0.01)
        assert getattr(described, name) == expected, name


@pytest.mark.parametrize("kind", ["sum", "gather", "entries"])
def test_ring_is_faster_than_butterfly_on_long_links(kind):
    """Each round of a butterfly is a collective that takes a whole round trip."""
    links = prediction.links_of(1e8, 2e-2, SPEEDS)
    name = {"sum": "float16", "gather": "uniform_8bit", "entries": "dgc"}[kind]
    step = prediction.predict_step(make_timing(name, 0.01, kind, 1e4), 4, links)
    assert step.collective == "ring"


def test_slower_of_link_and_processor_limits_the_rate():
    fast = prediction.links_of(1e11, 0.0)
    assert fast.per_byte == prediction.PER_BYTE
    assert prediction.links_of(1e11, 0.0, sharing=2).per_byte == 2 * fast.per_byte
    assert prediction.links_of(1e8, 0.0, sharing=2).per_byte > 8e-8


def test_tcp_is_slower_on_long_links():
    short, long = (prediction.links_of(1e8, trip).per_byte for trip in (2e-4, 2e-2))
    assert long == pytest.approx(short * 0.956 / 0.8)
    links = prediction.links_of(1e9, 2e-2)
    (seconds,) = prediction.predictions_at_rates(
        [DENSE], 2, links, 2e-2, [1e8]
    ).values()
    assert seconds[0] - 0.1 == pytest.approx(100 * MILLION * long, rel=0.01)


def test_one_worker_takes_the_measured_time():
    for step_timing in (DENSE, HALF, DGC, EIGHT):
        step = prediction.predict_step(step_timing, 1, LINKS)
        assert (step.seconds, step.sent) == (step_timing.seconds, 0)


def test_exchange_time_is_added():
    step = prediction.predict_step(DENSE, 4, LINKS)
    sizes = [RequestSize("sum", 100 * MILLION)]
    assert step.seconds == pytest.approx(0.1 + predict_seconds(Ring(), sizes, 4, LINKS))
    assert step.sent == pytest.approx(150 * MILLION)
    assert step.collective == "ring"


def test_own_words_are_decoded_once():
    """Both the measured step and the model of the exchange decode them."""
    step = prediction.predict_step(EIGHT, 2, LINKS)
    free = prediction.predict_step(EIGHT, 2, LINKS._replace(rounding=0.0))
    decoding = 25 * MILLION * LINKS.rounding
    assert step.seconds - free.seconds == pytest.approx(decoding)


def test_local_steps_pay_once_in_a_period():
    local = make_timing("local_sgd 16", 0.1, "sum", 100 * MILLION)
    dense_step, local_step = (
        prediction.predict_step(t, 4, LINKS) for t in (DENSE, local)
    )
    exchange = dense_step.seconds - 0.1
    assert 0 < local_step.seconds - 0.1 <= exchange / 16 + 1e-9
    assert local_step.sent == pytest.approx(dense_step.sent / 16)


def test_dgc_uses_the_fastest_collective():
    few, many = (prediction.predict_step(DGC, n, LINKS) for n in (2, 64))
    assert few.collective == "ring"
    assert many.collective in ("gtopk", "oktopk")
    sizes = [RequestSize("entries", 0.14 * MILLION)]
    assert many.seconds < 0.09 + predict_seconds(Ring(), sizes, 64, LINKS)


def test_first_of_equally_fast_methods_is_advised():
    slow = [prediction.predict_step(t, 4, LINKS) for t in (DENSE, HALF, DGC)]
    assert prediction.best_prediction(slow).name == "dgc"
    quick = LinkSpeeds(1e-6, 1e-6, 1e-13)
    steps = [prediction.predict_step(t, 4, quick) for t in (DENSE, HALF)]
    assert prediction.best_prediction(steps).name == "dense"
    close = [p._replace(seconds=0.1 + 0.001 * i) for i, p in enumerate(steps[::-1])]
    assert prediction.best_prediction(close) is close[0]


@pytest.mark.parametrize("round_trip", [2e-4, 2e-2])
@pytest.mark.parametrize("rate", [1e8, 1.5e9, 2.6e9, 1e10])
def test_predictions_at_rates_equal_predict_step(rate, round_trip):
    links = prediction.links_of(rate, round_trip, SPEEDS)
    (seconds,) = prediction.predictions_at_rates(
        [DENSE], 2, links, round_trip, [rate]
    ).values()
    assert seconds == [prediction.predict_step(DENSE, 2, links).seconds]


def test_turning_point():
    """At higher bandwidths dense steps are the fastest, or equally fast."""
    timings = [DENSE, HALF._replace(seconds=0.4)]
    turning_point = prediction.turning_point(timings, 2, LINKS, 2e-4)
    assert 1e7 < turning_point < 1e10
    for factor, name in ((0.9, "float16"), (1.1, "dense")):
        links = prediction.links_of(factor * turning_point, 2e-4, SPEEDS)
        steps = [prediction.predict_step(t, 2, links) for t in timings]
        assert prediction.best_prediction(steps).name == name
    slower = HALF._replace(seconds=1e9)
    assert prediction.turning_point([DENSE, slower], 2, LINKS, 2e-4) == 0
    faster = HALF._replace(seconds=0.01)
    assert math.isinf(prediction.turning_point([DENSE, faster], 2, LINKS, 2e-4))


def test_turning_point_counts_local_steps_and_long_links():
    local = make_timing("local_sgd 16", 0.1, "sum", 100 * MILLION)
    assert math.isinf(prediction.turning_point([DENSE, local], 2, LINKS, 2e-4))
    threshold = 8 * 64e3 / 2e-4  # from this rate on, a link counts as long
    short = prediction.links_of(0.99 * threshold, 2e-4, SPEEDS)
    long = prediction.links_of(1.01 * threshold, 2e-4, SPEEDS)
    dense, half = (
        [prediction.predict_step(t, 2, links).seconds for links in (short, long)]
        for t in (DENSE, HALF)
    )
    # Extra time with which float16 pays off on the long link alone.
    extra = [d / 1.05 - h for d, h in zip(dense, half, strict=True)]
    timings = [DENSE, HALF._replace(seconds=HALF.seconds + sum(extra) / 2)]
    assert prediction.turning_point(timings, 2, LINKS, 2e-4) > threshold


def test_predictions_stop_at_the_fastest_reliable_rate():
    limit = prediction.reliable_up_to(LINKS, 0.0)
    assert 8 / limit / 0.956 == pytest.approx(prediction.PER_BYTE)
    long_limit = prediction.reliable_up_to(LINKS, 2e-2)
    for round_trip, rate in ((0.0, limit), (2e-2, long_limit)):
        (seconds,) = prediction.predictions_at_rates(
            [DENSE], 2, LINKS, round_trip, [0.9 * rate, rate, 10 * rate]
        ).values()
        assert seconds[0] > seconds[1] == pytest.approx(seconds[2])
    measured = LINKS._replace(per_byte=prediction.PER_BYTE / 2)
    assert prediction.reliable_up_to(measured, 0.0) == pytest.approx(2 * limit)
