"""`ECQ` against its recursion, and against QSGD."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc.compressors import ECQ, QSGD
from tf_dgc.compressors.common.one_round import send_whole
from tf_dgc.steps import generic_step, implementations
from tf_dgc.testing import Simulation


class Halves:
    """A deterministic quantizer that sends half of each value."""

    def aggregate(self, values, state, keys):
        return (yield from send_whole(0.5 * values, "gather"))

    def bytes(self, shape, dtype):
        return dtype.size * int(np.prod(shape))

    def get_config(self):
        return {}


def test_by_hand():
    """Alpha 0.5, beta 0.75, Q halves.

    q = 4/2, h = 4 - 2; q = (0 + 1)/2, h = 1.5 - 0.5; q = (4 + 0.5)/2, h = 0.75 + 1.75.
    """
    method = ECQ(alpha=0.5, beta=0.75)
    method.quantizer = Halves()
    simulation = Simulation(method, [(1,)], 1, "float64")
    for gradient, sent, error in ((4, 2, 2), (0, 0.5, 1), (4, 2.25, 2.5)):
        (total,) = simulation.step([[[float(gradient)]]])
        assert total == sent
        assert simulation.state[0][0]["error"] == error


@pytest.mark.parametrize(("alpha", "beta"), [(0.2, 0.9), (0.1, 1.0), (0.0, 0.5)])
def test_recursion(alpha, beta):
    """The error follows from the sent values."""
    rng = np.random.default_rng(0)
    simulation = Simulation(ECQ(alpha=alpha, beta=beta), [(6, 7)], 3, "float64")
    errors = np.zeros((3, 6, 7))
    for _ in range(5):
        gradients = rng.normal(size=(3, 6, 7))
        (total,) = simulation.step([[g] for g in gradients])
        sent = np.stack([worker[0] for worker in simulation.sent])
        np.testing.assert_allclose(total, sent.sum(axis=0), atol=1e-12)
        # QSGD's levels are multiples of the bucket's norm / 7.
        corrected = gradients + alpha * errors
        norms = np.linalg.norm(corrected, axis=(1, 2), keepdims=True)
        levels = 7 * sent / norms
        np.testing.assert_allclose(levels, np.rint(levels), atol=1e-9)
        assert np.all(np.abs(sent - corrected) < norms / 7 * (1 + 1e-9))
        errors = beta * errors + gradients - sent
        for state, error in zip(simulation.state, errors, strict=True):
            np.testing.assert_allclose(state[0]["error"], error, atol=1e-12)


def test_without_decay_nothing_is_lost():
    """With beta 1, sent values plus errors equal the sum of all gradients."""
    rng = np.random.default_rng(0)
    simulation = Simulation(ECQ(alpha=0.1, beta=1.0), [(50,)], 2, "float64")
    expected, total = 0, 0
    for _ in range(10):
        gradients = rng.normal(size=(2, 50))
        total = total + simulation.step([[g] for g in gradients])[0]
        expected = expected + gradients.sum(axis=0)
    errors = sum(worker[0]["error"] for worker in simulation.state)
    np.testing.assert_allclose(total + errors, expected, atol=1e-12)


@pytest.mark.parametrize("native", [True, False])
def test_the_error_of_spikes_is_finite(native, monkeypatch):
    """100 entries are sent in one of ten steps, and add up until then."""
    if not native:
        monkeypatch.setattr(
            implementations, "IMPLEMENTATIONS", [generic_step.start_generic_step]
        )
    variable = keras.Variable(np.zeros((1, 100), "float32"))
    method = ECQ(levels=1, bucket=100, alpha=0.0, beta=1.0)
    optimizer = tf_dgc.CompressedOptimizer(
        keras.optimizers.SGD(1e-6), method, min_compress_size=0
    )
    optimizer.build([variable])
    (error,) = (v for v in optimizer.variables if "error" in v.path)
    for _ in range(30):
        optimizer.apply([tf.fill([1, 100], np.float32(3e37))], [variable])
        assert np.isfinite(error.numpy()).all()
    assert np.abs(error.numpy()).max() == np.finfo("float32").max


@pytest.mark.slow
def test_the_sum_over_steps_is_less_noisy_than_with_qsgd():
    """QSGD's errors add up at random; ECQ compensates them."""
    gradient = np.random.default_rng(0).normal(size=400)
    drift = {}
    for method in (QSGD(), ECQ(alpha=0.2, beta=1.0)):
        simulation = Simulation(method, [(400,)], 1, "float64", compiled=True)
        sums = sum(simulation.step([[gradient]])[0] for _ in range(50))
        drift[method.name] = np.linalg.norm(sums - 50 * gradient)
    assert drift["ecq"] < drift["qsgd"] / 2


def test_bytes_are_those_of_qsgd():
    simulation = Simulation(ECQ(levels=3), [(2000,)], 1)
    simulation.step([[np.ones(2000)]])
    other = Simulation(QSGD(levels=3), [(2000,)], 1)
    other.step([[np.ones(2000)]])
    assert simulation.sent_bytes == other.sent_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -0.1}, r"`alpha` must be a number in \[0, 1\]"),
        ({"beta": 1.5}, r"`beta` must be a number in \[0, 1\]"),
        ({"alpha": 1.0, "beta": 1.0}, "grows without bound"),
        ({"levels": 1, "alpha": 0.5}, "grows without bound"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ECQ(**settings)


def test_plain_error_feedback_is_allowed_with_a_fine_quantizer():
    assert ECQ(levels=127, alpha=1.0, beta=1.0).alpha == 1
