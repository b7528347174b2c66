"""`VarianceBased` against NumPy."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from selection import slow

import tf_dgc
from tf_dgc.compressors import VarianceBased
from tf_dgc.steps import generic_step, implementations
from tf_dgc.testing import Simulation


def test_by_hand():
    simulation = Simulation(VarianceBased(1.0, 1.0, 1.0), [(3,)], 1, "float64")
    (total,) = simulation.step([[[1.0, 1.0, -2.0]]])
    np.testing.assert_array_equal(total, [0.0, 0.0, 0.0])  # r**2 = v
    # r = (2, 0, -4.5), v = (2, 2, 10.25); 4.5 is nearest to 4.
    (total,) = simulation.step([[[1.0, -1.0, -2.5]]])
    np.testing.assert_array_equal(total, [2.0, 0.0, -4.0])
    np.testing.assert_array_equal(simulation.residual[0][0], [0.0, 0.0, -0.5])
    deviation = simulation.state[0][0]["deviation"]
    np.testing.assert_allclose(deviation**2, [0.0, 2.0, 0.25], rtol=1e-12)


def test_values_by_hand():
    """The largest power of two is 4; 2**-5 is 7 below it, and 2**-6 is too small."""
    values = [1.4, 1.5, -1.6, 5.9, 7.9, 0.05, 0.04, 0.02]
    simulation = Simulation(VarianceBased(0.5, 1.0, 1.0), [(8,)], 1)
    (total,) = simulation.step([[values]])
    np.testing.assert_array_equal(total, [1, 2, -2, 4, 4, 0.0625, 0.03125, 0])
    np.testing.assert_allclose(simulation.residual[0][0], values - total, rtol=1e-6)


def test_entry_with_alternating_signs_is_not_sent():
    simulation = Simulation(VarianceBased(capacity=1.0), [(2,)], 1)
    for step in range(6):
        (total,) = simulation.step([[[(-1.0) ** step, 1.0]]])
        assert total[0] == 0.0
        assert (total[1] != 0.0) == (step % 2 == 1)


def test_decay_of_the_variance_sends_every_entry():
    """After one gradient, v halves in every step while r stays."""
    simulation = Simulation(VarianceBased(2.5, 0.5, 1.0), [(1,)], 1)
    totals = [simulation.step([[[g]]])[0][0] for g in (1.0, 0.0, 0.0, 0.0)]
    assert totals == [0.0, 0.0, 1.0, 0.0]  # 1 > 2.5 * 0.25


def reference(r, v, g, alpha, zeta, capacity):
    """Algorithm 1 over steps instead of samples; return r, v and the sent values."""
    r, v = r + g, v + g**2
    certain = [i for i in range(r.size) if r[i] ** 2 > alpha * v[i]]
    sent, positions = np.zeros_like(r), []
    if certain:
        top = math.floor(math.log2(max(abs(r[i]) for i in certain)))
        for i in sorted(certain, key=lambda i: -abs(r[i]))[:capacity]:
            power = math.floor(math.log2(abs(r[i])))
            if abs(r[i]) >= 1.5 * 2.0**power:
                power += 1
            power = min(power, top)
            if top - power <= 7:
                sent[i] = math.copysign(2.0**power, r[i])
                positions.append(i)
    is_unsent = np.ones(r.size, bool)
    is_unsent[positions] = False
    return r - sent, np.where(is_unsent, zeta * v, (r - sent) ** 2), sent


@pytest.mark.parametrize(
    ("alpha", "zeta", "share"), [(1.0, 0.999, 1.0), (2.0, 0.9, 0.1), (0.5, 1.0, 0.02)]
)
def test_equals_loops(alpha, zeta, share):
    rng = np.random.default_rng(0)
    compressor = VarianceBased(alpha, zeta, share)
    simulation = Simulation(compressor, [(15, 20)], 2, "float64")
    states = [(np.zeros(300), np.zeros(300))] * 2  # r and v of each worker
    scale, mean = 10.0 ** rng.uniform(-3, 0, size=300), rng.normal(size=300)
    num_sent = 0
    for _ in range(6):
        gradients = scale * (mean + rng.normal(size=(2, 300)))
        (total,) = simulation.step([[g.reshape(15, 20)] for g in gradients])
        expected = np.zeros(300)
        for worker, g in enumerate(gradients):
            capacity = math.ceil(share * 300)
            r, v, sent = reference(*states[worker], g, alpha, zeta, capacity)
            states[worker] = r, v
            expected += sent
        np.testing.assert_array_equal(total.ravel(), expected)
        for worker, (_, v) in enumerate(states):
            deviation = simulation.state[worker][0]["deviation"].ravel()
            np.testing.assert_allclose(deviation**2, v, rtol=1e-9)
        num_sent += np.count_nonzero(total)
    assert num_sent > 10


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_squares_neither_vanish_nor_overflow(scale):
    simulation = Simulation(VarianceBased(1.0, 1.0, 1.0), [(3,)], 1)
    simulation.step([[scale * np.array([1.0, 1.0, -2.0])]])
    (total,) = simulation.step([[scale * np.array([1.0, -1.0, -2.5])]])
    np.testing.assert_array_equal(total != 0, [True, False, True])


@pytest.mark.parametrize("native", [True, slow(False)])
def test_deviation_of_a_spike_decays(native, monkeypatch):
    """The root of its sum of squares is beyond the largest float32."""
    if not native:
        monkeypatch.setattr(
            implementations, "IMPLEMENTATIONS", [generic_step.start_generic_step]
        )
    variable = keras.Variable(np.zeros((1, 2), "float32"))
    optimizer = tf_dgc.CompressedOptimizer(
        keras.optimizers.SGD(1.0), VarianceBased(1.0, 0.09, 1.0), min_compress_size=0
    )
    optimizer.build([variable])
    (deviation,) = (v for v in optimizer.variables if "deviation" in v.path)
    for number in [3.4e38, -3.4e38, *[1.0] * 120]:
        optimizer.apply([tf.fill([1, 2], np.float32(number))], [variable])
        assert np.isfinite(deviation.numpy()).all()
    assert np.all(variable.numpy() < 0)


def test_bytes():
    """10 places of 1000 + 10 in 2 + 1 words, an exponent, and 4 planes of 10 bits."""
    simulation = Simulation(VarianceBased(capacity=0.01), [(1000,)], 1)
    simulation.step([[np.arange(1000.0)]])
    assert simulation.sent_bytes == 4 * (5 + 2 + 1 + 1 + 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"zeta": 0.0}, "zeta=0.0"),
        ({"zeta": 1.5}, "zeta=1.5"),
        ({"capacity": 0.0}, "capacity=0.0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        VarianceBased(**settings)
