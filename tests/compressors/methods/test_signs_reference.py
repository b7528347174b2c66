"""`SignSGD` and `EFSignSGD` against NumPy."""

import numpy as np
import pytest

from tf_dgc.testing import Simulation


def test_majority_by_hand():
    simulation = Simulation("sign_sgd", [(4,)], 3)
    (total,) = simulation.step(
        [[[1.0, -5.0, 2.0, 1.0]], [[-9.0, -1.0, 3.0, 1.0]], [[0.5, 8.0, -1.0, 1e-9]]]
    )
    np.testing.assert_array_equal(total, [1.0, -1.0, 1.0, 1.0])


def test_tie_moves_nothing():
    simulation = Simulation("sign_sgd", [(2,)], 2)
    (total,) = simulation.step([[[1.0, 1.0]], [[-1.0, 3.0]]])
    np.testing.assert_array_equal(total, [0.0, 1.0])


def test_zeros_abstain():
    simulation = Simulation("sign_sgd", [(50,)], 2)
    (total,) = simulation.step([[np.zeros(50)], [np.linspace(-1, 1, 50)]])
    np.testing.assert_array_equal(total, np.sign(np.linspace(-1, 1, 50)))
    # Zeros in a vector that is not all zero vote at random.
    mixed = np.zeros(1000)
    mixed[0] = 1.0
    simulation = Simulation("sign_sgd", [(1000,)], 1)
    (total,) = simulation.step([[mixed]])
    assert abs(np.sum(total[1:])) < 5 * np.sqrt(1000)


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_majority(num_workers):
    gradients = np.random.default_rng(0).normal(size=(num_workers, 70))
    simulation = Simulation("sign_sgd", [(70,)], num_workers)
    (total,) = simulation.step([[g] for g in gradients])
    np.testing.assert_array_equal(total, np.sign(np.sign(gradients).sum(axis=0)))


def test_error_feedback_by_hand():
    """(1, -3) has magnitude 2: sent is (2, -2), and (-1, -1) stays."""
    simulation = Simulation("ef_sign_sgd", [(2,)], 1)
    (total,) = simulation.step([[[1.0, -3.0]]])
    np.testing.assert_array_equal(total, [2.0, -2.0])
    np.testing.assert_array_equal(simulation.residual[0][0], [-1.0, -1.0])
    (total,) = simulation.step([[[0.0, 2.0]]])  # -1, 1
    np.testing.assert_array_equal(total, [-1.0, 1.0])


def test_error_feedback():
    rng = np.random.default_rng(0)
    simulation = Simulation("ef_sign_sgd", [(9, 5)], 2, "float64")
    residual = np.zeros((2, 9, 5))
    for _ in range(4):
        gradients = rng.normal(size=(2, 9, 5))
        (total,) = simulation.step([[g] for g in gradients])
        residual += gradients
        scale = np.abs(residual).mean(axis=(1, 2), keepdims=True)
        sent = np.float32(scale) * np.where(residual < 0, -1.0, 1.0)
        residual -= sent
        np.testing.assert_allclose(total, sent.sum(axis=0), rtol=1e-6)


@pytest.mark.parametrize("name", ["sign_sgd", "ef_sign_sgd"])
def test_one_bit_per_entry(name):
    simulation = Simulation(name, [(3200,)], 1)
    simulation.step([[np.ones(3200)]])
    assert simulation.sent_bytes == 4 * (5 + 1) + 3200 // 8
