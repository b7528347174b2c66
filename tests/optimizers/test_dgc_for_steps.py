"""`dgc_for_steps`: a `DGCOptimizer` with settings for the length of a run."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from contract import round_trip
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc.schedules import (
    PiecewiseConstantPeriod,
    PiecewiseConstantSparsity,
    WarmupSparsity,
    for_steps,
)

SHAPES = [(60, 50), (50,)]
STEPS = 12  # 10 of 200 are early


def train(strategy, make):
    trainer = Trainer(strategy, make, initial_weights("float32", SHAPES))
    for gradients in make_gradients(2, STEPS, "float32", SHAPES):
        trainer.step(gradients)
    return trainer


def test_equals_dgc_with_its_settings(strategies):
    settings = {
        "corrections": tf_dgc.Corrections(factor_masking=False),
        "value_dtype": "mxfp4",
        "uncompressed_dtype": "mxint8",
    }
    steps, early = 200, 10
    assert early < STEPS
    sparsity = PiecewiseConstantSparsity([early], [0.75, 0.925])

    def make_sgd():
        return keras.optimizers.SGD(0.1, 0.9)

    trainer = train(strategies[2], lambda: tf_dgc.dgc_for_steps(make_sgd(), steps))
    expected = train(
        strategies[2], lambda: tf_dgc.DGCOptimizer(make_sgd(), sparsity, **settings)
    )
    assert trainer.optimizer.stats == expected.optimizer.stats
    assert trainer.optimizer.stats.entries_per_step == 225 + 50
    for a, b in zip(trainer.weights(), expected.weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_passed_settings_are_used():
    schedule = tf_dgc.schedules.WarmupSparsity(4)
    optimizer = tf_dgc.dgc_for_steps("sgd", 300, sparsity=schedule, value_dtype=None)
    again = round_trip(optimizer)
    assert type(again) is tf_dgc.DGCOptimizer
    assert again.get_config() == optimizer.get_config()
    assert again.sparsity.warmup_steps == 4
    assert again.value_dtype is None
    assert again.uncompressed_dtype == "mxint8"


@pytest.mark.parametrize("steps", [0, 2.5, "many", True])
def test_bad_steps(steps):
    with pytest.raises(ValueError, match="must be a whole number of training steps, 1"):
        tf_dgc.dgc_for_steps("sgd", steps)


@pytest.mark.parametrize(
    "make",
    [
        lambda steps: tf_dgc.dgc_for_steps("sgd", steps),
        for_steps,
        WarmupSparsity,
        lambda steps: PiecewiseConstantSparsity([steps], [0.5, 0.9]),
        lambda steps: PiecewiseConstantPeriod([10, steps], [1, 2, 4]),
        lambda steps: tf_dgc.post_local_sgd("sgd", steps),
        lambda steps: tf_dgc.local_sgd("sgd", steps),
        lambda steps: tf_dgc.compressors.LGC(learning_steps=steps),
    ],
)
def test_steps_computed_from_an_unknown_length_are_refused(make):
    """TensorFlow's negative cardinalities are recognized."""
    unknown = tf.data.Dataset.range(8).filter(lambda _: True)
    for data, epochs in ((unknown, 4), (tf.data.Dataset.range(8).repeat(), 3)):
        steps = epochs * int(data.cardinality())
        with pytest.raises(ValueError, match="of unknown length") as error:
            make(steps)
        assert "Pass the number itself, `epochs * steps_per_epoch`" in str(error.value)
        assert re.search(rf"Received: \w+=.*{steps}", str(error.value))


def sparsities(optimizer, steps):
    schedule = optimizer.sparsity
    return [float(schedule(tf.constant(step, tf.int64))) for step in steps]


@pytest.mark.parametrize(
    ("steps", "early"), [(61, 3), (300, 15), (2000, 100), (15_000, 100)]
)
def test_the_first_steps_of_an_sgd_send_more(steps, early):
    optimizer = tf_dgc.dgc_for_steps(keras.optimizers.SGD(0.1), steps)
    last = for_steps(steps)
    values = sparsities(optimizer, [0, early - 1, early, steps])
    assert values == pytest.approx([0.75, 0.75, last, last])
    assert optimizer.sparsity.final == last


def test_other_optimizers_and_short_runs_have_a_constant_sparsity():
    adam = tf_dgc.dgc_for_steps(keras.optimizers.AdamW(0.001), 300)
    few = tf_dgc.dgc_for_steps(keras.optimizers.SGD(0.1), 60)
    assert adam.sparsity == for_steps(300)
    assert few.sparsity == 0.75


@pytest.mark.parametrize("calls", [None, 8, 4000])
def test_calls_that_only_accumulate_do_not_count(calls):
    """Sparsity follows from the number of optimizer steps."""
    adam = keras.optimizers.Adam(0.1, gradient_accumulation_steps=calls)
    steps = max(1, 1600 // (calls or 1))
    assert tf_dgc.dgc_for_steps(adam, 1600).sparsity == for_steps(steps)


def test_first_steps_are_optimizer_steps(strategies):
    """8 calls make a step, and 4 of its 80 steps are early."""

    def make():
        sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=8)
        return tf_dgc.dgc_for_steps(sgd, 640, uncompressed_dtype=None)

    trainer = Trainer(strategies[2], make, initial_weights("float32", [(50, 50)]))
    sent = []
    for gradients in make_gradients(2, 6 * 8, "float32", [(50, 50)]):
        trainer.step(gradients)
        sent.append(trainer.optimizer.stats.entries_per_step)
    last = round(2500 * 15 / 80)
    assert sent[7::8] == [625] * 4 + [last] * 2
