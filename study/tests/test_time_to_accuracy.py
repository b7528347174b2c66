"""`study/time_to_accuracy.py`: keys, tables, failures, and short runs."""

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

# Easy digits: each class has its own row of pixels.
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


def make_keys(methods=("dgc",), settings=None, **arguments):
    shared = {**SHARED, **(settings or {})}
    return time_to_accuracy.keys(
        ["digits"], ["1gbit"], methods, [0], 8, shared, **arguments
    )


def make_row(method, curve, **overrides):
    (key,) = make_keys([method])
    value = curve[-1][2] if curve else None
    return {**key, "curve": curve, "value": value, **overrides}


def test_times_to_the_target_of_the_dense_run():
    dense = make_row(
        "dense", [(0.0, 0, 0.97), (6.0, 40, 0.9), (8.0, 50, 0.964), (12.0, 100, 0.969)]
    )
    fast = make_row("dgc", [(0.0, 0, 0.1), (1.0, 50, 0.965), (4.0, 100, 0.96)])
    steady = make_row("qsgd", [(1.0, 40, 0.1), (2.0, 50, 0.965), (4.0, 100, 0.97)])
    not_reached = make_row("float16", [(5.0, 100, 0.9639)])
    other_rate = make_row("dgc", [(4.0, 100, 0.97)], rate="100mbit")
    other_machine = make_row("dgc", [(4.0, 100, 0.97)], processor="b")
    failed = make_row("power_sgd", [], error="no")
    rows = [fast, steady, not_reached, dense, other_rate, other_machine, failed]
    lines = time_to_accuracy.compared(rows, 0.005)

    def column(name):
        return [line.get(name) for line in lines]

    without_dense = 3 * [None]
    assert column("target_seconds") == [1.0, 2.0, None, 8.0, *without_dense]
    assert column("target_updates") == [50, 50, None, 50, *without_dense]
    assert column("lasting") == [None, 2.0, None, 8.0, *without_dense]
    assert column("times") == [8.0, 4.0, None, None, *without_dense]
    # Dense reached it between 6 and 8 seconds, the others after 0 and 1 seconds.
    assert column("times_least") == [6.0, 3.0, None, None, *without_dense]
    assert column("times_most") == [None, 8.0, None, None, *without_dense]
    assert column("failed") == 6 * [None] + ["yes"]
    differences = [line.get("to_dense", np.nan) for line in lines]
    expected = [-0.009, 0.001, -0.0051, 0, *3 * [np.nan]]
    np.testing.assert_allclose(differences, expected, atol=1e-9)


def summarize(*curves):
    """Return the summaries of runs by seed; each dense run takes 8 seconds."""
    rows = []
    for seed, curve in enumerate(curves):
        rows.append(make_row("dense", [(8.0, 100, 0.97)], seed=seed))
        rows.append(make_row("dgc", curve, seed=seed))
    rows.append(make_row("dgc", [(1.0, 100, 0.9)], seed=len(curves)))  # not a pair
    return time_to_accuracy.summaries(time_to_accuracy.compared(rows, 0.005))


def test_summaries_over_seeds():
    dense, dgc = summarize([(2.0, 100, 0.97)], [(8.0, 100, 0.966)])
    assert (dense["runs"], dense["reached"], dense.get("times")) == (2, 2, None)
    assert (dgc["runs"], dgc["failures"], dgc["reached"]) == (2, 0, 2)
    assert dgc["to_dense"] == pytest.approx(-0.002)
    assert dgc["half_width"] == pytest.approx(12.7062 * 0.002, rel=1e-4)
    assert dgc["target_seconds"] == 5.0
    interval = dgc["times_least"], dgc["times"], dgc["times_most"]
    half_width = 12.7062 * np.log(2)  # Student's t of two pairs, log(2) from their mean
    np.testing.assert_allclose(
        np.log(interval), np.log(2) + half_width * np.arange(-1, 2), 1e-4
    )


def test_no_means_if_a_run_failed_or_missed_the_target():
    good = [(2.0, 100, 0.97)]
    _, failed = summarize(good, [])
    assert (failed["runs"], failed["failures"], failed["reached"]) == (2, 1, 1)
    assert not failed.keys() & {"value", "to_dense", "target_seconds", "times"}
    _, missed = summarize(good, [(2.0, 100, 0.9)])
    assert (missed["runs"], missed["failures"], missed["reached"]) == (2, 0, 1)
    assert missed["value"] == pytest.approx(0.935)
    assert not missed.keys() & {"target_seconds", "times"}


def test_one_seed_has_no_interval():
    _, dgc = summarize([(2.0, 100, 0.97)])
    assert (dgc["times"], dgc["half_width"]) == (4.0, None)
    assert "times_least" not in dgc


