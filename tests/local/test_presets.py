"""Presets of local steps against NumPy, with the settings of their papers."""

import itertools

import keras
import numpy as np
import pytest
from chunked_reference import reference
from contract import round_trip
from harness import Trainer, initial_weights, make_gradients
from local_reference import AdamW, LocalRun, Momentum
from selection import rows

import tf_dgc

O = keras.optimizers  # noqa: E741
SHAPES = [(12, 10), (5,)]
PRESETS = {
    "local_sgd": (
        lambda: tf_dgc.local_sgd(O.SGD(0.125, momentum=0.5), 3),
        LocalRun(Momentum(0.125, 0.5), 3),
    ),
    "post_local_sgd": (
        lambda: tf_dgc.post_local_sgd(O.SGD(0.125, momentum=0.5), 2, 3),
        LocalRun(Momentum(0.125, 0.5), lambda step: 1 if step < 2 else 3),
    ),
    "diloco": (
        lambda: tf_dgc.diloco(period=3),
        LocalRun(AdamW(4e-4, 0.1), 3, Momentum(0.7, 0.9, nesterov=True)),
    ),
}


@pytest.mark.parametrize(
    ("name", "num_workers"),
    rows(
        itertools.product(PRESETS, [1, 3, 5, 8]), [*itertools.product(PRESETS, [1, 3])]
    ),
)
def test_rounds_equal_the_reference(strategies, name, num_workers):
    make_optimizer, reference = PRESETS[name]
    weights = initial_weights(shapes=SHAPES)
    trainer = Trainer(strategies[num_workers], make_optimizer, weights)
    run = reference.start(weights, num_workers)
    for gradients in make_gradients(num_workers, 7, shapes=SHAPES):
        trainer.step(gradients)
        run.step(gradients)
    for copies, *expected in zip(trainer.replica_weights(), *run.weights, strict=True):
        for copy, value in zip(copies, expected, strict=True):
            # Keras stores learning rates and betas as float32.
            np.testing.assert_allclose(copy, value, rtol=1e-6, atol=1e-7)
    assert trainer.optimizer.stats.steps == run.rounds


@pytest.mark.parametrize("name", PRESETS)
def test_config_round_trip(name):
    optimizer = PRESETS[name][0]()
    restored = round_trip(optimizer)
    assert type(restored) is tf_dgc.LocalOptimizer
    assert restored.get_config() == optimizer.get_config()


def test_sparse_loco(strategies):
    """`test_chunkedtopk_reference.py` checks the method's selection."""
    weights = initial_weights(shapes=[(80, 70)])
    steps = make_gradients(2, 6, shapes=[(80, 70)])
    trainer = Trainer(strategies[2], lambda: tf_dgc.sparse_loco(period=2), weights)
    run = LocalRun(AdamW(4e-4, 0.004), 2, compress=largest_of_chunks, decay=0.95)
    run = run.start(weights, 2)
    for gradients in steps:
        trainer.step(gradients)
        run.step(gradients)
    residual = [worker[0] for worker in trainer.local(trainer.optimizer.residual)]
    expected = [worker[0] for worker in run.residual]
    np.testing.assert_allclose(residual, expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(trainer.weights()[0], run.anchor[0], atol=1e-7)
    assert trainer.optimizer.stats.entries_per_step == 64 + 24


def largest_of_chunks(values):
    return reference(values.ravel(), 4096, 64).reshape(values.shape)


def test_settings_are_passed_to_the_optimizer():
    outer = O.SGD(0.5)
    optimizer = tf_dgc.diloco("adam", 7, outer=outer, compressor="float16")
    assert optimizer.period == 7
    assert optimizer.outer_optimizer.learning_rate.numpy() == 0.5
    assert optimizer.compressor.name == "float16"
    with pytest.raises(ValueError, match="`begin` must be a whole number"):
        tf_dgc.post_local_sgd("sgd", 0)


def test_decay_is_used_or_raises():
    assert tf_dgc.sparse_loco(decay=0.5).compressor.decay == 0.5
    assert tf_dgc.sparse_loco(compressor="top_k").compressor.name == "top_k"
    with pytest.raises(ValueError, match="Pass it to yours"):
        tf_dgc.sparse_loco(decay=0.5, compressor="top_k")
