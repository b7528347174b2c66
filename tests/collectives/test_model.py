"""The cost model against workers whose messages take made-up times."""

import numpy as np
import pytest
import tensorflow as tf
from selection import slow

from tf_dgc.collectives import (
    Auto,
    Butterfly,
    Gossip,
    GTopK,
    Hierarchical,
    LinkSpeeds,
    OkTopK,
    Rank,
    RequestSize,
    Ring,
    Star,
    Tree,
    predict_seconds,
)
from tf_dgc.collectives.algorithm import run_together
from tf_dgc.collectives.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    SendRecv,
    group_members,
)
from tf_dgc.testing import answer_all

LINKS = {
    "far": LinkSpeeds(1e-3, 5e-2, 1e-9),
    "slow": LinkSpeeds(1e-4, 1e-5, 1e-6),
    "both": LinkSpeeds(1e-4, 1e-3, 1e-7),
    "launches": LinkSpeeds(1e-2, 0.0, 0.0),
}


class Clocks:
    """Answers requests of all workers; what each waits for takes its time.

    Written from what collectives do, not from formulas of exchanges.
    """

    def __init__(self, number, links):
        self.links = links
        self.now = np.zeros(number)

    def answer(self, asked):
        place = [0] * len(asked)
        while any(p < len(messages) for p, messages in zip(place, asked, strict=True)):
            heads = {
                worker: group_members(messages[p], worker, len(asked))
                for worker, (p, messages) in enumerate(zip(place, asked, strict=True))
                if p < len(messages)
            }
            worker, members = next(
                (w, m)
                for w, m in heads.items()
                if all(heads.get(other) == m for other in m)
            )
            members = list(members)
            message = asked[worker][place[worker]]
            start = self.now[members].max()
            self.now[members] = start + self._seconds(message, len(members))
            for member in members:
                place[member] += 1
        return answer_all(asked)

    def _seconds(self, message, number):
        value = message[0]
        size = value.dtype.size * int(tf.size(value))
        launch, latency, per_byte, *_ = self.links
        if isinstance(message, SendRecv | Broadcast):
            return launch + latency + size * per_byte
        if isinstance(message, AllToAll):
            return launch + latency + size * per_byte * (number - 1) / number
        if isinstance(message, AllReduce):
            hops, part = 2 * (number - 1), size / number
        else:
            assert isinstance(message, AllGather)
            hops, part = number - 1, size
        return (launch if number > 1 else 0) + hops * (latency + part * per_byte)


def simulate(exchange, asked, number, links):
    """Return the seconds until the last worker has all."""
    clocks = Clocks(number, links)
    for kind, num_bytes in asked:
        values = tf.zeros([num_bytes // 4], tf.int32)
        run = exchange.sum if kind == "sum" else exchange.gather
        steps = [run(values, Rank(worker, number)) for worker in range(number)]
        run_together(steps, clocks.answer)
    return clocks.now.max()


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("number", [2, 3, 4, 6, 8])
def test_predicts_what_is_simulated(number, links):
    sizes = 4 * 8 * 3 * 5 * 7
    asked = [("sum", 10 * sizes), ("gather", sizes)]
    every = [Ring(), Tree(), Butterfly(), Star(), Star(number), Star(2)]
    if number % 2 == 0:
        every.append(Hierarchical(np.reshape(range(number), [-1, 2]).tolist()))
    for exchange in every:
        ours = predict_seconds(
            exchange, [RequestSize(*a) for a in asked], number, LINKS[links]
        )
        theirs = simulate(exchange, asked, number, LINKS[links])
        # Of trees whose parts are of different sizes it is nearly that.
        assert ours == pytest.approx(theirs, rel=0.05), exchange


@pytest.mark.parametrize("number", [2, 5, slow(8)])
@pytest.mark.parametrize("payload", [840, 84_000, slow(8_400_000)])
def test_the_choice_is_the_fastest(number, payload):
    for name, links in LINKS.items():
        for kind in ("sum", "gather"):
            every = Auto().candidates(number, merges=False)
            ours = [
                predict_seconds(e, [RequestSize(kind, payload)], number, links)
                for e in every
            ]
            theirs = [simulate(e, [(kind, payload)], number, links) for e in every]
            best = theirs[int(np.argmin(ours))]
            assert best <= 1.05 * min(theirs), (name, kind)


def test_merges_and_decoding_count():
    asked = [RequestSize("entries", 1e6)]
    free = LinkSpeeds(0.0, 0.0, 1e-9)
    for number in (2, 4, 8, 64):
        ring = predict_seconds(Ring(), asked, number, free._replace(decoding=1e-8))
        assert ring == pytest.approx((number - 1) * 1e-3 + number * 1e-2)
        merging = predict_seconds(GTopK(), asked, number, free._replace(merging=1e-8))
        bits = number.bit_length() - 1
        assert merging == pytest.approx(bits * (1e-3 + 2e-2))
    for exchange in (GTopK(), OkTopK()):
        assert predict_seconds(exchange, [RequestSize("gather", 1e6)], 8, free) == (
            predict_seconds(Ring(), [RequestSize("gather", 1e6)], 8, free)
        )
        assert predict_seconds(exchange, asked, 1, free) == 0


def test_what_a_worker_sends_decides_for_many():
    """Of 1024 workers a gather takes what N buffers take, and owners what two do."""
    links = LinkSpeeds(1e-5, 1e-5, 8e-9)
    ring, merged = (
        predict_seconds(exchange, [RequestSize("entries", 1e6)], 1024, links)
        for exchange in (Ring(), OkTopK())
    )
    assert ring > 100 * merged


@pytest.mark.parametrize("dense", ["yes", 1, None])
def test_auto_takes_no_other_settings(dense):
    with pytest.raises(ValueError, match=r"`dense` must be.*Received"):
        Auto(dense=dense)


@pytest.mark.parametrize("number", [1, 4])
def test_gossip_is_no_way_of_a_sum(number):
    with pytest.raises(
        ValueError, match=r"pass `Ring\(\)`.*Received: collective=Gossip"
    ):
        predict_seconds(Gossip(), [RequestSize("sum", 1e6)], number, LINKS["far"])
