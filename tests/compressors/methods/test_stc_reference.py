"""`STC` against NumPy."""

import numpy as np
import pytest
from selection import in_turn

from tf_dgc.compressors import STC
from tf_dgc.testing import Simulation


def ternary(row, k, chosen=None):
    sent = np.zeros_like(row)
    if chosen is None:
        chosen = np.argsort(-np.abs(row))[:k]
    sent[chosen] = np.sign(row[chosen]) * np.float32(np.abs(row[chosen]).mean())
    return sent


def test_by_hand():
    simulation = Simulation(STC(0.5), [(4,)], 1)
    (total,) = simulation.step([[[1.0, -3.0, 2.0, 0.5]]])
    np.testing.assert_array_equal(total, [0.0, -2.5, 2.5, 0.0])
    np.testing.assert_array_equal(simulation.residual[0][0], [1.0, -0.5, -0.5, 0.5])
    (total,) = simulation.step([[[0.0] * 4]])
    np.testing.assert_array_equal(np.abs(total).sum(), 1.5)


def test_downstream_by_hand():
    """A server would send the 2 largest entries of the sum."""
    simulation = Simulation(STC(0.5, downstream=True), [(4,)], 2)
    (total,) = simulation.step(
        [[[4.0, 0.5, -4.0, 0.0]], [[0.0, 2.0, 1.5, 0.0]]],
    )
    # Sent: (4, 0, -4, 0) and (0, 1.75, 1.75, 0).
    np.testing.assert_array_equal(total, [3.125, 0.0, -3.125, 0.0])
    server_residual = [0.875, 1.75, 0.875, 0.0]
    for worker in range(2):
        state = simulation.state[worker][0]["server_residual"]
        np.testing.assert_array_equal(state, server_residual)
    np.testing.assert_array_equal(simulation.residual[1][0], [0.0, 0.25, -0.25, 0.0])


@pytest.mark.parametrize(
    ("sparsity", "downstream"), in_turn([0.0, 0.5, 0.9, 0.999], [True, False])
)
def test_equals_sorting(sparsity, downstream):
    rng = np.random.default_rng(0)
    simulation = Simulation(STC(sparsity, downstream), [(20, 30)], 3, "float64")
    residual, server = np.zeros((3, 600)), np.zeros(600)
    k = max(1, round((1 - sparsity) * 600))
    for _ in range(4):
        gradients = rng.normal(size=(3, 600))
        (total,) = simulation.step([[g.reshape(20, 30)] for g in gradients])
        residual += gradients
        sent = np.stack([ternary(row, k) for row in residual])
        residual -= sent
        expected = sent.sum(axis=0)
        if downstream:
            server += expected
            chosen = np.flatnonzero(total)  # many sums are equal
            assert chosen.size == k
            others = np.delete(np.abs(server), chosen)
            assert np.abs(server[chosen]).min() >= others.max(initial=0) - 1e-6
            expected = ternary(server, k, chosen)
            server -= expected
        np.testing.assert_allclose(total.ravel(), expected, rtol=1e-6, atol=1e-6)


def test_downstream_loses_nothing():
    """Sums plus the residuals of workers and server equal all gradients."""
    rng = np.random.default_rng(0)
    simulation = Simulation(STC(0.9, downstream=True), [(8, 9)], 2, "float64")
    expected, total = np.zeros((8, 9)), np.zeros((8, 9))
    for _ in range(5):
        gradients = rng.normal(size=(2, 8, 9))
        expected = expected + gradients.sum(axis=0)
        total = total + simulation.step([[g] for g in gradients])[0]
    residual = sum(worker[0] for worker in simulation.residual)
    server = simulation.state[0][0]["server_residual"]
    np.testing.assert_allclose(total + residual + server, expected, atol=1e-12)


def test_bytes():
    """10 positions of 1000 in 2 + 1 words, a magnitude, and 10 signs."""
    for downstream in (False, True):
        simulation = Simulation(STC(0.99, downstream), [(1000,)], 1)
        simulation.step([[np.arange(1000.0)]])
        assert simulation.sent_bytes == 4 * (5 + 2 + 1 + 1 + 1)
