"""`QSGD` against NumPy and by hand."""

import math

import numpy as np
import pytest
import tensorflow as tf
from selection import in_turn, rows

from tf_dgc.compressors import QSGD, RandomKeys
from tf_dgc.testing import Simulation


def sent_by(levels, bucket, values, keys_per_tensor):
    shape = np.shape(values)
    method = QSGD(levels, bucket, "fixed")  # faster; both codings send the same values
    simulation = Simulation(method, [shape] * keys_per_tensor, 1, "float64")
    simulation.step([[values] * keys_per_tensor])
    return np.stack(simulation.sent[0])


@pytest.mark.parametrize("keys_per_tensor", rows([100, 400], [100]))
def test_by_hand(keys_per_tensor):
    """(3, 4) has norm 5; with one level, 3 is sent as 5 with odds 0.6, 4 with 0.8."""
    sent = sent_by(1, 2, [3.0, -4.0], keys_per_tensor)
    assert set(np.unique(sent[:, 0])) == {0.0, 5.0}
    assert set(np.unique(sent[:, 1])) == {-5.0, 0.0}
    for share, odds in zip(np.mean(sent != 0, axis=0), (0.6, 0.8), strict=True):
        deviation = np.sqrt(odds * (1 - odds) / keys_per_tensor)
        assert share == pytest.approx(odds, abs=5 * deviation)


@pytest.mark.parametrize(("levels", "bucket"), [(1, 4), (3, 5), (7, 512), (127, 64)])
def test_levels_are_next_to_the_value(levels, bucket):
    values = np.random.default_rng(0).normal(size=70)
    norms = np.concatenate(
        [
            np.full(len(part), np.linalg.norm(part))
            for part in np.split(values, range(bucket, 70, bucket))
        ]
    )
    exact = values * levels / norms
    sent = sent_by(levels, bucket, values, 20) * levels / norms
    np.testing.assert_allclose(sent, np.rint(sent), atol=1e-9)
    assert np.all(np.abs(sent - exact) < 1 + 1e-9)


@pytest.mark.parametrize("keys_per_tensor", rows([80, 300], [80]))
def test_variance_is_that_of_the_paper(keys_per_tensor):
    """It is `sum p (1 - p) (norm / s)^2`, with p the distance to the lower level."""
    values = np.random.default_rng(0).normal(size=30)
    step = np.linalg.norm(values) / 3
    p = np.abs(values) / step % 1
    errors = np.sum((sent_by(3, 30, values, keys_per_tensor) - values) ** 2, axis=1)
    expected = np.sum(p * (1 - p)) * step**2
    deviation = errors.std() / np.sqrt(keys_per_tensor)
    assert abs(errors.mean() - expected) < 5 * deviation


