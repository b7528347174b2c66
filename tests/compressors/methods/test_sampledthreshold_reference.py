"""`SampledThreshold` against NumPy."""

import keras
import numpy as np
import pytest
from selection import rows

import tf_dgc
from tf_dgc.compressors import SampledThreshold
from tf_dgc.testing import Simulation


def test_small_tensors_by_hand():
    simulation = Simulation(SampledThreshold(0.5), [(4,)], 2)
    (total,) = simulation.step([[[1.0, -3.0, 2.0, 0.5]], [[0.25, 0.5, -1.0, 2.0]]])
    np.testing.assert_array_equal(total, [0.0, -3.0, 2.0 - 1.0, 2.0])
    np.testing.assert_array_equal(simulation.residual[0][0], [1.0, 0.0, 0.0, 0.5])


def test_sends_the_largest_and_at_most_k():
    """The m largest entries are sent, where m is k or a little less."""
    n, k, steps = 20_000, 200, 30
    values = np.random.default_rng(0).normal(size=n)
    simulation = Simulation(SampledThreshold(0.99), [(n,)], 1, "float64", False)
    order = np.argsort(-np.abs(values))
    counts = []
    for _ in range(steps):
        (total,) = simulation.step([[values]])
        count = np.count_nonzero(total)
        expected = np.zeros(n)
        expected[order[:count]] = values[order[:count]]
        np.testing.assert_array_equal(total, expected)
        counts.append(count)
    assert max(counts) == k  # trimmed
    assert len(set(counts)) > 3  # below k, the sample decides
    # 16 of 1600 samples are expected above the threshold; 8 more are 2 deviations.
    assert np.mean(np.array(counts) >= k / 2) > 0.9
    assert 0.75 * k < np.mean(counts) < k


def test_workers_sample_independently():
    values = np.random.default_rng(0).normal(size=20_000)
    simulation = Simulation(SampledThreshold(0.99), [(20_000,)], 4, "float64")
    simulation.step([[values]] * 4)
    counts = {np.count_nonzero(sent[0]) for sent in simulation.sent}
    assert len(counts) > 1


@pytest.mark.parametrize("keys_per_tensor", rows([40, 150], [40]))
def test_positions_are_chosen_evenly(keys_per_tensor):
    """10 of 100 equal entries fit; 5.5 deviations have a probability of 4e-8."""
    simulation = Simulation(SampledThreshold(0.9), [(100,)] * keys_per_tensor, 1)
    simulation.step([[np.ones(100)] * keys_per_tensor])
    sent = np.stack(simulation.sent[0]) != 0
    np.testing.assert_array_equal(sent.sum(axis=1), 10)
    np.testing.assert_allclose(
        sent.mean(axis=0), 0.1, atol=5.5 * np.sqrt(0.1 * 0.9 / keys_per_tensor)
    )


def test_mostly_zeros():
    """A threshold of 0 does not send zeros."""
    values = np.zeros((50, 100), "float32")
    values[[0, 40], 7] = 1.0, -2.0
    optimizer = tf_dgc.CompressedOptimizer(
        keras.optimizers.SGD(1.0), SampledThreshold(0.9)
    )
    variable = keras.Variable(np.zeros(values.shape))
    optimizer.apply([values], [variable])
    np.testing.assert_array_equal(-variable.numpy(), values)
    assert optimizer.stats.entries_per_step == 2


def test_bytes():
    """10 places among 1000 + 10: 6 low bits each, 10 + (1009 >> 6) high bits."""
    simulation = Simulation(SampledThreshold(0.99), [(1000,)], 1)
    simulation.step([[np.ones(1000)]])
    assert simulation.sent_bytes == 4 * (5 + 2 + 1 + 10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1.0}, "sparsity"),
        ({"sample": 0.0}, "sample=0.0"),
        ({"value_dtype": "sign"}, "value_dtype='sign'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        SampledThreshold(**settings)
