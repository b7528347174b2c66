"""Corrections for staleness against NumPy."""

import keras
import numpy as np
import pytest
from served_loop import WEIGHTS, Fake, weights


def test_the_rate_is_divided_by_the_age():
    """A push of 1/N of a gradient, N updates old or fresh."""
    fake = Fake(correction="rate")
    fake.join(0)
    fake.join(1)
    found = weights(*fake.push(0, 2.0))
    np.testing.assert_array_equal(found, WEIGHTS - 0.5 * 2 * 2.0)
    found = weights(*fake.push(1, 2.0, step=0)) - found
    np.testing.assert_array_equal(found, [-0.5 * 2.0] * 6)
    before = weights(*fake.push(0, 0.0))
    (reply,) = fake.push(0, 2.0, step=0)
    np.testing.assert_allclose(weights(reply) - before, [-0.5 * 2 / 4 * 2.0] * 6)


@pytest.mark.parametrize("rule", ["number", "schedule"])
def test_a_rate_that_moves_is_divided_too(rule):
    rate = 0.5
    if rule == "schedule":
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.25])
    fake = Fake(correction="rate", rule=keras.optimizers.SGD(rate))
    fake.join(0)
    fake.push(0, 0.0, rate=np.nan if rule == "schedule" else 0.5)
    before = weights(*fake.push(0, 0.0, rate=np.nan if rule == "schedule" else 0.25))
    (reply,) = fake.push(0, 2.0, step=1, rate=np.nan if rule == "schedule" else 0.25)
    np.testing.assert_array_equal(weights(reply) - before, [-0.25 * 1 * 2.0] * 6)


def test_delay_compensation():
    fake = Fake(correction="delay", correction_strength=0.5)
    fake.join(0)
    fake.join(1)
    found = weights(*fake.push(0, 2.0))
    np.testing.assert_array_equal(found, WEIGHTS - 1)  # by its own weights
    (reply,) = fake.push(1, 3.0, step=0)
    moved = 3.0 + 0.5 * 2 * 3.0 * 3.0 * (found - WEIGHTS)
    np.testing.assert_allclose(weights(reply), found - 0.5 * moved)
    before = weights(reply)
    (reply,) = fake.push(1, 3.0)  # it has been given these
    np.testing.assert_allclose(weights(reply), before - 1.5)


def test_delay_compensation_of_a_process_that_joins_again():
    fake = Fake(correction="delay")
    fake.join(0)
    fake.join(1)
    fake.push(0, 2.0)
    before = weights(*fake.push(1, 2.0))
    fake.join(0, process=1)
    (reply,) = fake.push(0, 2.0, process=1)
    np.testing.assert_array_equal(weights(reply), before - 1)
