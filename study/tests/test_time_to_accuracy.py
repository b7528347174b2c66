"""What `study/time_to_accuracy.py` makes of its runs, and a short one of each."""

import pathlib
import sys

import numpy as np
import programs
import pytest
from common import resumable
from common.cluster import WorkerError
from experiments import time_to_accuracy
from tasks import small, timed

STUDY = pathlib.Path(__file__).parents[1]

# Digits that are easy: each class has a row of pixels of its own.
READ = """
import numpy as np

def read(name, data_dir, split):
    numbers = np.arange(320 if split == "train" else 100)
    size = {"mnist": (28, 28, 1), "cifar10": (32, 32, 3)}[name]
    images = np.zeros((len(numbers), *size), np.uint8)
    images[np.arange(len(numbers)), numbers % 10] = 255
    return images, numbers % 10
"""
SHARED = {"workers": 2, "steps": 100, "looks": 2, "processor": "a", "cpus": 2}
PROGRAM = f"""{READ}
import sys
sys.path.insert(0, {str(STUDY)!r})
import time_to_accuracy
from absl import app
from tasks import small

small.read = read
app.run(time_to_accuracy.main)
"""


def keys(methods=("dgc",), given=None, **more):
    shared = {**SHARED, **(given or {})}
    return time_to_accuracy.keys(["digits"], ["1gbit"], methods, [0], 8, shared, **more)


def a_row(method, curve, **given):
    (key,) = keys([method])
    value = curve[-1][2] if curve else None
    return {**key, "curve": curve, "value": value, **given}


def test_times_to_the_target_of_the_dense_run():
    dense = a_row(
        "dense", [(0.0, 0, 0.97), (6.0, 40, 0.9), (8.0, 50, 0.964), (12.0, 100, 0.969)]
    )
    fast = a_row("dgc", [(0.0, 0, 0.1), (1.0, 50, 0.965), (4.0, 100, 0.96)])
    steady = a_row("qsgd", [(1.0, 40, 0.1), (2.0, 50, 0.965), (4.0, 100, 0.97)])
    never = a_row("float16", [(5.0, 100, 0.9639)])
    other = a_row("dgc", [(4.0, 100, 0.97)], rate="100mbit")
    elsewhere = a_row("dgc", [(4.0, 100, 0.97)], processor="b")
    failed = a_row("power_sgd", [], error="no")
    rows = [fast, steady, never, dense, other, elsewhere, failed]
    found = time_to_accuracy.compared(rows, 0.005)

    def shown(name):
        return [row.get(name) for row in found]

    alone = 3 * [None]
    assert shown("target_seconds") == [1.0, 2.0, None, 8.0, *alone]
    assert shown("target_updates") == [50, 50, None, 50, *alone]
    assert shown("lasting") == [None, 2.0, None, 8.0, *alone]
    assert shown("times") == [8.0, 4.0, None, None, *alone]
    # Dense came to it between 6 and 8 seconds, the others from 0 and 1 second on.
    assert shown("times_least") == [6.0, 3.0, None, None, *alone]
    assert shown("times_most") == [None, 8.0, None, None, *alone]
    assert shown("failed") == 6 * [None] + ["yes"]
    differences = [row.get("to_dense", np.nan) for row in found]
    wanted = [-0.009, 0.001, -0.0051, 0, *3 * [np.nan]]
    np.testing.assert_allclose(differences, wanted, atol=1e-9)


def summary(*runs):
    """Return the summary of runs by seed, of which dense takes 8 seconds each."""
    rows = []
    for seed, curve in enumerate(runs):
        rows.append(a_row("dense", [(8.0, 100, 0.97)], seed=seed))
        rows.append(a_row("dgc", curve, seed=seed))
    rows.append(a_row("dgc", [(1.0, 100, 0.9)], seed=len(runs)))  # not a pair
    return time_to_accuracy.summaries(time_to_accuracy.compared(rows, 0.005))


def test_summaries_over_seeds():
    dense, found = summary([(2.0, 100, 0.97)], [(8.0, 100, 0.966)])
    assert (dense["runs"], dense["reached"], dense.get("times")) == (2, 2, None)
    assert (found["runs"], found["failures"], found["reached"]) == (2, 0, 2)
    assert found["to_dense"] == pytest.approx(-0.002)
    assert found["half_width"] == pytest.approx(12.7062 * 0.002, rel=1e-4)
    assert found["target_seconds"] == 5.0
    ends = found["times_least"], found["times"], found["times_most"]
    wide = 12.7062 * np.log(2)  # Student's t of two pairs, of which one is 2 from here
    np.testing.assert_allclose(np.log(ends), np.log(2) + wide * np.arange(-1, 2), 1e-4)


def test_what_fails_or_is_late_is_not_left_out_of_means():
    good = [(2.0, 100, 0.97)]
    _, failed = summary(good, [])
    assert (failed["runs"], failed["failures"], failed["reached"]) == (2, 1, 1)
    assert not failed.keys() & {"value", "to_dense", "target_seconds", "times"}
    _, late = summary(good, [(2.0, 100, 0.9)])
    assert (late["runs"], late["failures"], late["reached"]) == (2, 0, 1)
    assert late["value"] == pytest.approx(0.935)
    assert not late.keys() & {"target_seconds", "times"}


def test_one_seed_has_no_interval():
    _, found = summary([(2.0, 100, 0.97)])
    assert (found["times"], found["half_width"]) == (4.0, None)
    assert "times_least" not in found


def test_the_width_is_of_one_task_alone():
    asked = ["cifar10", "digits"], ["1gbit"], ["dgc"], [0], 64, SHARED
    found = time_to_accuracy.keys(*asked)
    assert [key["width"] for key in found] == [None, 64]
    assert {frozenset(key) for key in found} == {frozenset(time_to_accuracy.KEYS)}


