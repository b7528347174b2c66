"""`Natural` against NumPy, and its variance by hand."""

import numpy as np
import pytest

from tf_dgc.compressors import Natural
from tf_dgc.testing import Simulation

DRAWS = 4000


def sent_by(values, dtype="float64"):
    simulation = Simulation(Natural(), [np.shape(values)], 1, dtype)
    simulation.step([[values]])
    return simulation.sent[0][0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_powers_of_two_are_exact(dtype):
    values = np.ldexp([1.0, -1.0] * 40, np.arange(-40, 40))
    np.testing.assert_array_equal(sent_by(values, dtype), values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("value", "low", "high", "up"),
    [(2.5, 2.0, 4.0, 0.25), (-2.5, -2.0, -4.0, 0.25), (0.1875, 0.125, 0.25, 0.5)],
)
def test_by_hand(value, low, high, up, dtype):
    """The expectation is the value: 2.5 = 0.75 * 2 + 0.25 * 4."""
    sent = sent_by(np.full(DRAWS, value), dtype)
    assert set(np.unique(sent)) == {low, high}
    # 5 deviations
    limit = 5 * np.sqrt(up * (1 - up) / DRAWS)
    assert np.mean(sent == high) == pytest.approx(up, abs=limit)


def test_rounds_to_neighboring_powers():
    values = np.random.default_rng(0).normal(size=500) * 10.0 ** np.arange(-25, 25, 0.1)
    sent = sent_by(values)
    fraction, exponent = np.frexp(values)
    below = np.ldexp(np.sign(fraction) * 0.5, exponent)
    assert np.all((sent == below) | (sent == 2 * below))


def test_worst_variance_is_an_eighth():
    """At 4/3 of a power: 1 with odds 2/3, or 2; `2/9 / (16/9)`."""
    value = 4 / 3
    sent = sent_by(np.full(DRAWS, value))
    errors = (sent - value) ** 2 / value**2
    limit = 5 * errors.std() / np.sqrt(DRAWS)
    assert errors.mean() == pytest.approx(1 / 8, abs=limit)
    assert Natural().error_bound(DRAWS) == 1 / 8


@pytest.mark.parametrize(("dtype", "largest"), [("float32", 127), ("float64", 1023)])
def test_ends_of_the_range(dtype, largest):
    top = np.finfo(dtype).max
    sent = sent_by([top, -top, 0.0, -0.0], dtype)
    np.testing.assert_array_equal(sent, np.ldexp([1.0, -1.0, 0.0, 0.0], largest))


def test_bytes():
    for dtype, bits in (("float32", 9), ("float64", 12)):
        simulation = Simulation(Natural(), [(3200,)], 1, dtype)
        simulation.step([[np.ones(3200)]])
        assert simulation.sent_bytes == 4 * 5 + bits * 3200 // 8
