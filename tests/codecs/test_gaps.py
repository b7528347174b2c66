"""Golomb codes of gaps: what comes back, and what they take."""

import math

import numpy as np
import pytest

from tf_dgc.codecs import golomb


def positions(size, k, seed=0):
    return np.sort(np.random.default_rng(seed).permutation(size)[:k]).astype("int32")


def back(at, size):
    words, fit = golomb.encode(at, size)
    assert words.shape == [golomb.num_words(size, len(at))]
    found, same = golomb.decode(words, size, len(at))
    assert fit == same
    return found.numpy(), int(fit)


@pytest.mark.parametrize(
    ("size", "k"),
    [
        (1, 1),
        (5, 5),
        (6, 5),
        (40, 1),
        (4096, 64),
        (10**6, 3),
        (999, 500),
    ],
)
def test_what_was_coded_comes_back(size, k):
    at = positions(size, k)
    found, fit = back(at, size)
    assert fit == k
    np.testing.assert_array_equal(found, at)


def test_positions_far_apart():
    size = 2**31 - 1
    found, fit = back(np.array([7, size - 1], "int32"), size)
    assert fit == 2
    np.testing.assert_array_equal(found, [7, size - 1])


def test_what_there_is_no_room_for_is_left_out_from_the_end():
    """Gaps of 80 and 40, in radix 40: more unary zeros than random ones have."""
    size, k = 40960, 640
    assert golomb.radix(size, k) == (6, 40)
    at = np.cumsum([81, 41] * (k // 2)).astype("int32") - 1
    found, fit = back(at, size)
    assert 0.85 * k < fit < 0.95 * k
    np.testing.assert_array_equal(found[:fit], at[:fit])
    assert np.all(found[fit:] == size)


def test_it_is_near_the_entropy():
    """Within 3 % for the 64 of 4,096 of 16 chunks and more, and always room for all."""
    for chunks in (16, 256):
        size, k = 4096 * chunks, 64 * chunks
        entropy = chunks * math.log2(math.comb(4096, 64))
        assert 32 * golomb.num_words(size, k) <= 1.03 * entropy
        for seed in range(20):
            at = [4096 * c + positions(4096, 64, [seed, c]) for c in range(chunks)]
            _, fit = golomb.encode(np.concatenate(at).astype("int32"), size)
            assert fit == k


def test_any_words_are_positions_within_range():
    rng = np.random.default_rng(0)
    for _ in range(20):
        words = rng.integers(-(2**31), 2**31, golomb.num_words(4096, 64)).astype(
            "int32"
        )
        found, _ = golomb.decode(words, 4096, 64)
        assert np.all((found >= 0) & (found <= 4096))
