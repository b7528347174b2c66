"""`DIANA` against its recursion, and what it is for."""

import numpy as np
import pytest

from tf_dgc.compressors import DIANA
from tf_dgc.compressors.simulate import Simulation


def test_recursion():
    """Shifts and estimate follow from what the quantizer sent, whatever it was."""
    rng = np.random.default_rng(0)
    alpha = 0.25
    simulation = Simulation(DIANA(alpha=alpha), [(6, 7)], 3, "float64")
    shifts = np.zeros((3, 6, 7))
    for _ in range(5):
        (total,) = simulation.step([[g] for g in rng.normal(size=(3, 6, 7))])
        moves = np.stack([worker[0] for worker in simulation.sent]) - shifts
        np.testing.assert_allclose(total, shifts.sum(0) + moves.sum(0), rtol=1e-10)
        shifts += alpha * moves
        for worker, state in enumerate(simulation.state):
            np.testing.assert_allclose(state[0]["shift"], shifts[worker], atol=1e-12)
            np.testing.assert_allclose(state[0]["shift_sum"], shifts.sum(0), atol=1e-12)


def test_noise_vanishes_as_shifts_settle():
    """Of a constant gradient QSGD is as noisy after 60 steps as at first."""
    gradient = np.random.default_rng(0).normal(size=(5, 8))
    errors = {}
    for name in ("diana", "qsgd"):
        simulation = Simulation(name, [(5, 8)], 2, "float64", compiled=True)
        totals = [simulation.step([[gradient], [-3 * gradient]])[0] for _ in range(60)]
        errors[name] = [np.linalg.norm(total + 2 * gradient) for total in totals]
    assert errors["diana"][-1] < 1e-3 * errors["diana"][0]
    assert errors["qsgd"][-1] > 0.2 * errors["qsgd"][0]


def test_default_alpha():
    """1 / (1 + omega), omega = min(d / s^2, sqrt(d) / s) of 40 entries."""
    simulation = Simulation(DIANA(levels=2), [(40,)], 1, "float64")
    simulation.step([[np.ones(40)]])
    alpha = 1 / (1 + np.sqrt(40) / 2)
    shift, sent = simulation.state[0][0]["shift"], simulation.sent[0][0]
    assert shift == pytest.approx(alpha * sent)
