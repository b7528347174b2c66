"""`SBC` against NumPy."""

import math

import numpy as np
import pytest
import tensorflow as tf
from selection import rows

from tf_dgc.compressors import SBC
from tf_dgc.testing import Simulation


def test_by_hand():
    """With k = 2, mu+ is 3 and mu- is 4.25, so the negative entries are sent."""
    simulation = Simulation(SBC(0.6), [(5,)], 1)
    (total,) = simulation.step([[[5.0, 1.0, -4.0, -4.5, 0.5]]])
    np.testing.assert_array_equal(total, [0.0, 0.0, -4.25, -4.25, 0.0])
    residual = [5.0, 1.0, 0.25, -0.25, 0.5]
    np.testing.assert_array_equal(simulation.residual[0][0], residual)
    (total,) = simulation.step([[[0.0] * 5]])
    np.testing.assert_array_equal(total, [3.0, 3.0, 0.0, 0.0, 0.0])


def test_fewer_positive_entries_than_k():
    """Negative entries are not sent as positive ones, nor counted in the mean."""
    simulation = Simulation(SBC(0.25), [(4,)], 1, "float64")
    (total,) = simulation.step([[[1.0, -0.125, -0.25, -0.0625]]])
    np.testing.assert_array_equal(total, [1.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.999])
def test_equals_sorting(sparsity):
    rng = np.random.default_rng(0)
    simulation = Simulation(SBC(sparsity), [(20, 30)], 3, "float64")
    residual = np.zeros((3, 600))
    k = max(1, round((1 - sparsity) * 600))
    for _ in range(4):
        gradients = rng.normal(size=(3, 600))
        (total,) = simulation.step([[g.reshape(20, 30)] for g in gradients])
        residual += gradients
        sent = np.zeros_like(residual)
        for worker, row in enumerate(residual):
            order = np.argsort(row)
            high = [i for i in order[-k:] if row[i] > 0]
            low = [i for i in order[:k] if row[i] < 0]
            up, down = row[high].mean(), -row[low].mean()
            if up >= down:
                sent[worker, high] = np.float32(up)
            else:
                sent[worker, low] = -np.float32(down)
        residual -= sent
        np.testing.assert_allclose(total.ravel(), sent.sum(axis=0), rtol=1e-6)


@pytest.mark.parametrize("keys_per_tensor", rows([50, 200], [50]))
def test_exactly_k_of_equal_entries_are_chosen_evenly(keys_per_tensor):
    """A deviation of 5 standard deviations has a probability of 6e-7."""
    simulation = Simulation(SBC(0.75), [(20,)] * keys_per_tensor, 1)
    simulation.step([[-np.ones(20)] * keys_per_tensor])
    sent = np.stack(simulation.sent[0])
    np.testing.assert_array_equal(sent.sum(axis=1), -5.0)
    np.testing.assert_allclose(
        (sent != 0).mean(axis=0), 0.25, atol=5 * np.sqrt(0.25 * 0.75 / keys_per_tensor)
    )


def test_bytes():
    """10 positions of 1000: 6 low bits each, 10 + (999 >> 6) high bits; one value."""
    simulation = Simulation(SBC(0.99), [(1000,)], 1)
    simulation.step([[np.arange(1000.0)]])
    assert simulation.sent_bytes == 4 * (5 + 2 + 1 + 1)


@pytest.mark.parametrize(
    ("p", "golomb", "here"), [(0.001, 11.5, 12.0), (0.01, 8.1, 8.6)]
)
def test_bits_per_position_match_the_docstring(p, golomb, here):
    phi = (math.sqrt(5) + 1) / 2
    b = 1 + math.floor(math.log2(math.log(phi - 1) / math.log(1 - p)))
    assert b + 1 / (1 - (1 - p) ** 2**b) == pytest.approx(golomb, abs=0.05)
    size = 10**7
    bits = 8 * SBC(1 - p).bytes((size,), tf.float32) / (p * size)
    assert bits == pytest.approx(here, abs=0.06)
