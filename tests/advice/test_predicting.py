"""What several workers are predicted to take, from what one takes and the links."""

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


def timed(name, seconds, kind, num_bytes):
    (_, found) = (
        timing.find_candidates([name])
        if name != "dense"
        else (0, timing.find_candidates([])[0])
    )
    asked = [RequestSize(kind, num_bytes)]
    return StepTiming(found, seconds, lambda _: asked, merges=name in ("dgc", "top_k"))


DENSE = timed("dense", 0.1, "sum", 100 * MILLION)
HALF = timed("float16", 0.11, "sum", 50 * MILLION)
DGC = timed("dgc", 0.09, "entries", 0.14 * MILLION)
EIGHT = timed("uniform_8bit", 0.12, "gather", 25 * MILLION)


def test_links():
    assert LINKS.per_byte == pytest.approx(8 / 0.956e9)
    assert LINKS.latency == pytest.approx(prediction.ROUND + 1e-4)
    assert LINKS[3:6] == SPEEDS
    assert LINKS.launch == pytest.approx(prediction.LAUNCH + 1e-4)
    assert LINKS.start == prediction.LAUNCH
    assert prediction.round_trip_of(LINKS) == pytest.approx(2e-4)


class FarApart:
    """Answers requests of workers as gRPC does over a long way.

    Each asks for what it is to receive when a collective begins, and has it half a
    round trip after the one before it had it.
    """

    def __init__(self, round_trip):
        self.half, self.now = round_trip / 2, 0.0

    def answer(self, asked):
        self.now += prediction.LAUNCH
        for message in asked[0]:
            hops = 1 if isinstance(message, SendRecv) else len(asked) - 1
            self.now += prediction.LAUNCH + self.half
            self.now += hops * (prediction.ROUND + self.half)
        return answer_all(asked)


@pytest.mark.parametrize("round_trip", [2e-4, 2e-2])
def test_links_that_are_described_are_those_that_are_measured(round_trip):
    """So that `collective="auto"` chooses what was predicted."""
    network = FarApart(round_trip)
    steps = [
        autotune.probe_links(Rank(w, 4), lambda: SPEEDS, lambda: network.now)
        for w in range(4)
    ]
    measured, *_ = run_together(steps, network.answer)
    described = prediction.links_of(1e8, round_trip, SPEEDS)
    for name in ("launch", "latency", "start"):
        ours, theirs = (getattr(links, name) for links in (described, measured))
        assert ours == pytest.approx(theirs, rel=0.01), name


@pytest.mark.parametrize("kind", ["sum", "gather", "entries"])
def test_a_butterfly_of_four_far_apart_saves_nothing(kind):
    """Each of its rounds is a collective of a whole round trip."""
    links = prediction.links_of(1e8, 2e-2, SPEEDS)
    name = {"sum": "float16", "gather": "uniform_8bit", "entries": "dgc"}[kind]
    found = prediction.predict_step(timed(name, 0.01, kind, 1e4), 4, links)
    assert found.collective == "ring"


def test_the_slower_of_link_and_processor_counts():
    fast = prediction.links_of(1e11, 0.0)
    assert fast.per_byte == prediction.PER_BYTE
    assert prediction.links_of(1e11, 0.0, sharing=2).per_byte == 2 * fast.per_byte
    assert prediction.links_of(1e8, 0.0, sharing=2).per_byte > 8e-8


def test_tcp_carries_less_over_a_long_way():
    near, far = (prediction.links_of(1e8, trip).per_byte for trip in (2e-4, 2e-2))
    assert far == pytest.approx(near * 0.956 / 0.8)
    asks = prediction.links_of(1e9, 2e-2), 2e-2, [1e8]
    (found,) = prediction.predictions_at_rates([DENSE], 2, *asks).values()
    assert found[0] - 0.1 == pytest.approx(100 * MILLION * far, rel=0.01)


def test_one_worker_takes_what_was_timed():
    for each in (DENSE, HALF, DGC, EIGHT):
        found = prediction.predict_step(each, 1, LINKS)
        assert (found.seconds, found.sent) == (each.seconds, 0)


def test_the_exchange_comes_on_top():
    found = prediction.predict_step(DENSE, 4, LINKS)
    asked = [RequestSize("sum", 100 * MILLION)]
    assert found.seconds == pytest.approx(
        0.1 + predict_seconds(Ring(), asked, 4, LINKS)
    )
    assert found.sent == pytest.approx(150 * MILLION)
    assert found.collective == "ring"


def test_own_words_are_decoded_once():
    """A worker's own step decodes them, and the model of exchanges does too."""
    found = prediction.predict_step(EIGHT, 2, LINKS)
    free = prediction.predict_step(EIGHT, 2, LINKS._replace(rounding=0.0))
    one = 25 * MILLION * LINKS.rounding
    assert found.seconds - free.seconds == pytest.approx(one)


