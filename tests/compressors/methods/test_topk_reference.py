"""`TopK` against NumPy."""

import numpy as np
import pytest

from tf_dgc.compressors import TopK
from tf_dgc.testing import Simulation


def test_by_hand():
    simulation = Simulation(TopK(0.5), [(4,)], 2)
    (total,) = simulation.step([[[1.0, -3.0, 2.0, 0.5]], [[0.25, 0.5, -1.0, 2.0]]])
    np.testing.assert_array_equal(total, [0.0, -3.0, 2.0 - 1.0, 2.0])
    np.testing.assert_array_equal(simulation.residual[0][0], [1.0, 0.0, 0.0, 0.5])
    (total,) = simulation.step([[[0.0] * 4], [[0.0] * 4]])
    np.testing.assert_array_equal(total, [1.0 + 0.25, 0.5, 0.0, 0.5])


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.999])
def test_equals_sorting(sparsity):
    rng = np.random.default_rng(0)
    simulation = Simulation(TopK(sparsity), [(20, 30)], 3, "float64")
    residual = np.zeros((3, 600))
    for _ in range(4):
        gradients = rng.normal(size=(3, 600))
        (total,) = simulation.step([[g.reshape(20, 30)] for g in gradients])
        residual += gradients
        sent = np.zeros_like(residual)
        for worker in range(3):
            k = max(1, round((1 - sparsity) * 600))
            chosen = np.argsort(-np.abs(residual[worker]))[:k]
            sent[worker, chosen] = residual[worker, chosen]
        residual -= sent
        np.testing.assert_allclose(total.ravel(), sent.sum(axis=0), rtol=1e-12)


def test_bytes():
    """A header of 5 words; 10 entries: 6 low bits each, high bits, float32 values."""
    simulation = Simulation(TopK(0.99), [(1000,)], 1)
    simulation.step([[np.arange(1000.0)]])
    low, high, values = 2, 1, 10  # 60 bits; 10 + (999 >> 6) = 25 bits; 10 floats
    assert simulation.sent_bytes == 4 * (5 + low + high + values)
