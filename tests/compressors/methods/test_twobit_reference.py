"""`TwoBit` against a test of MXNet, and NumPy."""

import numpy as np
import pytest

from tf_dgc.compressors import TwoBit
from tf_dgc.testing import Simulation


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mxnet_case(dtype):
    """7 workers push equal gradients, and the server adds `rate * sum` to the weight.

    Each time the threshold is reached, the weight moves by 7 * 0.5 * 2.
    """
    workers, rate, t = 7, 2, 0.5
    simulation = Simulation(TwoBit(t), [(3, 5)], workers, dtype)
    weight, weights = 0.0, []
    for push in (0, 0.4, t - 0.4, 0.2, t - 0.2, t):
        (total,) = simulation.step([[np.full((3, 5), push)]] * workers)
        weight = weight + rate * total
        assert np.ptp(weight) == 0
        weights.append(weight[0, 0])
    assert weights == [0, 0, 7, 7, 14, 21]
    assert not any(np.any(worker[0]) for worker in simulation.residual)


def test_by_hand():
    """An entry at or above the threshold is sent as the threshold."""
    simulation = Simulation(TwoBit(0.25), [(6,)], 1)
    values = [0.25, -0.25, 0.125, -0.125, 1.0, -3.0]
    (total,) = simulation.step([[values]])
    np.testing.assert_array_equal(total, [0.25, -0.25, 0, 0, 0.25, -0.25])
    residual = [0, 0, 0.125, -0.125, 0.75, -2.75]
    np.testing.assert_array_equal(simulation.residual[0][0], residual)
    (total,) = simulation.step([[[0.0, 0.0, 0.125, 0.0, 0.0, 0.0]]])
    np.testing.assert_array_equal(total, [0, 0, 0.25, 0, 0.25, -0.25])


def test_equals_the_rule():
    rng = np.random.default_rng(0)
    t = 0.7
    simulation = Simulation(TwoBit(t), [(9, 7)], 3, "float64")
    residual = np.zeros((3, 9, 7))
    for _ in range(5):
        gradients = rng.normal(size=(3, 9, 7))
        (total,) = simulation.step([[g] for g in gradients])
        residual += gradients
        sent = t * np.sign(residual) * (np.abs(residual) >= t)
        residual -= sent
        np.testing.assert_allclose(total, sent.sum(axis=0), atol=1e-15)
        for expected, (result,) in zip(residual, simulation.residual, strict=True):
            np.testing.assert_array_equal(result, expected)


def test_two_bits_per_entry():
    simulation = Simulation(TwoBit(), [(3200,)], 1)
    simulation.step([[np.ones(3200)]])
    assert simulation.sent_bytes == 4 * 5 + 2 * 3200 // 8


@pytest.mark.parametrize("threshold", [0, -1.0, np.inf, np.nan])
def test_bad_threshold(threshold):
    with pytest.raises(ValueError, match="`threshold` must be a finite number above 0"):
        TwoBit(threshold)