def test_local_steps_pay_once_in_a_period():
    local = timed("local_sgd 16", 0.1, "sum", 100 * MILLION)
    each, rarely = (prediction.predict_step(t, 4, LINKS) for t in (DENSE, local))
    whole = each.seconds - 0.1
    assert 0 < rarely.seconds - 0.1 <= whole / 16 + 1e-9
    assert rarely.sent == pytest.approx(each.sent / 16)


def test_dgc_goes_by_the_fastest_exchange():
    few, many = (prediction.predict_step(DGC, n, LINKS) for n in (2, 64))
    assert few.collective == "ring"
    assert many.collective in ("gtopk", "oktopk")
    asked = [RequestSize("entries", 0.14 * MILLION)]
    assert many.seconds < 0.09 + predict_seconds(Ring(), asked, 64, LINKS)


def test_of_equally_fast_ones_the_first_is_advised():
    slow = [prediction.predict_step(t, 4, LINKS) for t in (DENSE, HALF, DGC)]
    assert prediction.best_prediction(slow).name == "dgc"
    quick = LinkSpeeds(1e-6, 1e-6, 1e-13)
    found = [prediction.predict_step(t, 4, quick) for t in (DENSE, HALF)]
    assert prediction.best_prediction(found).name == "dense"
    near = [p._replace(seconds=0.1 + 0.001 * i) for i, p in enumerate(found[::-1])]
    assert prediction.best_prediction(near) is near[0]


@pytest.mark.parametrize("round_trip", [2e-4, 2e-2])
@pytest.mark.parametrize("rate", [1e8, 1.5e9, 2.6e9, 1e10])
def test_at_the_rate_that_was_given_it_is_what_was_predicted(rate, round_trip):
    links = prediction.links_of(rate, round_trip, SPEEDS)
    (found,) = prediction.predictions_at_rates(
        [DENSE], 2, links, round_trip, [rate]
    ).values()
    assert found == [prediction.predict_step(DENSE, 2, links).seconds]


def test_turning_point():
    """From there on the dense run is the fastest, or as fast."""
    ways = [DENSE, HALF._replace(seconds=0.4)]
    turn = prediction.turning_point(ways, 2, LINKS, 2e-4)
    assert 1e7 < turn < 1e10
    for bandwidth, name in ((0.9 * turn, "float16"), (1.1 * turn, "dense")):
        links = prediction.links_of(bandwidth, 2e-4, SPEEDS)
        found = [prediction.predict_step(t, 2, links) for t in ways]
        assert prediction.best_prediction(found).name == name
    slower = HALF._replace(seconds=1e9)
    assert prediction.turning_point([DENSE, slower], 2, LINKS, 2e-4) == 0
    faster = HALF._replace(seconds=0.01)
    assert math.isinf(prediction.turning_point([DENSE, faster], 2, LINKS, 2e-4))


def test_the_turning_point_is_that_of_all_that_may_be_advised():
    """Of local steps too, and above the rate at which a way begins to be long."""
    local = timed("local_sgd 16", 0.1, "sum", 100 * MILLION)
    assert math.isinf(prediction.turning_point([DENSE, local], 2, LINKS, 2e-4))
    begins = 8 * 64e3 / 2e-4
    at = prediction.links_of(0.99 * begins, 2e-4, SPEEDS)
    longer = prediction.links_of(1.01 * begins, 2e-4, SPEEDS)
    whole, half = (
        [prediction.predict_step(t, 2, links).seconds for links in (at, longer)]
        for t in (DENSE, HALF)
    )
    # So much longer that it pays only there.
    more = [w / 1.05 - h for w, h in zip(whole, half, strict=True)]
    ways = [DENSE, HALF._replace(seconds=HALF.seconds + sum(more) / 2)]
    assert prediction.turning_point(ways, 2, LINKS, 2e-4) > begins


def test_of_fast_links_nothing_is_known():
    known = prediction.reliable_up_to(LINKS, 0.0)
    assert 8 / known / 0.956 == pytest.approx(prediction.PER_BYTE)
    far = prediction.reliable_up_to(LINKS, 2e-2)
    for round_trip, rate in ((0.0, known), (2e-2, far)):
        (found,) = prediction.predictions_at_rates(
            [DENSE], 2, LINKS, round_trip, [0.9 * rate, rate, 10 * rate]
        ).values()
        assert found[0] > found[1] == pytest.approx(found[2])
    measured = LINKS._replace(per_byte=prediction.PER_BYTE / 2)
    assert prediction.reliable_up_to(measured, 0.0) == pytest.approx(2 * known)