def test_bytes():
    """4 bits per entry for 7 levels, and a float32 norm per 512 entries."""
    simulation = Simulation(QSGD(coding="fixed"), [(1024,)], 1)
    simulation.step([[np.ones(1024)]])
    assert simulation.sent_bytes == 4 * (5 + 2 + 4 * 1024 // 32)


def test_bytes_with_elias():
    """The capacity suffices for any input: 2.05 bits per entry, norms included."""
    for size, bits in ((1024, 2.4375), (10**6, 2.051)):
        simulation = Simulation(QSGD(), [(size,)], 1)
        simulation.step([[np.ones(size)]])
        assert simulation.sent_bytes == pytest.approx(20 + bits * size / 8, rel=1e-4)


@pytest.mark.parametrize(
    ("levels", "size", "shorter"),
    [
        (7, 1024, "elias"),
        (7, 10**6, "elias"),
        (1, 10**4, "elias"),
        (7, 60, "fixed"),
        (127, 1024, "fixed"),
        (2**20, 10**6, "fixed"),
    ],
)
def test_default_is_the_shorter_coding(levels, size, shorter):
    words = {
        c: QSGD(levels, 512, c).words(size, tf.float32) for c in ("elias", "fixed")
    }
    assert min(words, key=words.get) == shorter
    assert QSGD(levels).words(size, tf.float32) == words[shorter]


@pytest.mark.parametrize("bucket", [7, 512])
@pytest.mark.parametrize("levels", [1, 7])
def test_both_codings_send_the_same(levels, bucket):
    values = np.random.default_rng(0).normal(size=(30, 50))
    sent = []
    for coding in ("elias", "fixed"):
        simulation = Simulation(QSGD(levels, bucket, coding), [(30, 50)], 2, "float64")
        totals = simulation.step([[values], [-2 * values]])
        sent.append([totals[0], simulation.sent[0][0], simulation.sent[1][0]])
    np.testing.assert_array_equal(*sent)


def worst_inputs(size):
    """Return inputs with the longest codes: equal magnitudes, and mixtures."""
    rng = np.random.default_rng(0)
    yield np.ones(size)
    yield rng.choice([-1.0, 1.0], size) * rng.uniform(0.5, 1, size)
    for share in (0.5, 0.1, 0.02):
        yield np.where(rng.random(size) < share, 1.0, 0.1)
        yield (rng.random(size) < share).astype(float)


@pytest.mark.parametrize(
    ("quantizer", "size"),
    in_turn([(1, 64), (3, 512), (7, 512), (31, 512)], [700, 20000, 10]),
)
def test_capacity_suffices_for_any_input(size, quantizer):
    """The probability of a failure is 1e-12 in each case."""
    levels, bucket = quantizer
    method = QSGD(levels, bucket, "elias")
    for number, values in enumerate(worst_inputs(size)):
        keys = RandomKeys(0, tf.constant(0), number, 0)
        words = method.encode(tf.constant(values), keys)
        norms = 2 * math.ceil(size / bucket)
        sent = method.decode(words, size, tf.float64)
        assert int(words[norms]) == np.count_nonzero(sent)
        exact = QSGD(levels, bucket, "fixed")
        expected = exact.decode(
            exact.encode(tf.constant(values), keys), size, tf.float64
        )
        np.testing.assert_array_equal(sent, expected)


@pytest.mark.parametrize("coding", rows([None, "elias"], ["elias"]))
def test_xla(coding):
    """Under XLA the code has a fixed length; the levels are equally good."""
    method = QSGD(bucket=64, coding=coding)
    values = np.float32(np.random.default_rng(0).normal(size=256))

    @tf.function(jit_compile=True)
    def run(x):
        words = method.encode(x, RandomKeys(0, tf.constant(0), 0, 0))
        assert words.shape == (method.words(256, tf.float32),)
        return method.decode(words, 256, tf.float32)

    norms = np.repeat(np.linalg.norm(values.reshape(4, 64), axis=1), 64)
    levels = 7 * run(values).numpy() / norms
    np.testing.assert_allclose(levels, np.rint(levels), atol=1e-4)
    assert np.all(np.abs(levels - 7 * values / norms) < 1 + 1e-4)


def test_entries_beyond_the_capacity_stay_in_the_residual(monkeypatch):
    """With room for a few entries, the first ones are sent."""
    monkeypatch.setattr(QSGD, "_elias_words", lambda self, size: 3)
    method = QSGD(levels=15, bucket=64)
    simulation = Simulation(method, [(200,)], 2, "float64", error_feedback=True)
    values = np.random.default_rng(0).normal(size=(2, 200))
    (total,) = simulation.step([[v] for v in values])
    for value, (sent,), (residual,) in zip(
        values, simulation.sent, simulation.residual, strict=True
    ):
        positions = np.flatnonzero(sent)
        assert 2 < positions.size < 20
        assert positions.max() < 40
        np.testing.assert_allclose(sent + residual, value, rtol=1e-15)
    np.testing.assert_array_equal(total, simulation.sent[0][0] + simulation.sent[1][0])


@pytest.mark.parametrize("coding", ["gamma", 1])
def test_bad_coding(coding):
    with pytest.raises(ValueError, match="`coding` must be"):
        QSGD(coding=coding)
