import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_dgc import payload, wire
from tf_dgc.wire import Selection, TensorLayout

TENSORS = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.sampled_from([tf.float32, tf.float64]),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


def random_selections(rng, layout, counts):
    selections = []
    for tensor, k in zip(layout, counts, strict=True):
        values = rng.normal(size=k).astype(tensor.dtype.as_numpy_dtype)
        positions = None
        if not tensor.exempt:
            positions = np.sort(rng.choice(tensor.size, k, replace=False))
            positions = tf.constant(positions, tf.int32)
        selections.append(Selection(positions, tf.constant(values)))
    return selections


@settings(max_examples=40, deadline=None)
@given(tensors=TENSORS, num_workers=st.integers(1, 4), seed=st.integers(0, 1000))
def test_decode_sums_what_was_encoded(tensors, num_workers, seed):
    rng = np.random.default_rng(seed)
    layout = [TensorLayout(*t) for t in tensors]
    counts = [t.size if t.exempt else int(rng.integers(1, t.size + 1)) for t in layout]
    expected = [np.zeros(t.size, t.dtype.as_numpy_dtype) for t in layout]
    buffers, nonfinite = [], 0
    for _ in range(num_workers):
        selections = random_selections(rng, layout, counts)
        finite = bool(rng.integers(2))
        nonfinite += not finite
        buffers.append(wire.encode(selections, tf.constant(finite)))
        assert buffers[-1].shape == (wire.sparse_words(layout, counts),)
        for total, (positions, values) in zip(expected, selections, strict=True):
            total[slice(None) if positions is None else positions.numpy()] += values
    sums, count = wire.decode(tf.stack(buffers), layout, counts)
    assert int(count) == nonfinite
    for mine, total in zip(sums, expected, strict=True):
        np.testing.assert_array_equal(mine, total)  # same order of additions: exact


def test_dense_vector_round_trip():
    layout = [
        TensorLayout(3, tf.float32, False),
        TensorLayout(2, tf.float64, True),
    ]
    tensors = [tf.constant([1.0, 2.0, 3.0]), tf.constant([0.1, 0.2], tf.float64)]
    vector = wire.encode_dense(tensors, tf.constant(False))
    assert vector.dtype == tf.float64
    assert 2 * vector.shape[0] == wire.dense_words(layout)
    sums, nonfinite = wire.decode_dense(vector + vector, layout)
    assert int(nonfinite) == 2
    for mine, t in zip(sums, tensors, strict=True):
        assert mine.dtype == t.dtype
        np.testing.assert_array_equal(mine, 2 * t)


def test_positions_above_2_to_the_24_are_exact():
    size = 2**24 + 10
    layout = [TensorLayout(size, tf.float32, False)]
    at = tf.constant([2**24 + 1, 2**24 + 3])
    buffer = wire.encode([Selection(at, tf.constant([1.0, 2.0]))], tf.constant(True))
    (total,), _ = wire.decode(buffer[tf.newaxis], layout, [2])
    np.testing.assert_array_equal(tf.where(total)[:, 0], at)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 60),
    sparsity=st.floats(0, 0.99),
    exempt=st.booleans(),
    momentum=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_pack_loses_nothing(size, sparsity, exempt, momentum, seed):
    """What is sent plus what stays is what was there, exactly, in float64."""
    rng = np.random.default_rng(seed)
    residual = tf.constant(rng.normal(size=size) * rng.integers(0, 2, size))
    velocity = tf.constant(rng.normal(size=size)) if momentum else None
    layout = [TensorLayout(size, tf.float64, exempt)]
    step = payload.plan(layout, sparsity, num_workers=1)
    vector, words, (v,), (r,) = payload.pack(
        step, [velocity], [residual], tf.constant(True), [tf.constant(0)]
    )
    (sent,), _ = payload.unpack(step, vector, words[tf.newaxis])
    np.testing.assert_array_equal(sent + r, residual)
    assert not np.any((sent.numpy() != 0) & (r.numpy() != 0))
    if momentum and (exempt or step.dense or step.counts[0] == size):
        np.testing.assert_array_equal(v, velocity)  # momentum survives


def test_plan_goes_dense_where_gathering_costs_more():
    layout = [TensorLayout(1_000_000, tf.float32, False)]
    assert payload.plan(layout, 0.75, num_workers=32).dense is True
    assert payload.plan(layout, 0.75, num_workers=2).dense is False
    assert payload.plan(layout, 0.999, num_workers=64).dense is False
    assert payload.plan(layout, 0.0, num_workers=1).dense is True
    for sparsity, num_workers in [(0.75, 32), (0.75, 2), (0.999, 64), (0.0, 1)]:
        static = payload.plan(layout, sparsity, num_workers)
        scheduled = payload.plan(layout, tf.constant(sparsity, tf.float64), num_workers)
        assert bool(scheduled.dense) == static.dense
        assert int(scheduled.entries) == static.entries
