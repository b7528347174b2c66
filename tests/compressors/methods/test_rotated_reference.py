"""`RotatedQuantization` against NumPy and by hand."""

import numpy as np
import pytest
import tensorflow as tf
from selection import in_turn

from tf_dgc.compressors import RotatedQuantization, rotated
from tf_dgc.testing import Simulation


def hadamard(d):
    """Return the Walsh-Hadamard matrix by Sylvester's construction."""
    matrix = np.ones((1, 1))
    while len(matrix) < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


@pytest.mark.parametrize("d", [1, 2, 8, 64])
def test_transform(d):
    rows = np.random.default_rng(0).normal(size=(3, d))
    transformed = rotated._hadamard(tf.constant(rows))
    expected = rows @ hadamard(d) / np.sqrt(d)
    np.testing.assert_allclose(transformed, expected, atol=1e-12)
    np.testing.assert_allclose(rotated._hadamard(transformed), rows, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "blocks"),
    [
        (1, [(1, 1)]),
        (8, [(1, 8)]),
        (13, [(1, 8), (1, 4), (1, 1)]),
        (38, [(4, 8), (1, 4), (1, 2)]),
    ],
)
def test_blocks(size, blocks):
    """Whole blocks of 8, and the rest in powers of two, without padding."""
    assert RotatedQuantization(block=8)._blocks(size) == blocks


def rotate(values, signs, block):
    """Return the rotated blocks of a vector."""
    flipped, parts, at = values * signs, [], 0
    while at < values.size:
        d = min(block, 1 << ((values.size - at).bit_length() - 1))
        parts.append(flipped[at : at + d] @ hadamard(d) / np.sqrt(d))
        at += d
    return parts


@pytest.mark.parametrize(
    ("quantizer", "size"), in_turn([(2, 8), (5, 16), (16, 1024)], [45, 16])
)
def test_levels_are_next_to_the_rotated_values(size, quantizer, monkeypatch):
    levels, block = quantizer
    signs = np.random.default_rng(1).choice([-1.0, 1.0], size)
    monkeypatch.setattr(rotated, "_signs", lambda *_: tf.constant(signs))
    values = np.random.default_rng(0).normal(size=size)
    simulation = Simulation(
        RotatedQuantization(levels, block), [(size,)] * 20, 1, "float64"
    )
    simulation.step([[values] * 20])
    for sent in simulation.sent[0]:
        pairs = zip(
            rotate(values, signs, block), rotate(sent, signs, block), strict=True
        )
        for exact, quantized in pairs:
            low, step = exact.min(), np.ptp(exact) / (levels - 1)
            if step == 0:
                np.testing.assert_allclose(quantized, exact, atol=1e-12)
                continue
            level = (quantized - low) / step
            np.testing.assert_allclose(level, np.rint(level), atol=1e-9)
            assert np.all(np.abs(quantized - exact) < step * (1 + 1e-9))


def test_by_hand(monkeypatch):
    """(3, 1) rotated is (4, 2) / sqrt(2); least and largest entry are exact."""
    monkeypatch.setattr(rotated, "_signs", lambda size, *_: tf.ones([size], "float64"))
    simulation = Simulation(RotatedQuantization(2, 2), [(2,)], 2, "float64")
    (total,) = simulation.step([[[3.0, 1.0]], [[-5.0, 2.0]]])
    np.testing.assert_allclose(total, [-2.0, 3.0], atol=1e-12)


def test_all_workers_share_the_rotation():
    """All entries of a rotated unit vector have the same magnitude."""
    values = np.zeros(256)
    values[3] = 1.0
    simulation = Simulation(RotatedQuantization(2, 256), [(256,)], 2, "float64")
    (total,) = simulation.step([[values], [2 * values]])
    np.testing.assert_allclose(total, 3 * values, atol=1e-12)


def test_rotation_reduces_the_error_of_outliers():
    """Levels between -1 and 100 are far apart without the rotation."""
    values = np.random.default_rng(0).normal(size=1024)
    values[5] = 100.0
    simulation = Simulation(RotatedQuantization(16), [(1024,)] * 5, 1, "float64")
    simulation.step([[values] * 5])
    error = np.mean([np.sum((s - values) ** 2) for s in simulation.sent[0]])
    step = np.ptp(values) / 15
    share = (values - values.min()) / step % 1
    plain = np.sum(share * (1 - share)) * step**2
    assert error < plain / 5


def test_bytes():
    """4 bits per entry, and a range per block: 1024, 1024, 512, 8, 1."""
    for dtype, width in (("float32", 4), ("float64", 8)):
        simulation = Simulation(RotatedQuantization(), [(2569,)], 1, dtype)
        simulation.step([[np.ones(2569)]])
        assert simulation.sent_bytes == 4 * 5 + 2 * width * 5 + 4 * 4 * 81


def test_error_feedback_depends_on_convergence():
    assert RotatedQuantization(2).error_feedback == "forbidden"
    assert RotatedQuantization(16).error_feedback == "optional"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"levels": 1}, "`levels` must be a whole number, 2 or more"),
        ({"levels": 2**17}, "`levels` must be at most"),
        ({"block": 0}, "`block` must be a whole number"),
        ({"block": 12}, "`block` must be a power of two"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        RotatedQuantization(**settings)
