"""Golomb codes of gaps between positions: round trips and sizes."""

import math

import numpy as np
import pytest

from tf_dgc.codecs import golomb


def random_positions(size, k, seed=0):
    return np.sort(np.random.default_rng(seed).permutation(size)[:k]).astype("int32")


def round_trip(positions, size):
    words, fit = golomb.encode(positions, size)
    assert words.shape == [golomb.num_words(size, len(positions))]
    decoded, same = golomb.decode(words, size, len(positions))
    assert fit == same
    return decoded.numpy(), int(fit)


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
def test_positions_round_trip(size, k):
    positions = random_positions(size, k)
    decoded, fit = round_trip(positions, size)
    assert fit == k
    np.testing.assert_array_equal(decoded, positions)


def test_positions_far_apart():
    size = 2**31 - 1
    decoded, fit = round_trip(np.array([7, size - 1], "int32"), size)
    assert fit == 2
    np.testing.assert_array_equal(decoded, [7, size - 1])


def test_last_positions_are_dropped_if_they_do_not_fit():
    """Gaps of 80 and 40 in radix 40 have more unary zeros than random gaps."""
    size, k = 40960, 640
    assert golomb.radix(size, k) == (6, 40)
    positions = np.cumsum([81, 41] * (k // 2)).astype("int32") - 1
    decoded, fit = round_trip(positions, size)
    assert 0.85 * k < fit < 0.95 * k
    np.testing.assert_array_equal(decoded[:fit], positions[:fit])
    assert np.all(decoded[fit:] == size)


def test_size_is_close_to_the_entropy():
    """Within 3 % for 64 positions in each of 16 or more chunks, with room for all."""
    for chunks in (16, 256):
        size, k = 4096 * chunks, 64 * chunks
        entropy = chunks * math.log2(math.comb(4096, 64))
        assert 32 * golomb.num_words(size, k) <= 1.03 * entropy
        for seed in range(20):
            positions = [
                4096 * c + random_positions(4096, 64, [seed, c]) for c in range(chunks)
            ]
            _, fit = golomb.encode(np.concatenate(positions).astype("int32"), size)
            assert fit == k


def test_any_words_are_positions_within_range():
    rng = np.random.default_rng(0)
    for _ in range(20):
        words = rng.integers(-(2**31), 2**31, golomb.num_words(4096, 64)).astype(
            "int32"
        )
        decoded, _ = golomb.decode(words, 4096, 64)
        assert np.all((decoded >= 0) & (decoded <= 4096))
