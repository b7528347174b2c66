"""`Signum` against NumPy and by hand."""

import numpy as np
import pytest

from tf_dgc.compressors import Signum
from tf_dgc.testing import Simulation


def test_by_hand():
    """With beta 0.5, only a large opposite gradient changes the vote."""
    simulation = Simulation(Signum(0.5), [(2,)], 1, "float64")
    (total,) = simulation.step([[[2.0, 2.0]]])
    np.testing.assert_array_equal(total, [1.0, 1.0])
    (total,) = simulation.step([[[-0.5, -1.5]]])  # 0.5 * 1 - 0.25, 0.5 * 1 - 0.75
    np.testing.assert_array_equal(total, [1.0, -1.0])
    np.testing.assert_array_equal(simulation.state[0][0]["momentum"], [0.25, -0.25])


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_majority_of_momenta(beta):
    rng = np.random.default_rng(0)
    simulation = Simulation(Signum(beta), [(6, 11)], 5, "float64")
    momenta = np.zeros((5, 6, 11))
    for _ in range(5):
        gradients = rng.normal(size=(5, 6, 11))
        (total,) = simulation.step([[g] for g in gradients])
        momenta = beta * momenta + (1 - beta) * gradients
        np.testing.assert_array_equal(total, np.sign(np.sign(momenta).sum(axis=0)))
        for momentum, state in zip(momenta, simulation.state, strict=True):
            np.testing.assert_allclose(state[0]["momentum"], momentum, rtol=1e-12)


def test_one_bit_per_entry():
    simulation = Simulation(Signum(), [(3200,)], 1)
    simulation.step([[np.ones(3200)]])
    assert simulation.sent_bytes == 4 * (5 + 1) + 3200 // 8


@pytest.mark.parametrize("momentum", [-0.1, 1.0, np.nan])
def test_bad_momentum(momentum):
    with pytest.raises(ValueError, match=r"`momentum` must be a number in \[0, 1\)"):
        Signum(momentum)
