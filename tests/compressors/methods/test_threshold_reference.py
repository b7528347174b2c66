"""`Threshold` against NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from selection import in_turn, rows

import tf_dgc
from tf_dgc.compressors import Threshold
from tf_dgc.testing import Simulation


def test_by_hand():
    simulation = Simulation(Threshold(1.0, capacity=1.0), [(4,)], 2)
    (total,) = simulation.step([[[0.5, -1.0, 2.0, -0.75]], [[0.5, 0.5, -3.0, 1.25]]])
    np.testing.assert_array_equal(total, [0.0, -1.0, 2.0 - 3.0, 1.25])
    np.testing.assert_array_equal(simulation.residual[0][0], [0.5, 0.0, 0.0, -0.75])
    (total,) = simulation.step([[[0.5, 0.0, 0.0, 0.5]], [[0.0] * 4]])
    np.testing.assert_array_equal(total, [1.0, 0.0, 0.0, 0.0])


def test_strom_by_hand():
    """One threshold is sent per entry, whatever its size."""
    simulation = Simulation(Threshold(0.5, capacity=1.0, binary=True), [(4,)], 1)
    (total,) = simulation.step([[[0.25, -0.5, 2.0, -1.75]]])
    np.testing.assert_array_equal(total, [0.0, -0.5, 0.5, -0.5])
    np.testing.assert_array_equal(simulation.residual[0][0], [0.25, 0.0, 1.5, -1.25])
    (total,) = simulation.step([[[0.0] * 4]])
    np.testing.assert_array_equal(total, [0.0, 0.0, 0.5, -0.5])


def test_entries_beyond_the_capacity_stay_in_the_residual():
    simulation = Simulation(Threshold(0.5, capacity=0.5), [(4,)], 1)
    (total,) = simulation.step([[[1.0, -3.0, 2.0, 0.5]]])
    np.testing.assert_array_equal(total, [0.0, -3.0, 2.0, 0.0])
    np.testing.assert_array_equal(simulation.residual[0][0], [1.0, 0.0, 0.0, 0.5])


@pytest.mark.parametrize(
    ("threshold", "binary"), in_turn([0.5, 2.0, 100.0], [False, True])
)
def test_equals_loops(threshold, binary):
    rng = np.random.default_rng(0)
    simulation = Simulation(Threshold(threshold, 0.2, binary), [(20, 30)], 3, "float64")
    residual = np.zeros((3, 600))
    for _ in range(4):
        gradients = rng.normal(size=(3, 600))
        (total,) = simulation.step([[g.reshape(20, 30)] for g in gradients])
        residual += gradients
        sent = np.zeros_like(residual)
        for worker in range(3):
            row = residual[worker]
            large = [i for i in range(600) if abs(row[i]) >= threshold]
            for i in sorted(large, key=lambda i: -abs(row[i]))[:120]:
                sent[worker, i] = np.sign(row[i]) * threshold if binary else row[i]
        residual -= sent
        np.testing.assert_allclose(total.ravel(), sent.sum(axis=0), rtol=1e-12)


@pytest.mark.parametrize("keys_per_tensor", rows([50, 200], [50]))
def test_positions_are_chosen_evenly(keys_per_tensor):
    """A deviation of 5 standard deviations has a probability of 6e-7."""
    simulation = Simulation(Threshold(0.5, 0.25), [(20,)] * keys_per_tensor, 1)
    simulation.step([[np.ones(20)] * keys_per_tensor])
    sent = np.stack(simulation.sent[0]) != 0
    np.testing.assert_allclose(
        sent.mean(axis=0), 0.25, atol=5 * np.sqrt(0.25 * 0.75 / keys_per_tensor)
    )


def test_counts_entries():
    """1 to 9 reach the threshold; 5 of them fit, and 4 stay for the next step."""
    optimizer = tf_dgc.CompressedOptimizer(
        keras.optimizers.SGD(1.0), Threshold(1.0, 0.5), min_compress_size=0
    )
    variable = keras.Variable(np.zeros((2, 5)))
    gradient = tf.reshape(tf.range(10.0), (2, 5))
    for count in (5, 4, 0):
        optimizer.apply([gradient], [variable])
        assert optimizer.stats.entries_per_step == count
        gradient = tf.zeros((2, 5))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, 10),  # ten float32
        ({"value_dtype": "float16"}, 5),
        ({"binary": True}, 2),  # the threshold, and 10 signs
    ],
)
def test_bytes(settings, words):
    """10 places among 1000 + 10: 6 low bits each, 10 + (1009 >> 6) high bits."""
    simulation = Simulation(Threshold(1.0, 0.01, **settings), [(1000,)], 1)
    simulation.step([[np.ones(1000)]])
    assert simulation.sent_bytes == 4 * (5 + 2 + 1 + words)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 0.0}, "threshold=0.0"),
        ({"threshold": float("inf")}, "threshold=inf"),
        ({"capacity": 0.0}, "capacity=0.0"),
        ({"capacity": 1.5}, "capacity=1.5"),
        ({"value_dtype": "sign"}, "value_dtype='sign'"),
        ({"value_dtype": "int8"}, "value_dtype='int8'"),
        ({"binary": True, "value_dtype": "float16"}, "must be None"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Threshold(**settings)
