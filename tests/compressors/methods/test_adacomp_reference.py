"""`AdaComp` against NumPy."""

import math

import keras
import numpy as np
import pytest
from selection import rows

import tf_dgc
from tf_dgc.compressors import AdaComp
from tf_dgc.testing import Simulation


def test_by_hand():
    """Bins (4, 1) and (-2, -1.5); H is twice that, the mean of the maxima 3."""
    simulation = Simulation(AdaComp(bin_size=2), [(4,)], 1)
    (total,) = simulation.step([[[4.0, 1.0, -2.0, -1.5]]])
    np.testing.assert_array_equal(total, [3.0, 0.0, -3.0, -3.0])
    np.testing.assert_array_equal(simulation.residual[0][0], [1.0, 1.0, 1.0, 1.5])
    # G = (1, 0.5, -1, 1.75), H = (1, 0, -3, 2): H of the second bin's first is above
    # the maximum, 1.75, though G is not.
    (total,) = simulation.step([[[0.0, -0.5, -2.0, 0.25]]])
    np.testing.assert_array_equal(total, [1.375, 0.0, -1.375, 1.375])
    residual = [-0.375, 0.5, 0.375, 0.375]
    np.testing.assert_array_equal(simulation.residual[0][0], residual)


def test_without_a_soft_threshold_only_maxima_are_sent():
    simulation = Simulation(AdaComp(bin_size=2, scale=1.0), [(4,)], 1)
    (total,) = simulation.step([[[4.0, 1.0, -1.5, -2.0]]])
    np.testing.assert_array_equal(total, [3.0, 0.0, 0.0, -3.0])


def test_entries_beyond_the_capacity_stay_in_the_residual():
    """Factors over the maxima are 2, 0.5, 2 and 1.5; two places."""
    simulation = Simulation(AdaComp(bin_size=2, per_bin=1.0), [(4,)], 1)
    (total,) = simulation.step([[[4.0, 1.0, -2.0, -1.5]]])
    np.testing.assert_array_equal(total, [3.0, 0.0, -3.0, 0.0])


def reference(residual, gradient, width, scale, capacity):
    values = residual + gradient
    soft = residual + scale * gradient
    maxima, factors = [], {}
    for start in range(0, values.size, width):
        part = range(start, min(start + width, values.size))
        maxima.append(max(abs(values[i]) for i in part))
        for i in part:
            if abs(soft[i]) >= maxima[-1]:
                factors[i] = abs(soft[i]) / maxima[-1]
    sent = np.zeros_like(values)
    for i in sorted(factors, key=lambda i: -factors[i])[:capacity]:
        sent[i] = np.sign(values[i]) * np.float32(np.mean(maxima))
    return sent


@pytest.mark.parametrize(
    ("width", "per_bin"),
    rows([(7, 7.0), (7, 1.0), (50, 2.0), (999, 5)], [(7, 7.0), (50, 2.0)]),
)
def test_equals_loops(width, per_bin):
    rng = np.random.default_rng(0)
    simulation = Simulation(AdaComp(width, 2.0, per_bin), [(15, 20)], 3, "float64")
    capacity = min(300, math.ceil(per_bin * math.ceil(300 / width)))
    residual = np.zeros((3, 300))
    for _ in range(4):
        gradients = rng.normal(size=(3, 300))
        (total,) = simulation.step([[g.reshape(15, 20)] for g in gradients])
        sent = np.stack(
            [
                reference(r, g, width, 2.0, capacity)
                for r, g in zip(residual, gradients, strict=True)
            ]
        )
        residual += gradients - sent
        np.testing.assert_allclose(total.ravel(), sent.sum(axis=0), rtol=1e-12)


def test_without_error_feedback():
    """The residual is 0, so H is twice the gradient in every step."""
    simulation = Simulation(AdaComp(bin_size=2), [(4,)], 1, error_feedback=False)
    for _ in range(2):
        (total,) = simulation.step([[[4.0, 1.0, -2.0, -1.5]]])
        np.testing.assert_array_equal(total, [3.0, 0.0, -3.0, -3.0])


@pytest.mark.parametrize(
    ("feedback", "momentum", "expected"),
    [
        # As in `test_by_hand`: 3 and 1.375.
        (True, 0.0, [4.375, 0.0, -4.375, -1.625]),
        # G = (0, -0.5, -2, 0.25) in the second step; the mean of the maxima is 1.25.
        (False, 0.0, [3.0, -1.25, -4.25, -3.0]),
        # Velocity (2, 0, -3, -0.5), so G = (3, 1, -2, 1) and H = (5, 1, -5, 0.5).
        (True, 0.5, [5.5, 0.0, -5.5, -3.0]),
    ],
)
def test_in_the_optimizer(feedback, momentum, expected):
    """H uses the gradient without the residual, also with momentum correction."""
    optimizer = tf_dgc.CompressedOptimizer(
        keras.optimizers.SGD(1.0, momentum=momentum),
        AdaComp(bin_size=2),
        error_feedback=feedback,
        corrections=tf_dgc.Corrections(momentum=momentum > 0, factor_masking=False),
        min_compress_size=0,
    )
    variable = keras.Variable(np.zeros((1, 4)))
    for gradient in ([4.0, 1.0, -2.0, -1.5], [0.0, -0.5, -2.0, 0.25]):
        optimizer.apply([np.array([gradient], "float32")], [variable])
    np.testing.assert_array_equal(-variable.numpy()[0], expected)


def test_zeros_are_not_sent():
    simulation = Simulation(AdaComp(bin_size=2, per_bin=2), [(6,)], 1)
    (total,) = simulation.step([[[0.0, 0.0, 0.0, 3.0, 0.0, 0.0]]])
    np.testing.assert_array_equal(total, [0.0, 0.0, 0.0, 1.0, 0.0, 0.0])


def test_bytes():
    """Convolution: 90 places among 900 + 90, 3 low bits each; matrix: 10, 6 bits."""
    for shape, words in (
        ((3, 3, 10, 10), 9 + 7 + 1 + 3),  # 270 bits, 90 + (989 >> 3), mean, signs
        ((30, 30), 2 + 1 + 1 + 1),  # 60 bits, 10 + (909 >> 6), mean, signs
    ):
        simulation = Simulation("adacomp", [shape], 1)
        simulation.step([[np.ones(shape)]])
        assert simulation.sent_bytes == 4 * (5 + words)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bin_size": 0}, "bin_size=0"),
        ({"bin_size": 2.5}, "bin_size=2.5"),
        ({"scale": 0.5}, "scale=0.5"),
        ({"per_bin": 0}, "per_bin=0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        AdaComp(**settings)
