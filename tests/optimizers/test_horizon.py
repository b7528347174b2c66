"""`dgc_for_steps` is `DGCOptimizer` with settings for the length of a run."""

import keras
import numpy as np
import pytest
from contract import round_trip
from harness import Trainer, initial_weights, make_gradients

import tf_dgc

SHAPES = [(60, 50), (50,)]
STEPS = 8


def train(strategy, make):
    trainer = Trainer(strategy, make, initial_weights("float32", SHAPES))
    for gradients in make_gradients(2, STEPS, "float32", SHAPES):
        trainer.step(gradients)
    return trainer


def test_it_is_dgc_with_these_settings(strategies):
    settings = {
        "factor_masking": False,
        "value_dtype": "mxfp4",
        "exempt_dtype": "mxint8",
    }
    steps = 200
    mine, expected = (
        train(strategies[2], lambda make=make: make(keras.optimizers.SGD(0.1, 0.9)))
        for make in (
            lambda sgd: tf_dgc.dgc_for_steps(sgd, steps),
            lambda sgd: tf_dgc.DGCOptimizer(sgd, 0.925, **settings),
        )
    )
    assert mine.optimizer.stats == expected.optimizer.stats
    assert mine.optimizer.stats.entries_per_step == 225 + 50
    for a, b in zip(mine.weights(), expected.weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_settings_are_those_that_are_given():
    schedule = tf_dgc.schedules.WarmupSparsity(4)
    made = tf_dgc.dgc_for_steps("sgd", 300, sparsity=schedule, value_dtype=None)
    again = round_trip(made)
    assert type(again) is tf_dgc.DGCOptimizer
    assert again.get_config() == made.get_config()
    assert again.sparsity.warmup_steps == 4
    assert again.value_dtype is None
    assert again.exempt_dtype == "mxint8"


@pytest.mark.parametrize("steps", [0, 2.5, "many", True])
def test_bad_steps(steps):
    with pytest.raises(ValueError, match="`steps` must be a whole number of training"):
        tf_dgc.dgc_for_steps("sgd", steps)


@pytest.mark.parametrize(
    ("calls", "sparsity"), [(None, 1 - 15 / 1600), (8, 1 - 15 / 200), (4000, 0.75)]
)
def test_calls_that_make_no_step_do_not_count(calls, sparsity):
    """As many calls make a step, an entry is sent 15 times all the same."""
    sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=calls)
    assert tf_dgc.dgc_for_steps(sgd, 1600).sparsity == pytest.approx(sparsity)
