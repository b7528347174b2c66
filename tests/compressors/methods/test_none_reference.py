"""`NoCompression` against NumPy."""

import numpy as np

from tf_dgc.testing import Simulation


def test_sums():
    gradients = np.random.default_rng(0).normal(size=(4, 6, 7))
    simulation = Simulation("none", [(6, 7)], 4, "float64")
    (total,) = simulation.step([[g] for g in gradients])
    np.testing.assert_allclose(total, gradients.sum(axis=0), rtol=1e-14)
    assert simulation.sent_bytes == 8 * (42 + 1)
