"""Commands of the study that take the tasks of `small.py`, on a task without data."""

import pathlib
import sys

import programs
import pytest
from common import resumable
from tasks import small

STUDY = pathlib.Path(__file__).parents[1]
KEYS = "method task seed workers metric value bytes_per_step dense_bytes_per_step"

# Logistic regression: which of 16 numbers is the largest?
PROGRAM = f"""
import sys
sys.path.insert(0, {str(STUDY)!r})
import keras, numpy as np, {{program}}
from absl import app
from tasks import small

class Largest(small.Task):
    name, metric, higher_is_better = "largest", "accuracy", True
    batch_size, learning_rate, clipnorm, tolerance = 32, 1.0, None, 0.05

    @staticmethod
    def load(data_dir):
        x = np.random.default_rng(0).normal(size=(2, 1000, 16)).astype("float32")
        return [(part, part.argmax(axis=-1)) for part in x]

    @staticmethod
    def model():
        return keras.Sequential([keras.Input((16,)), keras.layers.Dense(64, "relu"),
                                 keras.layers.Dense(16)])

    batch, evaluate = small.Mnist.batch, small.Mnist.evaluate

small.TASKS["largest"] = Largest
app.run({{program}}.main)
"""


def run(program, tmp_path, *flags):
    path = tmp_path / "runs.json"
    text = PROGRAM.format(program=program)
    command = [sys.executable, "-c", text, "--tasks=largest", f"--json={path}"]
    finished = programs.run([*command, *flags])
    assert finished.returncode == 0
    return resumable.read_rows([path]), finished.stdout


def test_target_includes_the_exact_tolerance():
    """0.9727 - 0.9627 is slightly more than 0.01 due to rounding."""
    assert small.Mnist.reached(0.9627, 0.9727)
    assert not small.Mnist.reached(0.9626, 0.9727)
    assert small.Shakespeare.reached(1.8, 1.7)
    assert not small.Shakespeare.reached(1.8001, 1.7)


@pytest.mark.exhaustive
def test_convergence_counts_bytes_and_reuses_rows(tmp_path):
    methods = ["none", "bfloat16", "top_k", "dgc", "dgc_for_steps"]
    table = tmp_path / "table.md"
    flags = ["--steps=40", "--seeds=2", "--workers=2", f"--markdown={table}"]
    first_rows, _ = run("convergence", tmp_path, "--methods=none,bfloat16", *flags)
    selection = f"--methods={','.join(methods)}"
    rows, output = run("convergence", tmp_path, selection, *flags)
    assert rows[: len(first_rows)] == first_rows  # finished runs are not repeated
    assert [row["method"] for row in rows[::2]] == ["dense", *methods]
    for row in rows:
        assert set(row) >= set(KEYS.split())
        assert (row["task"], row["workers"]) == ("largest", 2)
        assert [step for step, _, _ in row["curve"]] == list(range(4, 41, 4))
    runs = {row["method"]: rows[i : i + 2] for i, row in enumerate(rows) if i % 2 == 0}
    size = 4 * (16 * 64 + 64 + 64 * 16 + 16)
    sent = {method: pair[0]["bytes_per_step"] / size for method, pair in runs.items()}
    assert sent["dense"] == 1
    assert 1 <= sent["none"] < 1.01
    assert 0.5 < sent["bfloat16"] < 0.6
    assert sent["top_k"] < sent["dgc"] < 0.1
    assert sent["top_k"] < sent["dgc_for_steps"] < 0.2
    differences = [
        row["value"] - dense["value"]
        for row, dense in zip(runs["dgc"], runs["dense"], strict=True)
    ]
    assert f" {sum(differences) / 2:+.4f} |" in table.read_text()
    for method, pair in runs.items():
        assert [row["seed"] for row in pair] == [0, 1]
        assert pair[0]["value"] != pair[1]["value"]
        assert min(row["value"] for row in pair) > 0.3  # chance is 1/16
        assert f" {method} |" in table.read_text()
        assert f" {method} " in output
    values = [runs[method][0]["value"] for method in ("dense", "none")]
    assert values[0] == pytest.approx(values[1], abs=0.01)