def test_width_is_in_the_keys_of_digits_only():
    tasks = ["cifar10", "digits"]
    keys = time_to_accuracy.keys(tasks, ["1gbit"], ["dgc"], [0], 64, SHARED)
    assert [key["width"] for key in keys] == [None, 64]
    assert {frozenset(key) for key in keys} == {frozenset(time_to_accuracy.KEYS)}


def test_invalid_arguments_raise_before_the_run():
    time_to_accuracy.check([*time_to_accuracy.METHODS, "qsgd"], 8, 8)
    with pytest.raises(ValueError, match="nothing"):
        time_to_accuracy.check(["dgc", "nothing"], 8, 8)
    with pytest.raises(ValueError, match="looks=9 and steps=8"):
        time_to_accuracy.check(["dgc"], 9, 8)


@pytest.mark.parametrize("other", [{"looks": 3}, {"processor": "b"}, {"cpus": 4}])
def test_other_settings_are_other_runs(other):
    (key,), (other_key,) = make_keys(), make_keys(settings=other)
    store = resumable.ResumableRows(None, time_to_accuracy.KEYS, {})
    store.row(key, lambda _: {"value": 1})
    assert store.row(other_key, lambda _: {"value": 2})["value"] == 2


def test_failed_run_has_a_row_and_can_be_retried(tmp_path, monkeypatch):
    def fail(*_):
        raise WorkerError("Worker 0 ended")

    monkeypatch.setattr(time_to_accuracy, "_measure", fail)
    path = tmp_path / "rows.jsonl"
    store = resumable.ResumableRows(path, time_to_accuracy.KEYS, {})
    for retry, attempt in ((False, 0), (False, 0), (True, 1)):
        (key,) = make_keys(rows=store.rows, retry=retry)
        row = store.row(key, lambda _, k=key: time_to_accuracy.measure(k, "any", 1.0))
        assert (row["attempt"], row["value"]) == (attempt, None)
        assert row["error"] == "Worker 0 ended"
    assert len(path.read_text().splitlines()) == 2
    dense = make_row("dense", [(8.0, 100, 0.97)])
    good = {**row, "attempt": 2, "value": 0.97, "curve": [(2.0, 100, 0.97)]}
    assert make_keys(rows=[*store.rows, good], retry=True)[0]["attempt"] == 2
    rows = [*store.rows, good, dense]
    assert [r.get("times") for r in time_to_accuracy.compared(rows, 0.0)] == [4.0, None]


def test_failed_dense_run_raises(monkeypatch):
    def fail(*_):
        raise WorkerError("Worker 0 ended")

    monkeypatch.setattr(time_to_accuracy, "_measure", fail)
    (key,) = make_keys(["dense"])
    with pytest.raises(WorkerError, match="Worker 0 ended"):
        time_to_accuracy.measure(key, "any", 1.0)


def test_different_weights_of_workers_raise():
    check, key = time_to_accuracy._check_same_weights, {"mode": "dgc"}
    check(key, 2 * [{"sums": [1.0, float("nan")]}])
    with pytest.raises(WorkerError, match="dgc: weights differ"):
        check(key, [{"sums": [1.0]}, {"sums": [1.5]}])


def test_workers_draw_different_photographs(tmp_path, monkeypatch):
    namespace = {}
    exec(READ, namespace)
    monkeypatch.setattr(small, "read", namespace["read"])
    timed.prepare(["cifar10"], "any", tmp_path)
    first, second = (timed.Photos(tmp_path, part=(rank, 2)) for rank in (0, 1))
    draw, repeated_draw = first.draws(3, 32), first.draws(3, 32)
    images, labels = draw()
    assert images.shape == (32, 32, 32, 3)
    np.testing.assert_array_equal(images, repeated_draw()[0])
    assert not np.array_equal(labels, second.draws(3, 32)()[1])
    assert not np.array_equal(labels, draw()[1])  # of the next step
    one_hot = np.eye(10)[first.test[1]]
    assert first.evaluate(lambda images: one_hot) == 1


def run_twice(path, *flags):
    """Run the program twice; return its rows, which the second time reuses."""
    command = [sys.executable, "-c", PROGRAM, *flags, f"--json={path}"]
    for _ in range(2):
        assert programs.run(command).returncode == 0
    return resumable.read_rows([path])


@pytest.mark.exhaustive
@pytest.mark.workers
def test_all_methods_learn_easy_digits(tmp_path):
    path = tmp_path / "rows.jsonl"
    flags = ["--tasks=digits", "--rates=loopback", "--methods=dense,dgc,power_sgd"]
    rows = run_twice(path, *flags, "--steps=60", "--width=64", "--looks=5")
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
def test_two_workers_evaluate_equal_layer_statistics(tmp_path):
    path = tmp_path / "rows.jsonl"
    flags = ["--tasks=cifar10", "--rates=loopback", "--methods=dense,dgc"]
    rows = run_twice(path, *flags, "--steps=8", "--looks=2")
    assert [row.get("error") for row in rows] == [None, None]
    assert [len(row["curve"]) for row in rows] == [3, 3]
