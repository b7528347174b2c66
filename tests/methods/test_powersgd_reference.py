"""`PowerSGD` against NumPy."""

import numpy as np
import pytest

from tf_dgc.compressors import PowerSGD
from tf_dgc.compressors.simulate import Simulation


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_equals_algorithm_1(rank):
    rng = np.random.default_rng(0)
    shape, matrix = (3, 4, 15), (12, 15)
    simulation = Simulation(PowerSGD(rank), [shape], 3, "float64")
    q = simulation.state[0][0]["q"]
    residual = np.zeros((3, *matrix))
    for _ in range(4):
        gradients = rng.normal(size=(3, *shape))
        (total,) = simulation.step([[g] for g in gradients])
        residual += gradients.reshape(3, *matrix)
        basis, _ = np.linalg.qr(residual.sum(axis=0) @ q)
        each = [m.T @ basis for m in residual]
        q = sum(each)
        np.testing.assert_allclose(total.reshape(matrix), basis @ q.T, atol=1e-10)
        residual -= [basis @ one.T for one in each]


def test_a_matrix_of_low_rank_arrives_exactly():
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


def test_leaves_zero_again():
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