@pytest.mark.exhaustive
def test_inner_optimizers_use_the_best_of_their_rates(tmp_path):
    flags = ["--optimizers=RMSprop", "--steps=30", "--seeds=1"]
    fixed_rate = ["--methods=uniform_8bit", "--factors=1"]
    first_rows, _ = run("inner_optimizers", tmp_path, *flags, *fixed_rate)
    *search, dense, uniform = first_rows
    assert (uniform["method"], uniform["rate"]) == ("uniform_8bit", dense["rate"])
    rows, output = run("inner_optimizers", tmp_path, *flags, "--methods=power_sgd")
    assert rows[: len(first_rows)] == first_rows  # finished runs are not repeated
    assert len(search) >= 3
    assert {(row["method"], row["seed"]) for row in search} == {("dense", 100)}
    assert dense["rate"] == max(search, key=lambda row: row["value"])["rate"]
    assert dense["value"] > 0.3  # chance is 1/16
    *search, compressed = rows[len(first_rows) :]
    assert {(row["method"], row["seed"]) for row in search} == {("power_sgd", 100)}
    factors = [row["rate"] / dense["rate"] for row in search]
    assert factors[:3] == pytest.approx([0.3, 1, 3])
    best = max(search[:3], key=lambda row: row["value"])["rate"] / dense["rate"]
    assert (len(factors) > 3) == (best != 1)  # and one beyond the edge
    assert compressed["rate"] == max(search, key=lambda row: row["value"])["rate"]
    assert dense["value"] != compressed["value"]
    assert not dense["jit_compile"]
    assert f"{dense['value']:.4f}" in output
    assert f"{compressed['value'] - dense['value']:+.4f}" in output


@pytest.mark.exhaustive
def test_rejected_inner_optimizer_has_a_row_with_the_reason(tmp_path):
    flags = "--optimizers=MultiOptimizer", "--steps=6", "--seeds=1"
    rows, output = run("inner_optimizers", tmp_path, *flags, "--methods=dgc,power_sgd")
    refused = [row for row in rows if "refused" in row]
    assert [row["method"] for row in refused] == ["dgc", "power_sgd"]
    assert {row["value"] for row in refused} == {None}
    assert "`MultiOptimizer` cannot be wrapped" in refused[0]["refused"]
    note = f"MultiOptimizer is refused by dgc, power_sgd: {refused[0]['refused']}"
    assert note in output


@pytest.mark.exhaustive
def test_local_sgd_of_period_1_is_dense_and_bytes_fall_with_the_period(tmp_path):
    flags = "--methods=dense,local_sgd,sparse_loco", "--periods=1,8", "--seeds=2"
    rows, output = run("periods", tmp_path, *flags, "--steps=16", "--workers=2")
    search = [row for row in rows if row["seed"] == 100]
    assert [row["method"] for row in search] == ["dense adamw"] * 3
    counted = [row for row in rows if row["seed"] != 100]
    by_run = {(r["method"], r["period"], r["seed"]): r for r in counted}
    assert len(by_run) == len(counted) == 2 * 5
    for seed in (0, 1):
        dense = by_run["dense", 1, seed]
        every_step, local = (by_run["local_sgd", period, seed] for period in (1, 8))
        assert every_step["loss"] == pytest.approx(dense["loss"], rel=1e-4)
        assert local["loss"] != pytest.approx(dense["loss"], rel=1e-3)
        # The first round of several steps also compares the workers' models.
        assert local["bytes"] * 8 == pytest.approx(every_step["bytes"], rel=0.01)
        assert by_run["sparse_loco", 8, seed]["bytes"] < local["bytes"]
    assert "largest: accuracy after 16 steps, 2 workers" in output


@pytest.mark.exhaustive
def test_delays_has_a_row_per_delay_and_seed(tmp_path):
    flags = ["--seeds=2", "--steps=16", "--periods=4", "--outers=mean"]
    rows, output = run("delays", tmp_path, *flags)
    delays = ["at once", "a quarter later", "a round later", "in 4 parts"]
    assert [row["way"].partition(",")[0] for row in rows] == [
        delay for delay in delays for _ in range(2)
    ]
    assert [row["seed"] for row in rows] == [0, 1] * 4
    assert all(row["value"] > 0.1 for row in rows)
    assert "in 4 parts" in output
