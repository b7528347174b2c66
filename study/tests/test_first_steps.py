"""The runs of `study/first_steps.py`, and its tables."""

import keras
import numpy as np
import pytest
from common import resumable
from experiments import first_steps
from experiments.first_steps import RUNS, FirstSteps, Rising, Run
from tasks import recipes
from test_evidence_runs import Largest, actions

import tf_dgc

RECIPE = recipes.Recipe(batch_size=8, rate=0.5, stages=((0.5, 0.1),))


def test_rising_rate_is_linear_then_the_recipes():
    rising = Rising(RECIPE.schedule(200), 20)
    rates = [float(rising(step)) for step in (0, 9, 19, 20, 99, 101)]
    assert rates == pytest.approx([0.025, 0.25, 0.5, 0.5, 0.5, 0.05])


def test_runs_have_the_expected_optimizers():
    optimizers = {name: run.make(RECIPE, 200) for name, run in RUNS.items()}
    assert type(optimizers["dense"]) is keras.optimizers.SGD
    assert type(optimizers["dense rising"]._learning_rate) is Rising
    assert type(optimizers["dgc"]) is tf_dgc.DGCOptimizer
    assert optimizers["dgc rising"].sparsity == pytest.approx(0.925)
    early = optimizers["dgc 75 % early rising"]
    assert type(early.inner_optimizer._learning_rate) is Rising
    values = [float(early.sparsity(step)) for step in (0, 9, 10, 199)]
    assert values == pytest.approx([0.75, 0.75, 0.925, 0.925])
    assert early.value_dtype == "mxfp4"


def test_differences_are_paired_by_seed():
    values = {
        "dense": [0.9, 0.8, 0.7],
        "dgc": [0.8, 0.8, 0.6],
        "dense rising": [0.95, 0.85],
    }
    rows = [
        {
            "task": "mnist",
            "method": method,
            "steps": 300,
            "workers": 4,
            "tuning": True,
            "seed": seed,
            "metric": "accuracy",
            "value": value,
            "loss": 2 * value,
            "bytes_per_step": 100.0 + seed,
        }
        for method, by_seed in values.items()
        for seed, value in enumerate(by_seed)
    ]
    ((title, (dense, rising, dgc), _),) = first_steps.tables(rows)
    assert title == "mnist: accuracy after 300 steps, 4 workers, data held back"
    assert (dense["seeds"], rising["seeds"], dgc["seeds"]) == (3, 2, 3)
    assert dense["difference"] is dense["half_width"] is rising["to_rising"] is None
    assert dense["to_rising"] == pytest.approx(-0.05)
    assert dgc["difference"] == pytest.approx(-0.2 / 3)
    error = (0.01 / 3) ** 0.5 / 3**0.5  # of -0.1, 0 and -0.1
    assert dgc["half_width"] == pytest.approx(4.30265 * error, rel=1e-5)
    assert dgc["to_rising"] == pytest.approx(-0.1)
    assert dgc["loss"] == pytest.approx(2 * 2.2 / 3)
    assert dgc["bytes_per_step"] == 101.0


@pytest.fixture
def task(monkeypatch):
    actions.clear()
    monkeypatch.setitem(recipes.RECIPES, "largest", RECIPE)
    return Largest(None)


@pytest.mark.slow
def test_interrupted_run_equals_a_whole_one(tmp_path, strategies, task):
    def finish(checkpoint):
        name = "dgc 75 % early rising"
        return Run(task, name, 3, 24, strategies[2], checkpoint).finish()

    def interrupt():
        raise KeyboardInterrupt

    expected = finish(resumable.RunCheckpoint(None))
    path = tmp_path / "run.npz"
    actions[14] = interrupt
    with pytest.raises(KeyboardInterrupt):
        finish(resumable.RunCheckpoint(path, every=0.0))
    assert finish(resumable.RunCheckpoint(path)) == expected
    assert [p["step"] for p in expected["curve"]] == list(range(3, 25, 3))
    assert expected["value"] == expected["curve"][-1]["value"] > 1 / 16
    assert np.isfinite(expected["loss"])
    assert 0 < expected["bytes_per_step"] < 4 * (16 * 64 + 64 * 16)


def test_early_sparsity_applies_to_the_first_steps_only():
    """Later steps send at most a quarter of the entries."""
    optimizer = FirstSteps(early=0.5).make(RECIPE, 40)
    assert [float(optimizer.sparsity(step)) for step in (1, 2)] == [0.5, 0.75]
