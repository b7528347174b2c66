"""`study/server_training.py`: tasks, snapshots, keys, tables, and a short run."""

import json
import pathlib
import sys

import numpy as np
import programs
import pytest
from common import resumable
from experiments import server_training
from tasks import digits, small
from training import snapshots

STUDY = pathlib.Path(__file__).parents[1]

# Easy digits: each class has its own row of pixels. Every part has all classes, as
# "backup" drops the pushes of a worker that is always late.
READ = """
import numpy as np

def read(name, data_dir, split):
    numbers = np.arange(80 if split == "train" else 1000)
    labels = (numbers // 4 + numbers % 4) % 10
    images = np.zeros((len(labels), 28, 28, 1), np.uint8)
    images[np.arange(len(labels)), labels] = 255
    return images, labels
"""
PROGRAM = f"""{READ}
import sys
sys.path.insert(0, {str(STUDY)!r})
import server_training
from absl import app
from tasks import small

small.read = read
app.run(server_training.main)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    namespace = {}
    exec(READ, namespace)
    monkeypatch.setattr(small, "read", namespace["read"])
    digits.prepare("any", tmp_path)
    return tmp_path


def make_plan(**overrides):
    settings = {
        "folder": "any",
        "steps": 100,
        "step_ms": 40.0,
        "batch_size": 32,
        "width": 8,
        "learning_rates": {"sgd": 0.1, "adam": 0.001},
        "sparsity": 0.999,
        "factor_masking": True,
        "pull": "sparse",
        "pull_sparsity": None,
        "staleness": 3,
        "quorum": None,
        "every": 1.0,
        "timeout": 60.0,
    }
    return server_training.Plan(**{**settings, **overrides})


def test_worker_draws_from_its_part(folder):
    task = digits.Digits(folder, 8, (1, 4))
    every_fourth = [number % 10 for number in range(1, 21)]
    assert task.train[1].tolist() == every_fourth
    images, labels = task.draws(0, 64)()
    assert images.shape == (64, 28, 28, 1)
    assert images.dtype == np.float32
    assert (images[np.arange(64), labels] == 1).all()
    repeated, _ = digits.Digits(folder, 8, (1, 4)).draws(0, 64)()
    np.testing.assert_array_equal(images, repeated)


def test_snapshots_are_at_equal_times(folder):
    task = digits.Digits(folder, 16)
    time_snapshots = snapshots.Snapshots(0.5)
    zeros = [np.zeros_like(w) for w in task.model().get_weights()]
    for step in range(16):  # of 0.2 s each
        time_snapshots.take_if_due(lambda: zeros, 0.2 * step, step)
    perfect = [np.zeros_like(w) for w in zeros]
    for unit in range(10):  # detects the row of pixels of its class
        perfect[0][28 * unit : 28 * (unit + 1), unit] = 1
        perfect[2][unit, unit] = perfect[4][unit, unit] = 1
    curve = time_snapshots.curve(task, perfect, 2.5, 13)
    assert [(seconds, updates) for seconds, updates, _ in curve] == [
        *[(0.0, 0), (0.6, 3), (1.0, 5), (1.6, 8), (2.0, 10), (2.5, 13)]
    ]
    assert [value for *_, value in curve] == [*5 * [0.1], 1.0]


@pytest.mark.parametrize(
    "mode, inner, rate, updates",
    [
        ("dense", "sgd", 0.1, 100),
        ("sync", "adam", 0.001, 100),
        ("async", "sgd", 0.1, 400),
        ("async", "adam", 0.00025, 400),
        ("ssp", "adam", 0.00025, 400),
        ("backup", "adam", 0.001, 134),  # of three pushes each
    ],
)
def test_modes_use_equal_numbers_of_gradients(mode, inner, rate, updates):
    """Adam's rate is divided if each push is a step: its step is as long for one."""
    key = make_plan().key(inner, 4, 0.25, "loopback", mode, 0)
    assert key["learning_rate"] == rate
    assert server_training.updates_of(key) == updates
    assert set(key) == set(server_training.KEYS)


def make_row(mode, speed, curve, **overrides):
    key = make_plan(**overrides).key("sgd", 4, speed, "loopback", mode, 0)
    figures = {"parameters": 1000, "bytes": 100}
    return {**key, **figures, "curve": curve, "value": curve[-1][2]}


def test_rows_are_compared_with_the_dense_run():
    dense = make_row("dense", 1.0, [(0.0, 3, 0.1), (5.0, 50, 0.96), (9.0, 100, 0.97)])
    once_reached = make_row(
        "ssp", 0.25, [(1.0, 90, 0.3), (4.0, 200, 0.961), (8.0, 400, 0.959)]
    )
    not_reached = make_row("async", 1.0, [(8.0, 400, 0.9599)])
    without_dense = make_row("dgc", 1.0, [(8.0, 400, 0.97)], steps=50)
    rows = server_training.compared([once_reached, not_reached, dense, without_dense])
    assert [row.get("within") for row in rows] == ["no", "no", "yes", None]
    assert [row.get("dense") for row in rows] == [0.97, 0.97, 0.97, None]
    reached = [(r.get("target_seconds"), r.get("target_updates")) for r in rows]
    assert reached == [(4.0, 200), (None, None), (5.0, 50), (None, None)]
    assert {row["less"] for row in rows} == {80}


def test_settings_that_a_mode_ignores_are_not_in_its_key():
    store = resumable.ResumableRows(None, server_training.KEYS, {})
    for pull in ("whole", "sparse"):
        key = make_plan(pull=pull).key("sgd", 2, 1.0, "loopback", "dense", 0)
        store.row(key, lambda _, pull=pull: {"measured": pull})
    assert [row["measured"] for row in store.rows] == ["whole"]


@pytest.mark.exhaustive
@pytest.mark.workers
def test_every_mode_learns_easy_digits_with_a_slow_worker(tmp_path):
    path = tmp_path / "rows.jsonl"
    flags = ["--workers=2", "--speeds=0.25", "--steps=60", "--step_ms=5"]
    flags += ["--width=64", "--sparsity=0.9", "--every=0.2"]
    command = [sys.executable, "-c", PROGRAM, *flags, "--inner=sgd", f"--json={path}"]
    finished = programs.run(command)
    assert finished.returncode == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["mode"] for row in rows] == server_training.MODES
    assert all(row["value"] > 0.95 for row in rows)
    assert all(row["bytes"] > 0 for row in rows)
    times = {row["mode"]: row["seconds"] for row in rows}
    assert times["async"] < 0.8 * times["sync"]
    for row in rows:
        curve = row["curve"]
        assert len(curve) > 2 and curve == sorted(curve)
        assert curve[-1][1] >= server_training.updates_of(row)
        assert row["mode"] == "dense" or row["push"] > 0
    repeated = programs.run(command)  # finished runs are not repeated
    assert repeated.returncode == 0
    assert len(path.read_text().splitlines()) == len(rows)
    reported = programs.run([sys.executable, "-c", PROGRAM, f"--from_json={path}"])
    assert "s to target" in reported.stdout
