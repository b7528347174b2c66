"""`Float16` and `BFloat16` against NumPy."""

import numpy as np
import pytest

from tf_dgc.testing.simulation import Simulation


def test_float16_by_hand():
    simulation = Simulation("float16", [(5,)], 2, error_feedback=True)
    values = [1.0, 1.0 + 2.0**-12, 1e-9, 1e5, -1e5]
    (total,) = simulation.step([[values], [[1.0, 0.0, 0.0, 1.0, -2047.0]]])
    np.testing.assert_array_equal(total, [2.0, 1.0, 0.0, 2048.0, -4094.0])
    kept = np.float32(values) - np.float32([1, 1, 0, 2047, -2047])
    np.testing.assert_array_equal(simulation.residual[0][0], kept)


@pytest.mark.parametrize(("name", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_rounds_to_nearest(name, bits):
    values = np.random.default_rng(0).normal(size=1000)
    simulation = Simulation(name, [(1000,)], 1, "float64")
    (total,) = simulation.step([[values]])
    fraction, exponent = np.frexp(values)
    rounded = np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits)
    np.testing.assert_array_equal(total, rounded)
    assert simulation.sent_bytes == 2 + 2 * 1000
