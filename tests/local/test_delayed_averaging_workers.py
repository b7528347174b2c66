"""Delayed averaging between real workers: who waits, and which worker is named."""

import pathlib
import re

import pytest

SCRIPT = pathlib.Path(__file__).with_name("delayed_worker.py")


@pytest.mark.slow
@pytest.mark.workers
def test_steps_go_on_while_a_mean_is_formed(starter, tmp_path):
    finished = starter.run([SCRIPT, tmp_path, "late"], 2, tmp_path)
    assert finished.codes == [0, 0]
    one, other = finished.findings
    # The other one stays behind its fifth step, within the second round, until this one
    # has ended its eighth: would steps not go on, neither came further. What the other
    # ends that round with is waited for by the ninth, where the third round ends.
    assert one["ended"][7] < other["back"] < one["ended"][8]
    for found in (one, other):
        assert sum(found["started"]) == 0  # by steps
        assert found["rounds"] == 9
        assert found["restored"]
        assert found["goes on"]
    for what in ("anchor", "evaluated", "consensus"):
        assert one[what] == other[what]


@pytest.mark.workers
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("fails", marks=pytest.mark.exhaustive),
        pytest.param("hangs", marks=pytest.mark.slow),
    ],
)
def test_who_does_not_come_is_named_by_the_other(starter, tmp_path, mode):
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
