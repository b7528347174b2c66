"""What `benchmarks/time_to_accuracy.py` makes of its runs, and a short one of each."""

import json
import pathlib
import sys

import numpy as np
import programs
import pytest
from common import tasks
from study import accuracy_runs, timed_tasks

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"

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
PROGRAM = f"""{READ}
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import time_to_accuracy
from absl import app
from common import tasks

tasks.read = read
app.run(time_to_accuracy.main)
"""


def a_row(method, curve, **given):
    (key,) = accuracy_runs.keys(["digits"], ["1gbit"], [method], [0], 2, 100, 8)
    return {**key, "curve": curve, "value": curve[-1][2], **given}


def test_times_to_the_target_of_the_dense_run():
    dense = a_row("dense", [(0.0, 0, 0.1), (8.0, 50, 0.964), (12.0, 100, 0.969)])
    fast = a_row("dgc", [(1.0, 50, 0.963), (3.0, 90, 0.965), (4.0, 100, 0.96)])
    never = a_row("float16", [(5.0, 100, 0.9639)])
    other = a_row("dgc", [(4.0, 100, 0.97)], rate="100mbit")
    found = accuracy_runs.compared([fast, never, dense, other], 0.005)
    assert [row.get("target_seconds") for row in found] == [3.0, None, 8.0, None]
    assert [row.get("times") for row in found] == [8 / 3, None, 1.0, None]
    differences = [row.get("to_dense", np.nan) for row in found]
    np.testing.assert_allclose(differences, [-0.009, -0.0051, 0, np.nan], atol=1e-9)


def test_the_width_is_of_one_task_alone():
    found = accuracy_runs.keys(["cifar10", "digits"], ["1gbit"], ["dgc"], [0], 2, 9, 64)
    assert [key["width"] for key in found] == [None, 64]
    assert {tuple(key) for key in found} == {tuple(accuracy_runs.KEYS)}


def test_workers_draw_different_photographs(tmp_path, monkeypatch):
    namespace = {}
    exec(READ, namespace)
    monkeypatch.setattr(tasks, "read", namespace["read"])
    timed_tasks.prepare(["cifar10"], "any", tmp_path)
    own, other = (timed_tasks.Photos(tmp_path, part=(rank, 2)) for rank in (0, 1))
    draw, again = own.draws(3, 32), own.draws(3, 32)
    images, labels = draw()
    assert images.shape == (32, 32, 32, 3)
    np.testing.assert_array_equal(images, again()[0])
    assert not np.array_equal(labels, other.draws(3, 32)()[1])
    assert not np.array_equal(labels, draw()[1])  # of the next step
    one_hot = np.eye(10)[own.test[1]]
    assert own.evaluate(lambda images: one_hot) == 1


@pytest.mark.exhaustive
@pytest.mark.workers
def test_time_to_accuracy(tmp_path):
    """Easy digits are learnt, on loopback; what is there is not measured again."""
    path = tmp_path / "rows.jsonl"
    flags = ["--tasks=digits", "--rates=loopback", "--methods=dense,dgc,power_sgd"]
    flags += ["--steps=60", "--width=64", "--every=0.2", f"--json={path}"]
    command = [sys.executable, "-c", PROGRAM, *flags]
    assert programs.run(command).returncode == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["mode"] for row in rows] == ["dense", "dgc", "power_sgd"]
    for row in rows:
        assert row["value"] > 0.95
        assert row["curve"] == sorted(row["curve"]) and row["curve"][-1][1] == 60
        assert (row["handed"] is None) == (row["mode"] == "dense")
    assert programs.run(command).returncode == 0
    assert len(path.read_text().splitlines()) == 3
    reported = programs.run([sys.executable, "-c", PROGRAM, f"--from_json={path}"])
    assert "s to target" in reported.stdout
