"""What several workers are predicted to take, from what one takes and the links."""

import math

import pytest

from tf_dgc.advice import candidates, predicting
from tf_dgc.advice.timing import Timed
from tf_dgc.exchanges import Asked, Links, Ring, predict

MILLION = 1e6
SPEEDS = (1e-9, 2e-9, 1e-9)
LINKS = predicting.links_of(1e9, 2e-4, SPEEDS)


def timed(name, seconds, kind, num_bytes):
    (_, found) = (
        candidates.find([name]) if name != "dense" else (0, candidates.find([])[0])
    )
    return Timed(found, seconds, lambda _: [Asked(kind, num_bytes)])


DENSE = timed("dense", 0.1, "sum", 100 * MILLION)
HALF = timed("float16", 0.11, "sum", 50 * MILLION)
DGC = timed("dgc", 0.09, "entries", 0.14 * MILLION)
EIGHT = timed("uniform_8bit", 0.12, "gather", 25 * MILLION)


def test_links():
    assert LINKS.per_byte == pytest.approx(8 / 0.956e9)
    assert LINKS.latency == pytest.approx(predicting.ROUND + 1e-4)
    assert LINKS[3:6] == SPEEDS
    assert LINKS.launch == predicting.LAUNCH
    assert LINKS.start == pytest.approx(predicting.LAUNCH + 1e-4)


def test_the_slower_of_link_and_processor_counts():
    fast = predicting.links_of(1e11, 0.0)
    assert fast.per_byte == predicting.PER_BYTE
    assert predicting.links_of(1e11, 0.0, sharing=2).per_byte == 2 * fast.per_byte
    assert predicting.links_of(1e8, 0.0, sharing=2).per_byte > 8e-8


def test_tcp_carries_less_over_a_long_way():
    near, far = (predicting.links_of(1e8, trip).per_byte for trip in (2e-4, 2e-2))
    assert far == pytest.approx(near * 0.956 / 0.8)
    (found,) = predicting.at_rates(
        [DENSE], 2, predicting.links_of(1e9, 2e-2), [1e8]
    ).values()
    assert found[0] - 0.1 == pytest.approx(100 * MILLION * far, rel=0.01)


def test_one_worker_takes_what_was_timed():
    for each in (DENSE, HALF, DGC, EIGHT):
        found = predicting.predict_step(each, 1, LINKS)
        assert (found.seconds, found.sent) == (each.seconds, 0)


def test_the_exchange_comes_on_top():
    found = predicting.predict_step(DENSE, 4, LINKS)
    asked = [Asked("sum", 100 * MILLION)]
    assert found.seconds == pytest.approx(0.1 + predict(Ring(), asked, 4, LINKS))
    assert found.sent == pytest.approx(150 * MILLION)
    assert found.exchange == "ring"


def test_own_words_are_decoded_once():
    """A worker's own step decodes them, and the model of exchanges does too."""
    found = predicting.predict_step(EIGHT, 2, LINKS)
    free = predicting.predict_step(EIGHT, 2, LINKS._replace(rounding=0.0))
    one = 25 * MILLION * LINKS.rounding
    assert found.seconds - free.seconds == pytest.approx(one)


def test_local_steps_pay_once_in_a_period():
    local = timed("local_sgd 16", 0.1, "sum", 100 * MILLION)
    each, rarely = (predicting.predict_step(t, 4, LINKS) for t in (DENSE, local))
    whole = each.seconds - 0.1
    assert 0 < rarely.seconds - 0.1 <= whole / 16 + 1e-9
    assert rarely.sent == pytest.approx(each.sent / 16)


def test_dgc_goes_by_the_fastest_exchange():
    few, many = (predicting.predict_step(DGC, n, LINKS) for n in (2, 64))
    assert few.exchange == "ring"
    assert many.exchange in ("gtopk", "oktopk")
    asked = [Asked("entries", 0.14 * MILLION)]
    assert many.seconds < 0.09 + predict(Ring(), asked, 64, LINKS)


def test_of_equally_fast_ones_the_first_is_advised():
    slow = [predicting.predict_step(t, 4, LINKS) for t in (DENSE, HALF, DGC)]
    assert predicting.best(slow).name == "dgc"
    quick = Links(1e-6, 1e-6, 1e-13)
    found = [predicting.predict_step(t, 4, quick) for t in (DENSE, HALF)]
    assert predicting.best(found).name == "dense"
    near = [p._replace(seconds=0.1 + 0.001 * i) for i, p in enumerate(found[::-1])]
    assert predicting.best(near) is near[0]


def test_turning_point():
    """From there on the dense run is the fastest, or as fast."""
    ways = [DENSE, HALF._replace(seconds=0.4)]
    turn = predicting.turning_point(ways, 2, 2e-4, SPEEDS)
    assert 1e7 < turn < 1e10
    for bandwidth, name in ((0.9 * turn, "float16"), (1.1 * turn, "dense")):
        links = predicting.links_of(bandwidth, 2e-4, SPEEDS)
        found = [predicting.predict_step(t, 2, links) for t in ways]
        assert predicting.best(found).name == name
    slower = HALF._replace(seconds=1e9)
    assert predicting.turning_point([DENSE, slower], 2, 0.0, SPEEDS) == 0
    faster = HALF._replace(seconds=0.01)
    assert math.isinf(predicting.turning_point([DENSE, faster], 2, 0.0, SPEEDS))
