"""`DelayedNesterov` compared with NumPy and with Keras's momentum."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from contract import round_trip

from tf_dgc import DelayedNesterov


def apply(optimizer, weights, gradients):
    variable = keras.Variable(weights, dtype=weights.dtype.name)
    for g in gradients:
        optimizer.apply([tf.constant(g)], [variable])
    return variable.numpy()


def make_data(dtype="float64", steps=7):
    rng = np.random.default_rng(0)
    return rng.normal(size=(3, 4)).astype(dtype), rng.normal(size=(steps, 3, 4))


@pytest.mark.parametrize("delay", [2, 3])
def test_equals_algorithm_4(delay):
    weights, gradients = make_data()
    expected, m, total = weights.copy(), 0.0, 0.0
    for t, g in enumerate(gradients):
        total = total + g
        if (t + 1) % delay == 0:
            m, total = 0.9 * m + total, 0.0
            expected -= 0.125 * (0.9 * m + g)
        else:
            expected -= 0.125 * g
    result = apply(DelayedNesterov(0.125, 0.9, delay), weights, gradients)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_without_a_delay_it_is_nesterovs_momentum():
    weights, gradients = make_data()
    sgd = keras.optimizers.SGD(0.125, momentum=0.9, nesterov=True)
    expected = apply(sgd, weights, gradients)
    result = apply(DelayedNesterov(0.125, 0.9), weights, gradients)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes(dtype):
    weights, gradients = make_data(dtype)
    result = apply(DelayedNesterov(0.125, 0.9, 2), weights, gradients.astype(dtype))
    assert result.dtype == dtype
    assert np.isfinite(result).all()


def test_config():
    again = round_trip(DelayedNesterov(0.1, 0.5, 4))
    assert (again.momentum, again.delay) == (0.5, 4)


@pytest.mark.parametrize(
    "settings, text",
    [({"momentum": 1.0}, "in \\[0, 1\\)"), ({"delay": 0}, "1 or more")],
)
def test_bad_settings_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        DelayedNesterov(**settings)
