"""Local steps of real workers: who is contacted when, and what is saved."""

import pathlib

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).with_name("local_worker.py")


@pytest.mark.slow
@pytest.mark.workers
def test_two_workers_meet_at_the_end_of_a_round_only(starter, tmp_path):
    finished = starter.run([SCRIPT, tmp_path], 2, tmp_path)
    assert finished.codes == [0, 0]
    one, other = finished.findings
    # Eight steps, of which the third and the sixth exchange; the first is not counted.
    for found in (one, other):
        assert [bool(n) for n in found["started"]] == [0, 1, 0, 0, 1, 0, 0]
        assert found["rounds"] == 5
        assert found["restored"]
        assert found["goes on"]
    assert one["consensus"] == other["consensus"]
    for found in (one, other):
        seen = found["looked"]["found"]
        assert seen["unchanged"]
        assert seen["shared"]  # a model that shares the layers
        assert seen["anchor"] == seen["predict"] == seen["evaluate"] == seen["saved"]
        started = found["looked"]["started"]
        assert started["agreed"] == 0
        # Keras gathers what is predicted, and the number of batches.
        assert started == found["at a consensus"]["started"]
    assert one["looked"]["found"] == other["looked"]["found"]
    pairs = zip(one["weights"], other["weights"], strict=True)
    alike = [np.array_equal(a, b) for a, b in pairs]
    assert alike == [0, 0, 1, 0, 0, 1, 0, 0]


@pytest.mark.workers
@pytest.mark.exhaustive
def test_eight_workers(starter, tmp_path):
    """Of all that is found, what does not depend on how many there are."""
    finished = starter.run([SCRIPT, tmp_path], 8, tmp_path)
    assert finished.codes == [0] * 8
    first = finished.findings[0]
    for found in finished.findings:
        assert [bool(n) for n in found["started"]] == [0, 1, 0, 0, 1, 0, 0]
        assert (found["rounds"], found["consensus"]) == (5, first["consensus"])
        assert found["restored"]
        assert found["goes on"]
        assert found["weights"][2] == first["weights"][2]
        assert found["looked"]["found"] == first["looked"]["found"]
