"""The optimizers of `study/inner_optimizers.py` can be created and take steps."""

import keras
import numpy as np
import pytest
from experiments.inner_optimizers import INNER
from harness import Trainer, initial_weights, make_gradients

SHAPES = [(40, 30), (5,)]
RATE = 0.01


def train(strategy, name, rate, initial, steps=3):
    """Return the weights after some steps."""
    trainer = Trainer(strategy, lambda: INNER[name][0](rate), initial)
    for gradients in make_gradients(2, steps, "float32", SHAPES):
        trainer.step(gradients)
    return trainer.weights()


@pytest.mark.parametrize("name", INNER)
def test_optimizer_takes_a_step(strategies, name):
    decay = keras.optimizers.schedules.CosineDecay(RATE, 50)
    initial = initial_weights("float32", SHAPES)
    result = train(strategies[2], name, decay, initial, steps=1)
    for weights, initial_value in zip(result, initial, strict=True):
        assert np.all(np.isfinite(weights))
        assert np.any(weights != initial_value)


def test_multi_optimizer_of_two_adams_equals_adam(strategies):
    initial = initial_weights("float32", SHAPES)
    results = [
        train(strategies[2], name, RATE, initial) for name in ("MultiOptimizer", "Adam")
    ]
    for weights, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(weights, expected)


@pytest.mark.skipif("ScheduleFreeAdamW" not in INNER, reason="Keras has none")
def test_schedule_free_starts_from_weights_of_the_first_step(strategies):
    """Not from the weights at `build`."""
    initial = initial_weights("float32", SHAPES)
    result = train(strategies[2], "ScheduleFreeAdamW", RATE, initial)
    trainer = Trainer(
        strategies[2],
        lambda: INNER["ScheduleFreeAdamW"][0](RATE),
        [0 * w for w in initial],
    )
    for variable, value in zip(trainer.variables, initial, strict=True):
        variable.assign(value)
    for gradients in make_gradients(2, 3, "float32", SHAPES):
        trainer.step(gradients)
    for weights, expected in zip(trainer.weights(), result, strict=True):
        np.testing.assert_array_equal(weights, expected)


@pytest.mark.parametrize("name", ["Ftrl", "Adafactor"])
def test_weights_without_gradients_stay_finite_and_near(strategies, name):
    """Keras's defaults fail here: entries without gradients, and a rate of 0."""
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
