"""Every optimizer that `study/inner.py` trains by can be made and takes a step."""

import keras
import numpy as np
import pytest
from experiments.inner import INNER
from harness import Trainer, initial_weights, make_gradients

SHAPES = [(40, 30), (5,)]
RATE = 0.01


def trained(strategy, name, rate, start, steps=3):
    """Return what an optimizer makes of weights."""
    trainer = Trainer(strategy, lambda: INNER[name][0](rate), start)
    for gradients in make_gradients(2, steps, "float32", SHAPES):
        trainer.step(gradients)
    return trainer.weights()


@pytest.mark.parametrize("name", INNER)
def test_it_takes_a_step(strategies, name):
    decay = keras.optimizers.schedules.CosineDecay(RATE, 50)
    start = initial_weights("float32", SHAPES)
    found = trained(strategies[2], name, decay, start, steps=1)
    for mine, before in zip(found, start, strict=True):
        assert np.all(np.isfinite(mine))
        assert np.any(mine != before)


def test_two_adams_are_one(strategies):
    start = initial_weights("float32", SHAPES)
    found = [
        trained(strategies[2], name, RATE, start) for name in ("MultiOptimizer", "Adam")
    ]
    for mine, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.skipif("ScheduleFreeAdamW" not in INNER, reason="Keras has none")
def test_schedule_free_begins_at_its_first_step(strategies):
    """And not at the weights that it was built for, which are no run's."""
    start = initial_weights("float32", SHAPES)
    expected = trained(strategies[2], "ScheduleFreeAdamW", RATE, start)
    trainer = Trainer(
        strategies[2],
        lambda: INNER["ScheduleFreeAdamW"][0](RATE),
        [0 * w for w in start],
    )
    for variable, value in zip(trainer.variables, start, strict=True):
        variable.assign(value)
    for gradients in make_gradients(2, 3, "float32", SHAPES):
        trainer.step(gradients)
    for mine, other in zip(trainer.weights(), expected, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("name", ["Ftrl", "Adafactor"])
def test_weights_stay_what_they_are(strategies, name):
    """By Keras's defaults, of entries without gradients, and by a rate that is 0."""
    rate = keras.optimizers.schedules.CosineDecay(1e-3, 2)
    trainer = Trainer(
        strategies[2], lambda: INNER[name][0](rate), initial_weights("float32", SHAPES)
    )
    for workers in make_gradients(2, 4, "float32", SHAPES):
        for whole, _ in workers:
            whole[:4, :], whole[:, :4] = 0, 0
        trainer.step(workers)
    whole, _ = trainer.weights()
    start, _ = initial_weights("float32", SHAPES)
    assert np.all(np.isfinite(whole))
    np.testing.assert_allclose(whole[4:, 4:], start[4:, 4:], atol=0.05)
