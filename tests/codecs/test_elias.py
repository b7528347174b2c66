"""Elias codes of integer vectors, against a coder in plain Python."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from selection import in_turn

from tf_dgc.codecs import elias_gamma


def log2(number):
    return number.bit_length() - 1


def reference(levels):
    """Encode a vector bit by bit."""
    positions = [i for i, level in enumerate(levels) if level]
    distances = [b - a for a, b in zip([-1, *positions], positions, strict=False)]
    codes = distances + [abs(int(levels[i])) for i in positions]
    bits = "".join("1" if levels[i] < 0 else "0" for i in positions)
    bits += "".join("0" * log2(code) + "1" for code in codes)
    for code in codes:
        bits += "".join(str(code >> bit & 1) for bit in range(log2(code)))
    words = [int(bits[i : i + 32][::-1], 2) for i in range(0, len(bits), 32)]
    return np.array([len(positions), *words], np.uint32).view(np.int32)


def vector(size, share, largest, seed=0):
    rng = np.random.default_rng(seed)
    levels = rng.integers(1, largest, size, endpoint=True) * rng.choice([-1, 1], size)
    return np.int32(levels * (rng.random(size) < share))


def test_hand_computed_words():
    """-1 at 0 and 5 at 3: distances 1 and 3, so 1+1, 01|1, and 1, 001|01 (5 = 1 01)."""
    words = elias_gamma.encode(tf.constant([-1, 0, 0, 5, 0]), 2).numpy()
    #       signs  distances  magnitudes  low of 3, low of 5 from its least bit
    bits = "10" + "1" + "01" + "1" + "001" + "1" + "10"
    assert words.tolist() == [2, int(bits[::-1], 2)]


@pytest.mark.parametrize(
    ("size_and_share", "largest"),
    in_turn(itertools.product([1, 2, 33, 1000], [0.0, 0.02, 0.4, 1.0]), [1, 2**24, 7]),
)
def test_equals_the_reference(size_and_share, largest):
    size, share = size_and_share
    levels = vector(size, share, largest)
    expected = reference(levels)
    for padding in (0, 3):
        words = elias_gamma.encode(tf.constant(levels), len(expected) + padding)
        np.testing.assert_array_equal(words, np.pad(expected, (0, padding)))
        np.testing.assert_array_equal(elias_gamma.decode(words, size), levels)


@pytest.mark.parametrize("share", [0.02, 0.4, 1.0])
@pytest.mark.parametrize("largest", [1, 7, 1000])
def test_never_longer_than_stated(share, largest):
    for seed in range(20):
        levels = vector(300, share, largest, seed)
        total = float(np.abs(levels).sum())
        used = elias_gamma.num_words(elias_gamma.max_bits(300, total))
        assert len(reference(levels)) <= used


def test_max_bits_is_the_maximum_over_numbers_of_entries():
    for size, total in ((100, 3.0), (512, 158.4), (100, 90.0), (100, 5000.0)):
        bits = [
            3 * k + 2 * k * math.log2(size * total / k**2)
            for k in np.linspace(1e-3, min(size, total), 10000)
        ]
        assert elias_gamma.max_bits(size, total) == pytest.approx(max(bits), rel=1e-6)
    assert elias_gamma.max_bits(10, 0.0) == 0


def test_entries_that_do_not_fit_become_zero():
    levels = vector(500, 0.3, 7)
    positions = np.flatnonzero(levels)
    needed = len(reference(levels))
    for num_words in (1, 2, 5, needed - 1):
        words = elias_gamma.encode(tf.constant(levels), num_words)
        k = int(words[0])
        assert words.shape == (num_words,)
        assert k < positions.size
        expected = levels.copy()
        expected[positions[k:]] = 0
        np.testing.assert_array_equal(elias_gamma.decode(words, 500), expected)
        # One more entry would not fit.
        assert len(reference(levels[: positions[k] + 1])) > num_words


def test_damaged_words_have_the_right_shape():
    rng = np.random.default_rng(0)
    for _ in range(50):
        words = rng.integers(-(2**31), 2**31, 6, np.int64).astype(np.int32)
        words[0] = rng.choice([-5, 0, 7, 40, 2**30])
        assert elias_gamma.decode(tf.constant(words), 40).shape == (40,)


@pytest.mark.slow
def test_in_a_graph():
    levels = vector(400, 0.3, 7)
    words = tf.function(lambda x: elias_gamma.encode(x, 60))(levels)
    np.testing.assert_array_equal(words, elias_gamma.encode(tf.constant(levels), 60))
    decoded = tf.function(lambda x: elias_gamma.decode(x, 400))(words)
    assert decoded.shape == (400,)
    np.testing.assert_array_equal(decoded, levels)


def test_entries_past_the_end_are_dropped():
    """In damaged words or those of a longer vector, like in the native decoder."""
    words = elias_gamma.encode(tf.constant([0, 3, 0, 0, 0, 0, 0, 0, 0, -2]), 3)
    np.testing.assert_array_equal(elias_gamma.decode(words, 5), [0, 3, 0, 0, 0])
