"""`DIANA` against its recursion, and its decreasing noise."""

import numpy as np
import pytest
from selection import rows

from tf_dgc.compressors import DIANA
from tf_dgc.testing import Simulation


def test_recursion():
    """Shifts and estimate follow from the quantizer's output."""
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


@pytest.mark.slow
def test_noise_vanishes_as_shifts_settle():
    """With a constant gradient, QSGD stays as noisy as in the first step."""
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


@pytest.mark.parametrize("keys_per_tensor", rows([100, 400], [100]))
def test_one_level_quantizes_as_the_paper(keys_per_tensor):
    """In a block d, entry i is sent as `|d| sign(d_i)` with odds `|d_i| / |d|`."""
    gradient = np.array([3.0, -4.0, 0.0, 12.0])
    shapes = [(4,)] * keys_per_tensor
    simulation = Simulation(DIANA(levels=1, alpha=0.5), shapes, 1, "float64")
    simulation.step([[gradient] * keys_per_tensor])
    sent = np.stack(simulation.sent[0])
    assert set(np.unique(sent)) == {-13.0, 0.0, 13.0}
    assert np.all(sent * gradient >= 0)
    odds = np.abs(gradient) / 13
    limit = 5 * np.sqrt(odds * (1 - odds) / keys_per_tensor)  # 5 deviations
    assert np.all(np.abs(np.mean(sent != 0, axis=0) - odds) <= limit)


@pytest.mark.parametrize("levels", [1, 7])
def test_alpha_is_at_most_the_theoretical_bound(levels):
    """It is at most `1 / (1 + omega)`; for one level the paper has `1 / sqrt(d)`."""
    method = DIANA(levels=levels, bucket=64)
    simulation = Simulation(method, [(8, 8)], 1, "float64")
    simulation.step([[np.ones((8, 8))]])
    shift, sent = simulation.state[0][0]["shift"], simulation.sent[0][0]
    alpha = shift[sent != 0] / sent[sent != 0]
    np.testing.assert_allclose(alpha, 1 / (1 + method.quantizer.error_bound(64)))
    if levels == 1:
        assert np.all(alpha <= 1 / np.sqrt(64))


@pytest.mark.parametrize("alpha", [0.0, 1.5, -1])
def test_bad_alpha(alpha):
    with pytest.raises(ValueError, match="`alpha` must be"):
        DIANA(alpha=alpha)
