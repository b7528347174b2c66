"""Local steps of worker processes: when they communicate, and what they save."""

import pathlib

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).with_name("local_worker.py")


@pytest.mark.slow
@pytest.mark.workers
def test_two_workers_communicate_only_at_the_end_of_a_round(starter, tmp_path):
    finished = starter.run([SCRIPT, tmp_path], 2, tmp_path)
    assert finished.codes == [0, 0]
    one, other = finished.findings
    # Of eight steps, the third and the sixth synchronize; the first is not counted.
    for worker in (one, other):
        assert [bool(n) for n in worker["started"]] == [0, 1, 0, 0, 1, 0, 0]
        assert worker["rounds"] == 5
        assert worker["restored"]
        assert worker["goes on"]
    assert one["consensus"] == other["consensus"]
    for worker in (one, other):
        weights = worker["looked"]["found"]
        assert weights["unchanged"]
        assert weights["shared"]  # a model that shares layers
        assert (
            weights["anchor"]
            == weights["predict"]
            == weights["evaluate"]
            == weights["saved"]
        )
        started = worker["looked"]["started"]
        assert started["agreed"] == 0
        # Keras gathers predictions and the number of batches.
        assert started == worker["at a consensus"]["started"]
    assert one["looked"]["found"] == other["looked"]["found"]
    pairs = zip(one["weights"], other["weights"], strict=True)
    are_equal = [np.array_equal(a, b) for a, b in pairs]
    assert are_equal == [0, 0, 1, 0, 0, 1, 0, 0]


@pytest.mark.workers
@pytest.mark.exhaustive
def test_eight_workers(starter, tmp_path):
    """Checks that do not depend on the number of workers."""
    finished = starter.run([SCRIPT, tmp_path], 8, tmp_path)
    assert finished.codes == [0] * 8
    first = finished.findings[0]
    for worker in finished.findings:
        assert [bool(n) for n in worker["started"]] == [0, 1, 0, 0, 1, 0, 0]
        assert (worker["rounds"], worker["consensus"]) == (5, first["consensus"])
        assert worker["restored"]
        assert worker["goes on"]
        assert worker["weights"][2] == first["weights"][2]
        assert worker["looked"]["found"] == first["looked"]["found"]
