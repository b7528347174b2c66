"""`TernGrad` against NumPy and by hand, and its packing."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dgc.compressors import TernGrad
from tf_dgc.compressors.common import quantize
from tf_dgc.testing import Simulation


def simulate(values, clip=None, dtype="float64"):
    """Return the simulation after one step of `values[worker]`."""
    simulation = Simulation(TernGrad(clip), [np.shape(values[0])], len(values), dtype)
    simulation.step([[v] for v in values])
    return simulation


def test_by_hand():
    """s = 4; 1 is sent as 4 with odds 1/4, -2 as -4 with odds 1/2; 5 deviations."""
    values = [4.0] + [1.0] * 4000 + [-2.0] * 4000 + [0.0] * 9
    sent = simulate([values]).sent[0][0]
    assert sent[0] == 4
    assert set(np.unique(sent[1:4001])) == {0.0, 4.0}
    assert set(np.unique(sent[4001:8001])) == {-4.0, 0.0}
    assert not np.any(sent[8001:])
    limit = 5 * np.sqrt(0.25 / 4000)
    assert np.mean(sent[1:4001] != 0) == pytest.approx(0.25, abs=limit)
    assert np.mean(sent[4001:8001] != 0) == pytest.approx(0.5, abs=limit)


def test_scaler_is_shared():
    """The largest entries are 1 and 8; both workers send -8, 0 or 8."""
    rng = np.random.default_rng(0)
    small, large = rng.uniform(-1, 1, 500), rng.uniform(-8, 8, 500)
    small[0], large[0] = 1.0, -8.0
    simulation = simulate([small, large])
    for (sent,) in simulation.sent:
        assert set(np.unique(sent)) == {-8.0, 0.0, 8.0}
    assert simulation.sent[1][0][0] == -8


@pytest.mark.parametrize("clip", [2.5, 1.0])
def test_clipping(clip):
    """The scaler and the mean are those of the clipped gradient."""
    values = np.random.default_rng(0).normal(size=300)
    values[7] = 20.0
    limit = clip * np.sqrt(np.mean(values**2))
    assert limit < 20
    # The same values 300 times in one tensor have the same deviation.
    sent = simulate([np.tile(values, 300)], clip).sent[0][0].reshape(300, 300)
    np.testing.assert_allclose(np.unique(sent), [-limit, 0.0, limit], atol=1e-12)
    clipped = np.clip(values, -limit, limit)
    along = (sent - clipped) @ clipped
    assert abs(along.mean()) < 5 * along.std() / np.sqrt(300)
    assert np.all(sent[:, 7] == sent.max())


def test_equal_entries_are_not_clipped_to_nothing():
    values = np.full(40, -0.25)
    np.testing.assert_array_equal(simulate([values], 2.5).sent[0][0], values)


def test_variance_by_the_formula():
    """It is `sum |g| (s - |g|)`, at most `(sqrt(n) - 1) / 2` times the square of g."""
    n = 100
    worst = np.full(n, 1 / (np.sqrt(n) + 1))
    worst[0] = 1.0
    expected = np.sum(worst * (1 - worst))
    assert expected / np.sum(worst**2) == pytest.approx((np.sqrt(n) - 1) / 2)
    sent = simulate([np.tile(worst, 400)]).sent[0][0].reshape(400, n)
    errors = np.sum((sent - worst) ** 2, axis=1)
    limit = 5 * errors.std() / np.sqrt(400)
    assert errors.mean() == pytest.approx(expected, abs=limit)


def test_bytes():
    """1.6 bits per entry, and a separate round for the scaler."""
    for dtype, width in (("float32", 4), ("float64", 8)):
        simulation = simulate([np.ones(4000)], 2.5, dtype)
        assert simulation.sent_bytes == 2 * 4 * 5 + width + 1.6 * 4000 / 8


@pytest.mark.parametrize("count", [1, 5, 19, 20, 21, 997])
def test_trits(count):
    trits = np.random.default_rng(0).integers(0, 3, count)
    words = quantize.pack_trits(tf.constant(trits, tf.int32))
    assert words.shape == (quantize.num_trit_words(count),)
    assert quantize.num_trit_words(count) == -(-count // 20)
    np.testing.assert_array_equal(quantize.unpack_trits(words, count), trits)


def test_trits_by_hand():
    """The first byte is 2 + 1 * 3 + 0 * 9 + 0 * 27 + 2 * 81."""
    words = quantize.pack_trits(tf.constant([2, 1, 0, 0, 2, 1]))
    assert words.numpy().tolist() == [167 + 256]


@pytest.mark.parametrize("clip", [0, -1.0, np.inf, np.nan])
def test_bad_clip(clip):
    with pytest.raises(ValueError, match="`clip` must be a finite number"):
        TernGrad(clip)
