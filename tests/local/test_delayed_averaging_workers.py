"""Delayed averaging between worker processes: who waits, and which one is reported."""

import pathlib
import re

import pytest

SCRIPT = pathlib.Path(__file__).with_name("delayed_worker.py")


@pytest.mark.slow
@pytest.mark.workers
def test_steps_continue_while_a_mean_is_computed(starter, tmp_path):
    finished = starter.run([SCRIPT, tmp_path, "late"], 2, tmp_path)
    assert finished.codes == [0, 0]
    one, other = finished.findings
    # The other worker stops after its fifth step, within the second round, until this
    # one has completed its eighth, which it could not if steps waited for a mean. The
    # ninth step, which ends the third round, waits for the mean of the second one.
    assert one["ended"][7] < other["back"] < one["ended"][8]
    for worker in (one, other):
        assert sum(worker["started"]) == 0  # by steps
        assert worker["rounds"] == 9
        assert worker["restored"]
        assert worker["goes on"]
    for key in ("anchor", "evaluated", "consensus"):
        assert one[key] == other[key]


@pytest.mark.workers
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("fails", marks=pytest.mark.exhaustive),
        pytest.param("hangs", marks=pytest.mark.slow),
    ],
)
def test_missing_worker_is_reported(starter, tmp_path, mode):
    settings = {"TF_DGC_TIMEOUT": "4"}
    finished = starter.run([SCRIPT, tmp_path, mode], 2, tmp_path, **settings)
    assert all(finished.codes)
    one, other = finished.outputs
    if mode == "fails":
        assert "cannot go on: worker 1" in one
        assert "ended with ValueError: it broke" in one
        assert "it broke" in other
    else:
        assert re.search(
            r"waited 4 s .* for worker 1 .*responds but does not come", one
        )
