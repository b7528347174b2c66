"""Corrections for staleness against NumPy."""

import keras
import numpy as np
import pytest
from served_loop import WEIGHTS, Fake, weights


def test_rate_is_divided_by_staleness():
    """Each push is 1/N of a gradient, and N updates old or fresh."""
    fake = Fake(correction="rate")
    fake.join(0)
    fake.join(1)
    first = weights(*fake.push(0, 2.0))
    np.testing.assert_array_equal(first, WEIGHTS - 0.5 * 2 * 2.0)
    second = weights(*fake.push(1, 2.0, step=0))
    np.testing.assert_array_equal(second - first, [-0.5 * 2.0] * 6)
    before = weights(*fake.push(0, 0.0))
    (reply,) = fake.push(0, 2.0, step=0)
    np.testing.assert_allclose(weights(reply) - before, [-0.5 * 2 / 4 * 2.0] * 6)


@pytest.mark.parametrize("rule", ["number", "schedule"])
def test_changing_rate_is_divided_by_staleness(rule):
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
    first = weights(*fake.push(0, 2.0))
    np.testing.assert_array_equal(first, WEIGHTS - 1)  # computed at the current weights
    (reply,) = fake.push(1, 3.0, step=0)
    gradient = 3.0 + 0.5 * 2 * 3.0 * 3.0 * (first - WEIGHTS)
    np.testing.assert_allclose(weights(reply), first - 0.5 * gradient)
    before = weights(reply)
    (reply,) = fake.push(1, 3.0)  # now computed at the current weights
    np.testing.assert_allclose(weights(reply), before - 1.5)


def test_delay_compensation_after_a_process_rejoins():
    fake = Fake(correction="delay")
    fake.join(0)
    fake.join(1)
    fake.push(0, 2.0)
    before = weights(*fake.push(1, 2.0))
    fake.join(0, process=1)
    (reply,) = fake.push(0, 2.0, process=1)
    np.testing.assert_array_equal(weights(reply), before - 1)
