"""The optimizer of every run of `study/adam.py` can be created and takes steps."""

import keras
import numpy as np
import pytest
from experiments import adam
from harness import Trainer, initial_weights, make_gradients
from selection import rows

RATE, DECAY = 0.01, 0.004
SHAPES = [(40, 30), (5,)]


def test_runs_keep_schedule_and_have_a_control(strategies):
    decay = keras.optimizers.schedules.CosineDecay(RATE, 50)
    for name, run in adam.RUNS.items():
        assert run.control in adam.RUNS
        assert "," not in name  # --runs is a comma-separated list
        with strategies[2].scope():
            optimizer = run.make(keras.optimizers.AdamW(decay, weight_decay=DECAY), 50)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        schedule = inner.get_config()["learning_rate"]["config"]
        initial, target = schedule["initial_learning_rate"], schedule["warmup_target"]
        assert (initial if target is None else target) == RATE, name
        assert inner.weight_decay == DECAY
        dtype = getattr(optimizer, "uncompressed_dtype", None) or "float32"
        assert run.uncompressed_dtype == dtype


@pytest.mark.parametrize("name", ["dense", "dgc 89 % mxfp4"])
def test_rate_warm_up_is_linear_then_decays(name):
    decay = keras.optimizers.schedules.CosineDecay(RATE, 100)
    rule = keras.optimizers.AdamW(decay, beta_2=0.98)
    optimizer = adam.RUNS[f"{name} rate warm-up"].make(rule, 100)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rates = [float(inner._learning_rate(step)) for step in range(101)]
    np.testing.assert_allclose(rates[:6], RATE * np.array([5, 9, 13, 17, 21, 25]) / 25)
    assert rates == [*rates[:5], *sorted(rates[5:], reverse=True)]
    np.testing.assert_allclose(rates[100], 0, atol=1e-9)
    assert inner.beta_2 == 0.98


@pytest.mark.parametrize("name", rows(adam.RUNS, ["dgc for steps"]))
def test_every_run_takes_steps(strategies, name):
    start = initial_weights("float32", SHAPES)
    decay = keras.optimizers.schedules.CosineDecay(RATE, 50)
    trainer = Trainer(
        strategies[2],
        lambda: adam.RUNS[name].make(keras.optimizers.AdamW(decay), 50),
        start,
    )
    for gradients in make_gradients(2, 2, "float32", SHAPES):
        trainer.step(gradients)
    for weights, initial in zip(trainer.weights(), start, strict=True):
        assert np.all(np.isfinite(weights))
        assert np.any(weights != initial)
