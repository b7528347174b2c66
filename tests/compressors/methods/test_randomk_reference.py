"""`RandomK` against NumPy."""

import numpy as np
import pytest
from selection import rows

from tf_dgc.compressors import RandomK
from tf_dgc.testing import Simulation


@pytest.mark.parametrize("unbiased", [False, True])
def test_all_workers_send_the_same_positions(unbiased):
    rng = np.random.default_rng(0)
    simulation = Simulation(RandomK(0.75, unbiased), [(8, 5)], 3, "float64")
    drawn_positions = []
    for _ in range(5):
        gradients = rng.normal(size=(3, 8, 5))
        corrected = [
            g + r[0] for g, r in zip(gradients, simulation.residual, strict=True)
        ]
        (total,) = simulation.step([[g] for g in gradients])
        positions = np.flatnonzero(total)
        assert positions.size == 10
        factor = 4.0 if unbiased else 1.0
        for values, (sent,) in zip(corrected, simulation.sent, strict=True):
            expected = np.zeros(40)
            expected[positions] = factor * values.ravel()[positions]
            np.testing.assert_allclose(sent.ravel(), expected, rtol=1e-12)
        drawn_positions.append(tuple(positions))
    assert len(set(drawn_positions)) == 5  # different in every step


@pytest.mark.parametrize("keys_per_tensor", rows([200, 800], [200]))
def test_positions_are_chosen_evenly(keys_per_tensor):
    """A deviation of 5 standard deviations has a probability of 6e-7."""
    simulation = Simulation(RandomK(0.75, True), [(20,)] * keys_per_tensor, 1)
    simulation.step([[np.ones(20)] * keys_per_tensor])
    share = np.mean([sent != 0 for sent in simulation.sent[0]], axis=0)
    np.testing.assert_allclose(
        share, 0.25, atol=5 * np.sqrt(0.25 * 0.75 / keys_per_tensor)
    )


def test_bytes():
    simulation = Simulation(RandomK(0.99), [(1000,)], 1)
    simulation.step([[np.ones(1000)]])
    assert simulation.sent_bytes == 4 + 4 * 10  # the flag, and 10 values; no positions