def test_what_cannot_be_run_is_refused_at_once():
    time_to_accuracy.check([*time_to_accuracy.METHODS, "qsgd"], 8, 8)
    with pytest.raises(ValueError, match="nothing"):
        time_to_accuracy.check(["dgc", "nothing"], 8, 8)
    with pytest.raises(ValueError, match="looks=9 and steps=8"):
        time_to_accuracy.check(["dgc"], 9, 8)


@pytest.mark.parametrize("other", [{"looks": 3}, {"processor": "b"}, {"cpus": 4}])
def test_other_settings_are_other_runs(other):
    (key,), (another,) = keys(), keys(given=other)
    done = resumable.ResumableRows(None, time_to_accuracy.KEYS, {})
    done.row(key, lambda _: {"value": 1})
    assert done.row(another, lambda _: {"value": 2})["value"] == 2


def test_what_failed_is_a_row_and_tried_again_if_asked_for(tmp_path, monkeypatch):
    def fail(*_):
        raise WorkerError("Worker 0 ended")

    monkeypatch.setattr(time_to_accuracy, "_measure", fail)
    path = tmp_path / "rows.jsonl"
    done = resumable.ResumableRows(path, time_to_accuracy.KEYS, {})
    for retry, attempt in ((False, 0), (False, 0), (True, 1)):
        (key,) = keys(rows=done.rows, retry=retry)
        row = done.row(key, lambda _, k=key: time_to_accuracy.measure(k, "any", 1.0))
        assert (row["attempt"], row["value"]) == (attempt, None)
        assert row["error"] == "Worker 0 ended"
    assert len(path.read_text().splitlines()) == 2
    dense = a_row("dense", [(8.0, 100, 0.97)])
    good = {**row, "attempt": 2, "value": 0.97, "curve": [(2.0, 100, 0.97)]}
    assert keys(rows=[*done.rows, good], retry=True)[0]["attempt"] == 2
    rows = [*done.rows, good, dense]
    assert [r.get("times") for r in time_to_accuracy.compared(rows, 0.0)] == [4.0, None]


def test_a_dense_run_that_fails_is_no_row(monkeypatch):
    def fail(*_):
        raise WorkerError("Worker 0 ended")

    monkeypatch.setattr(time_to_accuracy, "_measure", fail)
    (key,) = keys(["dense"])
    with pytest.raises(WorkerError, match="Worker 0 ended"):
        time_to_accuracy.measure(key, "any", 1.0)


def test_workers_have_to_have_the_same_weights():
    time_to_accuracy._check({"mode": "dgc"}, 2 * [{"sums": [1.0, float("nan")]}])
    with pytest.raises(WorkerError, match="dgc: weights differ"):
        time_to_accuracy._check({"mode": "dgc"}, [{"sums": [1.0]}, {"sums": [1.5]}])


def test_workers_draw_different_photographs(tmp_path, monkeypatch):
    namespace = {}
    exec(READ, namespace)
    monkeypatch.setattr(small, "read", namespace["read"])
    timed.prepare(["cifar10"], "any", tmp_path)
    own, other = (timed.Photos(tmp_path, part=(rank, 2)) for rank in (0, 1))
    draw, again = own.draws(3, 32), own.draws(3, 32)
    images, labels = draw()
    assert images.shape == (32, 32, 32, 3)
    np.testing.assert_array_equal(images, again()[0])
    assert not np.array_equal(labels, other.draws(3, 32)()[1])
    assert not np.array_equal(labels, draw()[1])  # of the next step
    one_hot = np.eye(10)[own.test[1]]
    assert own.evaluate(lambda images: one_hot) == 1


def rows_of(path, *flags):
    """Run the program, and once more, which measures nothing; return its rows."""
    command = [sys.executable, "-c", PROGRAM, *flags, f"--json={path}"]
    for _ in range(2):
        assert programs.run(command).returncode == 0
    return resumable.read_rows([path])


@pytest.mark.exhaustive
@pytest.mark.workers
def test_time_to_accuracy(tmp_path):
    """Easy digits are learnt, on loopback; what is there is not measured again."""
    path = tmp_path / "rows.jsonl"
    flags = ["--tasks=digits", "--rates=loopback", "--methods=dense,dgc,power_sgd"]
    rows = rows_of(path, *flags, "--steps=60", "--width=64", "--looks=5")
    assert [row["mode"] for row in rows] == ["dense", "dgc", "power_sgd"]
    for row in rows:
        assert row["value"] > 0.95
        assert row["curve"] == sorted(row["curve"])
        assert [updates for _, updates, _ in row["curve"]] == [0, 12, 24, 36, 48, 60]
        assert row["curve"][0][2] == rows[0]["curve"][0][2] < 0.5
        assert row["steps_of_each"] == [60, 60]
        assert (row["handed"] is None) == (row["mode"] == "dense")
    reported = programs.run([sys.executable, "-c", PROGRAM, f"--from_json={path}"])
    assert "s to target" in reported.stdout


@pytest.mark.exhaustive
@pytest.mark.workers
def test_normalization_of_two_workers(tmp_path):
    """All look at the same weights, statistics too, or it is an error."""
    path = tmp_path / "rows.jsonl"
    flags = ["--tasks=cifar10", "--rates=loopback", "--methods=dense,dgc"]
    rows = rows_of(path, *flags, "--steps=8", "--looks=2")
    assert [row.get("error") for row in rows] == [None, None]
    assert [len(row["curve"]) for row in rows] == [3, 3]
