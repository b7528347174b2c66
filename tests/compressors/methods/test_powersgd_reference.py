"""`PowerSGD` against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dgc.compressors import PowerSGD, RandomKeys
from tf_dgc.testing import Simulation


@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_equals_algorithm_1(rank, warm_start):
    rng = np.random.default_rng(0)
    shape, matrix = (3, 4, 15), (12, 15)
    simulation = Simulation(PowerSGD(rank, warm_start), [shape], 3, "float64", seed=5)
    assert list(simulation.state[0][0]) == (["q"] if warm_start else [])
    q = simulation.state[0][0].get("q")
    residual = np.zeros((3, *matrix))
    for step in range(4):
        if not warm_start:
            seed = RandomKeys(5, tf.constant(step), 0, 0).shared()
            q = tf.random.stateless_normal([15, rank], seed, dtype="float64").numpy()
        gradients = rng.normal(size=(3, *shape))
        (total,) = simulation.step([[g] for g in gradients])
        residual += gradients.reshape(3, *matrix)
        basis, _ = np.linalg.qr(residual.sum(axis=0) @ q)
        factors = [m.T @ basis for m in residual]
        q = sum(factors)
        np.testing.assert_allclose(total.reshape(matrix), basis @ q.T, atol=1e-10)
        residual -= [basis @ factor.T for factor in factors]


def test_low_rank_matrix_is_exact():
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(20, 2)) @ rng.normal(size=(2, 30))
    simulation = Simulation(PowerSGD(2), [(20, 30)], 2, "float64")
    (total,) = simulation.step([[matrix], [matrix]])
    np.testing.assert_allclose(total, 2 * matrix, atol=1e-10)


def test_warm_start_finds_the_largest_singular_values():
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(20, 30))
    simulation = Simulation(PowerSGD(3), [(20, 30)], 1, "float64", False)
    for _ in range(100):
        (total,) = simulation.step([[matrix]])
    u, s, v = np.linalg.svd(matrix)
    np.testing.assert_allclose(total, u[:, :3] * s[:3] @ v[:3], atol=1e-3)


def test_without_warm_start_the_error_stays():
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(20, 30))
    errors = {}
    for warm_start in (True, False):
        method = PowerSGD(3, warm_start)
        simulation = Simulation(method, [(20, 30)], 1, "float64", False)
        totals = [simulation.step([[matrix]])[0] for _ in range(30)]
        errors[warm_start] = [np.linalg.norm(t - matrix) for t in totals]
    best = np.linalg.norm(np.linalg.svd(matrix)[1][3:])
    assert errors[True][-1] < 1.01 * best
    assert min(errors[False]) > 1.03 * best


def test_contribution_of_a_worker_is_its_projection():
    """Contribution and residual are orthogonal."""
    rng = np.random.default_rng(0)
    simulation = Simulation(PowerSGD(2), [(12, 15)], 2, "float64")
    gradients = rng.normal(size=(2, 12, 15))
    (total,) = simulation.step([[g] for g in gradients])
    basis = np.linalg.svd(total)[0][:, :2]
    for worker, gradient in enumerate(gradients):
        sent = simulation.sent[worker][0]
        residual = simulation.residual[worker][0]
        np.testing.assert_allclose(sent, basis @ (basis.T @ gradient), atol=1e-10)
        np.testing.assert_allclose(np.sum(sent * residual), 0, atol=1e-10)


def test_recovers_after_a_gradient_of_zero():
    simulation = Simulation(PowerSGD(1), [(5, 6)], 1, "float64")
    simulation.step([[np.zeros((5, 6))]])
    for _ in range(30):
        (total,) = simulation.step([[np.ones((5, 6))]])
    assert np.all(total > 0.9)


def test_bytes():
    for shape, entries in (
        ((50, 40), 4 * 90),
        ((5, 40), 4 * 45),
        ((3, 3), 9),
        ((9,), 9),
    ):
        simulation = Simulation("power_sgd", [shape], 1)
        simulation.step([[np.ones(shape)]])
        flags = 8 if entries in {360, 180} else 4  # one per round
        assert simulation.sent_bytes == 4 * entries + flags
