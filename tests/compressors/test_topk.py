"""Selection of the largest entries, and its ties."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tf_dgc.compressors import num_sent, tie_offsets, top_k
from tf_dgc.compressors.common import largest
from tf_dgc.compressors.common.largest import _by_heap, _by_threshold

# Few distinct values make many ties.
TIED = hnp.arrays(
    np.float32,
    st.integers(1, 300),
    elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-30, -3e38]),
)


def oracle(values, k, offset):
    cyclic = (np.arange(values.size) - offset) % values.size
    return np.sort(np.lexsort((cyclic, -np.abs(values)))[:k])


@settings(max_examples=60)
@given(values=TIED, share=st.floats(0, 1), shift=st.floats(0, 1, exclude_max=True))
def test_heap_and_threshold_match_the_oracle(values, share, shift):
    k = max(1, round(share * values.size))
    offset = int(shift * values.size)
    expected = oracle(values, k, offset)
    magnitudes = tf.abs(tf.constant(values))
    count, first = tf.constant(k), tf.constant(offset)
    for positions in (
        _by_heap(magnitudes, tf.range(values.size), count, first),
        _by_threshold(magnitudes, count, first),
    ):
        np.testing.assert_array_equal(positions, expected)


@pytest.mark.parametrize(
    ("k", "size"), [(20_000_000, 80_000_000), (250_000_000, 1_000_000_000)]
)
def test_most_of_a_large_tensor_is_not_few(k, size):
    """The number of entries is an int32 tensor."""
    for one_of in (16, 128):
        assert not largest._are_few(tf.constant(k), size, one_of)
        assert largest._are_few(tf.constant(size // one_of), size, one_of)


LARGE = 1 << 17
LARGE_INPUTS = {
    "normal": lambda rng: rng.normal(size=LARGE),
    "ties": lambda rng: np.round(rng.normal(size=LARGE), 1),
    "zero": lambda rng: np.zeros(LARGE),
    "mostly zero": lambda rng: np.where(rng.random(LARGE) < 1e-4, 1.0, 0.0),
    "a sample of the largest": lambda rng: np.where(
        np.arange(LARGE) % 64 == 0, 5.0, rng.normal(size=LARGE)
    ),
}


@pytest.mark.parametrize("path", ["native", "operations"])
@pytest.mark.parametrize("name", LARGE_INPUTS)
def test_sample_does_not_change_the_choice(monkeypatch, name, path):
    if path == "operations":
        monkeypatch.setattr(largest, "_on_a_cpu", lambda values: False)
    values = LARGE_INPUTS[name](np.random.default_rng(0)).astype("float32")
    for k in (1, 300, 8192, LARGE // 4, LARGE):
        positions, _ = top_k(tf.constant(values), k, tf.constant(LARGE - 5))
        np.testing.assert_array_equal(positions, oracle(values, k, LARGE - 5))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [1, 5, 400, 1000])
def test_values_belong_to_the_positions(dtype, k):
    values = np.random.default_rng(0).normal(size=1000).astype(dtype)
    positions, sent = top_k(tf.constant(values), k, tf.constant(0))
    np.testing.assert_array_equal(sent, values[positions])
    np.testing.assert_array_equal(positions, oracle(values, k, 0))


@pytest.mark.parametrize("values", [np.zeros(1000), np.full(1000, -2.5)])
def test_equal_entries_are_chosen_without_bias_by_position(values):
    values = tf.constant(values, tf.float32)

    @tf.function
    def select(step):
        (offset,) = tie_offsets([1000], 0, step)
        return top_k(values, 10, offset)[0]

    hits = np.zeros(1000)
    for step in range(1000):
        positions = select(tf.constant(step))
        assert positions.shape == (10,)
        hits[positions.numpy()] += 1
    tenths = hits.reshape(10, 100).sum(axis=1)
    # Each tenth should get 1000 of 10,000. Ten neighbors are chosen together, so the
    # standard deviation is about 95.
    assert np.all(np.abs(tenths - 1000) < 5 * 95)


def test_recall_does_not_depend_on_position():
    rng = np.random.default_rng(0)
    counts = np.zeros(10)
    for seed in range(50):
        values = rng.normal(size=1000).astype("float32")
        positions, _ = top_k(tf.constant(values), 50, tf.constant(seed * 19))
        expected = set(np.argsort(-np.abs(values))[:50])
        assert set(positions.numpy()) == expected
        counts += np.bincount(positions.numpy() // 100, minlength=10)
    assert counts.min() > 0.5 * counts.mean()


@pytest.mark.parametrize(
    ("size", "sparsity", "expected"),
    [
        (1000, 0.999, 1),
        (10_000, 0.9999, 1),
        (1001, 0.999, 2),
        (100, 0.29, 71),
        (5, 0.999, 1),
        (1, 0.0, 1),
        (1_048_576, 0.999, 1049),
        (7, 0.0, 7),
    ],
)
def test_num_sent(size, sparsity, expected):
    assert num_sent(size, sparsity) == expected
    assert int(num_sent(size, tf.constant(sparsity, tf.float64))) == expected


def test_tie_offsets_leave_the_global_seed_alone():
    tf.random.set_seed(7)
    expected = tf.random.uniform([3]).numpy()
    tf.random.set_seed(7)
    tie_offsets([10, 20], 0, tf.constant(1))
    np.testing.assert_array_equal(tf.random.uniform([3]), expected)
    assert [int(o) for o in tie_offsets([10, 20], 0, tf.constant(3))] == [
        int(o) for o in tie_offsets([10, 20], 0, tf.constant(3))
    ]
