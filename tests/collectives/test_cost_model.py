"""The cost model against simulated workers whose messages take a given time."""

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
    """Answers the requests of all workers, and advances their clocks.

    The times follow from single messages, not from the formulas of algorithms.
    """

    def __init__(self, num_workers, links):
        self.links = links
        self.now = np.zeros(num_workers)

    def answer(self, requests):
        position = [0] * len(requests)
        while any(
            p < len(messages) for p, messages in zip(position, requests, strict=True)
        ):
            heads = {
                worker: group_members(messages[p], worker, len(requests))
                for worker, (p, messages) in enumerate(
                    zip(position, requests, strict=True)
                )
                if p < len(messages)
            }
            worker, members = next(
                (w, m)
                for w, m in heads.items()
                if all(heads.get(other) == m for other in m)
            )
            members = list(members)
            message = requests[worker][position[worker]]
            start = self.now[members].max()
            self.now[members] = start + self._seconds(message, len(members))
            for member in members:
                position[member] += 1
        return answer_all(requests)

    def _seconds(self, message, num_workers):
        value = message[0]
        size = value.dtype.size * int(tf.size(value))
        launch, latency, per_byte, *_ = self.links
        if isinstance(message, SendRecv | Broadcast):
            return launch + latency + size * per_byte
        if isinstance(message, AllToAll):
            return launch + latency + size * per_byte * (num_workers - 1) / num_workers
        if isinstance(message, AllReduce):
            hops, part = 2 * (num_workers - 1), size / num_workers
        else:
            assert isinstance(message, AllGather)
            hops, part = num_workers - 1, size
        return (launch if num_workers > 1 else 0) + hops * (latency + part * per_byte)


def simulate(algorithm, sizes, num_workers, links):
    """Return the seconds until the last worker has its result."""
    clocks = Clocks(num_workers, links)
    for operation, num_bytes in sizes:
        values = tf.zeros([num_bytes // 4], tf.int32)
        run = algorithm.sum if operation == "sum" else algorithm.gather
        steps = [
            run(values, Rank(worker, num_workers)) for worker in range(num_workers)
        ]
        run_together(steps, clocks.answer)
    return clocks.now.max()


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("num_workers", [2, 3, 4, 6, 8])
def test_prediction_equals_the_simulation(num_workers, links):
    num_bytes = 4 * 8 * 3 * 5 * 7
    sizes = [("sum", 10 * num_bytes), ("gather", num_bytes)]
    algorithms = [Ring(), Tree(), Butterfly(), Star(), Star(num_workers), Star(2)]
    if num_workers % 2 == 0:
        algorithms.append(
            Hierarchical(np.reshape(range(num_workers), [-1, 2]).tolist())
        )
    for algorithm in algorithms:
        predicted = predict_seconds(
            algorithm, [RequestSize(*a) for a in sizes], num_workers, LINKS[links]
        )
        simulated = simulate(algorithm, sizes, num_workers, LINKS[links])
        # Approximate for trees whose parts differ in size.
        assert predicted == pytest.approx(simulated, rel=0.05), algorithm


@pytest.mark.parametrize("num_workers", [2, 5, slow(8)])
@pytest.mark.parametrize("payload", [840, 84_000, slow(8_400_000)])
def test_auto_chooses_the_fastest(num_workers, payload):
    for name, links in LINKS.items():
        for operation in ("sum", "gather"):
            candidates = Auto().candidates(num_workers, merges=False)
            predicted = [
                predict_seconds(
                    e, [RequestSize(operation, payload)], num_workers, links
                )
                for e in candidates
            ]
            simulated = [
                simulate(e, [(operation, payload)], num_workers, links)
                for e in candidates
            ]
            best = simulated[int(np.argmin(predicted))]
            assert best <= 1.05 * min(simulated), (name, operation)


def test_merges_and_decoding_count():
    sizes = [RequestSize("entries", 1e6)]
    free = LinkSpeeds(0.0, 0.0, 1e-9)
    for num_workers in (2, 4, 8, 64):
        ring = predict_seconds(Ring(), sizes, num_workers, free._replace(decoding=1e-8))
        assert ring == pytest.approx((num_workers - 1) * 1e-3 + num_workers * 1e-2)
        merging = predict_seconds(
            GTopK(), sizes, num_workers, free._replace(merging=1e-8)
        )
        bits = num_workers.bit_length() - 1
        assert merging == pytest.approx(bits * (1e-3 + 2e-2))
    for algorithm in (GTopK(), OkTopK()):
        assert predict_seconds(algorithm, [RequestSize("gather", 1e6)], 8, free) == (
            predict_seconds(Ring(), [RequestSize("gather", 1e6)], 8, free)
        )
        assert predict_seconds(algorithm, sizes, 1, free) == 0


def test_merging_is_faster_for_many_workers():
    """Gathering from 1024 workers takes the time of 1024 buffers, Ok-Topk that of 2."""
    links = LinkSpeeds(1e-5, 1e-5, 8e-9)
    ring, merged = (
        predict_seconds(algorithm, [RequestSize("entries", 1e6)], 1024, links)
        for algorithm in (Ring(), OkTopK())
    )
    assert ring > 100 * merged


@pytest.mark.parametrize("dense", ["yes", 1, None])
def test_invalid_dense_setting_raises(dense):
    with pytest.raises(ValueError, match=r"`dense` must be.*Received"):
        Auto(dense=dense)


@pytest.mark.parametrize("num_workers", [1, 4])
def test_gossip_cannot_be_predicted_for_a_sum(num_workers):
    with pytest.raises(
        ValueError, match=r"pass `Ring\(\)`.*Received: collective=Gossip"
    ):
        predict_seconds(Gossip(), [RequestSize("sum", 1e6)], num_workers, LINKS["far"])
