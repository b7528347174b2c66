"""The wire format against a second implementation of wire_format.md."""

import functools
import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
import wire_reference
from harness import damage_replies
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import fewer, in_turn, rows

import tf_dgc
from tf_dgc.codecs import elias_fano, value_types
from tf_dgc.codecs.buffer import (
    SelectedEntries,
    decode_dense,
    decode_sparse,
    dense_words,
    encode_dense,
    encode_sparse,
    sparse_words,
)
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.schedules import ScheduledSparsity
from tf_dgc.steps import tensorflow_ops
from tf_dgc.steps.base import plan_step

VALUE_DTYPES = [
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "sign",
    "mxint8",
    "mxfp4",
]
TENSORS = st.lists(
    st.builds(
        TensorSpec,
        st.just(""),
        st.tuples(st.integers(1, 5000)),
        st.sampled_from([tf.float32, tf.float64]),
        st.booleans(),
        st.sampled_from(VALUE_DTYPES),
        st.sampled_from([None, *value_types.UNCOMPRESSED_CHOICES]),
        narrow_dtype=st.none(),
        max_magnitude=st.just(math.inf),
    ),
    min_size=1,
    max_size=4,
)
REFUSAL = (ValueError, tf.errors.InvalidArgumentError)


def reference_layout(layout):
    """Return the layout in the form of the reference."""
    return [(t.size, t.dtype.name, t.wire_name) for t in layout]


def random_selections(rng, layout, counts, scale=1.0):
    selections = []
    for tensor, k in zip(layout, counts, strict=True):
        entries = rng.normal(size=k) * scale * 2.0 ** rng.integers(-20, 20, k)
        entries *= rng.integers(0, 8, k) > 0
        entries = np.clip(entries, tensor.dtype.min, tensor.dtype.max)
        positions = np.sort(rng.choice(tensor.size, k, replace=False))
        if tensor.uncompressed:
            positions = None
        selections.append((positions, entries.astype(tensor.dtype.as_numpy_dtype)))
    return selections


def encode(layout, counts, selections, finite=True):
    coded = []
    for tensor, (positions, entries) in zip(layout, selections, strict=True):
        words = value_types.encode_values(tf.constant(entries), tensor.value_type)
        indices = None if positions is None else tf.constant(positions, tf.int32)
        coded.append(SelectedEntries(indices, words))
    return encode_sparse(layout, counts, coded, tf.constant(finite))


def as_words(buffer):
    return np.asarray(buffer).view(np.uint32)


def as_buffers(*words):
    return tf.constant(np.stack(words).view(np.int32))


def as_tensors(layout, counts):
    """Return counts as a schedule of the sparsity gives them."""
    return [
        k if t.uncompressed else tf.constant(k)
        for t, k in zip(layout, counts, strict=True)
    ]


# --- both implementations -------------------------------------------------------------


@settings(max_examples=fewer(100))
@given(
    layout=TENSORS,
    num_workers=st.integers(1, 3),
    seed=st.integers(0, 1000),
    density=st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]),
    scale=st.sampled_from([1.0, 1e-6, 1e33]),
    scheduled=st.booleans(),
)
def test_equals_the_reference(layout, num_workers, seed, density, scale, scheduled):
    rng = np.random.default_rng(seed)
    counts = [
        t.size
        if t.uncompressed
        else int(rng.integers(1, min(500, 2 + density * (t.size - 1))))
        for t in layout
    ]
    used_counts = as_tensors(layout, counts) if scheduled else counts
    expected = [np.zeros(t.size, t.dtype.as_numpy_dtype) for t in layout]
    buffers, nonfinite = [], 0
    for _ in range(num_workers):
        selections = random_selections(rng, layout, counts, scale)
        finite = bool(rng.integers(2))
        nonfinite += not finite
        buffer = encode(layout, used_counts, selections, finite)
        reference = wire_reference.encode(
            reference_layout(layout), counts, selections, finite
        )
        np.testing.assert_array_equal(as_words(buffer), reference)
        assert len(buffer) == int(sparse_words(layout, used_counts))
        buffers.append(buffer)
        decoded, decoded_finite = wire_reference.decode(
            reference, reference_layout(layout), counts
        )
        assert decoded_finite == finite
        for total, (positions, entries) in zip(expected, decoded, strict=True):
            indices = slice(None) if positions is None else positions
            with np.errstate(over="ignore"):
                total[indices] += entries.astype(total.dtype)
    sums, count = decode_sparse(tf.stack(buffers), layout, used_counts)
    assert int(count) == nonfinite
    for actual, total in zip(sums, expected, strict=True):
        np.testing.assert_array_equal(actual, total)  # same order of additions: exact


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value_dtype", "mode"),
    rows(
        itertools.product(VALUE_DTYPES, ["scheduled", "xla", "unknown shape", "graph"]),
        [
            ("float32", "scheduled"),
            ("sign", "scheduled"),
            ("float16", "graph"),
            ("bfloat16", "unknown shape"),
            ("mxfp4", "unknown shape"),
        ],
    ),
)
def test_in_functions(value_dtype, mode):
    rng = np.random.default_rng(0)
    layout = [
        TensorSpec("", (4321,), tf.float32, False, value_dtype),
        TensorSpec("", (5,), tf.float64, True, value_dtype),
        TensorSpec("", (0,), tf.float32, True, value_dtype),
        TensorSpec("", (700,), tf.float64, False, value_dtype),
        TensorSpec("", (1,), tf.float32, False, value_dtype),
        TensorSpec("", (7,), tf.float32, True, uncompressed_dtype="bfloat16"),
        TensorSpec("", (70,), tf.float64, True, uncompressed_dtype="mxint8"),
        TensorSpec("", (0,), tf.float32, True, uncompressed_dtype="mxint8"),
    ]
    counts = [50, 5, 0, 600, 1, 7, 70, 0]
    selections = random_selections(rng, layout, counts)
    expected = wire_reference.encode(reference_layout(layout), counts, selections, True)

    def run(buffers, *scheduled):
        used_counts = counts
        if scheduled:
            used_counts = [
                k if t.uncompressed else s
                for t, k, s in zip(layout, counts, scheduled, strict=True)
            ]
        return encode(layout, used_counts, selections), decode_sparse(
            buffers, layout, used_counts
        )

    signature = [tf.TensorSpec([2, None], tf.int32)] if "unknown" in mode else None
    run = tf.function(
        run, autograph=False, jit_compile=mode == "xla", input_signature=signature
    )
    buffers = as_buffers(expected, expected)
    scheduled = [tf.constant(k) for k in counts] if mode == "scheduled" else []
    buffer, (sums, _) = run(buffers, *scheduled)
    np.testing.assert_array_equal(as_words(buffer), expected)
    for actual, eager in zip(
        sums, decode_sparse(buffers, layout, counts)[0], strict=True
    ):
        np.testing.assert_array_equal(actual, eager)


@pytest.mark.parametrize(
    "value_dtype", ["float32", "bfloat16", "float16", "mxint8", "mxfp4"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounding(value_dtype, dtype):
    """Ties, overflow and underflow."""
    rng = np.random.default_rng(0)
    tied = (1 + np.arange(0, 1, 2.0**-12)) * 2.0 ** rng.integers(-14, 15, 2**12)
    limits = [65504, 65519.9, 65520, 3.3895e38, 3.4e38, 6e-8, 2.9e-8, 2.0**-25, 0, -0.0]
    if value_dtype not in wire_reference.SHARED:  # there it determines the scale
        limits = [*limits, np.inf]
    limits = [*limits, *([1e300] if dtype == "float64" else [])]
    entries = np.concatenate([tied, -tied, limits]).astype(dtype)
    words = value_types.encode_values(tf.constant(entries), value_dtype)
    actual = value_types.decode_values(
        words[tf.newaxis], value_dtype, len(entries), tf.float64
    )[0]
    expected = entries.astype("float64")
    if value_dtype != dtype:
        expected = wire_reference.rounded(entries, value_dtype)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


@settings(max_examples=fewer(200))
@given(
    value_dtype=st.sampled_from(list(wire_reference.SHARED)),
    exponents=st.lists(st.integers(-160, 127), min_size=1, max_size=3),
    k=st.integers(1, 100),
    seed=st.integers(0, 1000),
)
def test_rounding_errors_of_blocks_are_exact(value_dtype, exponents, k, seed):
    """Rounding is to nearest, whatever the range, and its error is a float32."""
    rng = np.random.default_rng(seed)
    entries = rng.uniform(-2, 2, k) * 2.0 ** rng.choice(exponents, k)
    largest = np.finfo(np.float32).max
    entries = np.clip(entries, -largest, largest).astype(np.float32)
    # TensorFlow's threads flush denormals to 0.
    entries[np.abs(entries) < np.finfo(np.float32).tiny] = 0
    words = value_types.encode_values(tf.constant(entries), value_dtype)
    assert len(words) == wire_reference.num_value_words(k, value_dtype)
    np.testing.assert_array_equal(
        as_words(words), wire_reference.value_words(entries, value_dtype)
    )
    sent = value_types.decode_values(words[tf.newaxis], value_dtype, k, tf.float32)[
        0
    ].numpy()
    error = entries.astype(np.float64) - sent
    np.testing.assert_array_equal(error, error.astype(np.float32))
    blocks = [slice(b, b + 32) for b in range(0, k, 32)]
    for block in blocks:
        block_max = float(np.abs(entries[block]).max())
        assert np.abs(sent[block]).max() <= 2.0 ** np.ceil(
            np.log2(max(block_max, 2.0**-126))
        )
        tolerance = {"mxint8": 2.0**-6, "mxfp4": 0.25}[value_dtype]
        assert np.all(
            np.abs(error[block]) <= np.maximum(tolerance * block_max, 2.0**-126)
        )


@pytest.mark.parametrize(
    ("value_dtype", "largest"), [("mxint8", 127 / 64), ("mxfp4", 6.0)]
)
def test_scales_are_powers_of_two(value_dtype, largest):
    """The largest value of a block is below the largest code, equal to it, or above."""
    for exponent in (-30, 0, 100):
        entries = np.float32([1.0, -largest, 1.999 * largest]) * np.float32(
            2.0**exponent
        )
        rounded = [wire_reference.rounded([e], value_dtype)[0] for e in entries]
        assert rounded[:2] == list(entries[:2])
        words = value_types.encode_values(tf.constant(entries), value_dtype)
        scale = int(words[0]) & 0xFF
        assert scale == {"mxint8": 128, "mxfp4": 128}[value_dtype] + exponent


@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
def test_nan_raises(value_dtype):
    layout = [TensorSpec("", (10,), tf.float32, False, value_dtype)]
    buffer = encode(layout, [2], [(np.array([1, 2]), np.array([1, np.nan], "float32"))])
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite of tensor 0"):
        decode_sparse(buffer[tf.newaxis], layout, [2])


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("size", [2**24 + 10, 2**30, 2**30 + 1, 2**31 - 1])
def test_positions_of_large_tensors_are_exact(size, scheduled):
    at = np.array([0, 2**24 + 1, 2**24 + 3, size - 2, size - 1])
    k = tf.constant(5) if scheduled else 5
    words = elias_fano.encode(tf.constant(at, tf.int32), size, k)
    layout = [(size, "float32", "float32")]
    assert len(words) == wire_reference.length(layout, [5]) - 5 - 5
    positions, _ = elias_fano.decode(words[tf.newaxis], size, k)
    np.testing.assert_array_equal(positions[0], at)


@pytest.mark.parametrize(
    ("value_dtype", "limit"),
    [("bfloat16", 3.6), ("float32", 5.6), ("mxint8", 2.6), ("mxfp4", 2.1)],
)
def test_bytes_per_entry(value_dtype, limit):
    layout = [TensorSpec("", (1_000_000,), tf.float32, False, value_dtype)]
    assert 4 * sparse_words(layout, [1000]) / 1000 <= limit


# --- hostile input --------------------------------------------------------------------

LAYOUT = [
    *(TensorSpec("", (90,), tf.float64, False, v) for v in VALUE_DTYPES),
    TensorSpec("", (3,), tf.float32, True, "float32"),
    *(
        TensorSpec("", (3,), tf.float32, True, None, t)
        for t in value_types.UNCOMPRESSED_CHOICES
    ),
]
COUNTS = [7] * len(VALUE_DTYPES) + [3] * 3


def valid_words(seed=0):
    rng = np.random.default_rng(seed)
    selections = random_selections(rng, LAYOUT, COUNTS)
    return wire_reference.encode(reference_layout(LAYOUT), COUNTS, selections, True)


@functools.cache
def compiled():
    return tf.function(lambda b: decode_sparse(b, LAYOUT, COUNTS), autograph=False)


def test_any_flipped_bit_raises():
    words, decode = valid_words(), compiled()
    decode(as_buffers(words, words))
    for i, bit in itertools.product(range(len(words)), range(32)):
        flipped = words.copy()
        flipped[i] ^= np.uint32(1 << bit)
        with pytest.raises(tf.errors.InvalidArgumentError, match="buffer of worker 1"):
            decode(as_buffers(words, flipped))


@pytest.mark.slow
@settings(max_examples=fewer(200))
@given(
    seed=st.integers(0, 20),
    flips=st.lists(st.tuples(st.integers(2, 100), st.integers(0, 31)), max_size=4),
)
def test_damage_with_a_valid_checksum(seed, flips):
    """Both implementations refuse the buffer, or both read the same values."""
    words = valid_words(seed)
    for i, bit in flips:
        words[i % len(words)] ^= np.uint32(1 << bit)
    words = wire_reference.seal(words)
    try:
        expected, finite = wire_reference.decode(
            words, reference_layout(LAYOUT), COUNTS
        )
    except ValueError:
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"Received: .*expected"
        ):
            compiled()(as_buffers(words, words))
        return
    sums, nonfinite = decode_sparse(as_buffers(words), LAYOUT, COUNTS)
    assert int(nonfinite) == (not finite)
    for actual, (positions, entries) in zip(sums, expected, strict=True):
        total = np.zeros(len(actual), actual.dtype.as_numpy_dtype)
        total[slice(None) if positions is None else positions] += entries
        # TensorFlow may flush denormals to 0.
        np.testing.assert_allclose(actual, total, rtol=0, atol=2e-38)


def encode_changed(layout, counts, positions, entries, change=lambda words: None):
    words = wire_reference.encode(
        reference_layout(layout), counts, [(positions, entries)], True
    )
    change(words)
    return wire_reference.seal(words)


def set_word(index, value):
    def change(words):
        words[index] = value

    return change


# 8 of 39: l = 2, 16 low bits in word 5, 17 high bits in word 6, values from word 7
MALFORMED = {
    "version of the wire format": ("float32", None, set_word(0, 0x44474302)),
    "fingerprint of the tensors": ("float32", None, set_word(1, 12345)),
    "unknown flags": ("float32", None, set_word(2, 2)),
    "length in words": ("float32", None, set_word(3, 14)),
    "number of positions": ("float32", None, set_word(6, 0xFF >> 1)),
    "too high of tensor 0": ("float32", [*range(7), 39], None),
    "positions out of order": ("float32", [0, 2, 1, 3, 4, 5, 6, 7], None),
    "bits that should be 0": ("float32", None, set_word(5, 1 << 31)),
    "values that are not finite": ("float32", None, set_word(7, 0x7F800000)),
    "negative magnitudes": ("sign", None, set_word(7, 0xBF800000)),
    "scales that are out of range": ("mxint8", None, set_word(7, 7)),
    "out of range of tensor 0": ("mxfp4", None, set_word(7, 2)),
}


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("problem", MALFORMED)
def test_each_check_names_the_problem(problem, scheduled):
    value_dtype, positions, change = MALFORMED[problem]
    layout, counts = [TensorSpec("", (39,), tf.float32, False, value_dtype)], [8]
    entries = np.ones(8, "float32")
    valid = encode_changed(layout, counts, np.arange(8) * 4, entries)
    positions = np.arange(8) * 4 if positions is None else positions
    malformed = encode_changed(
        layout, counts, positions, entries, change or (lambda words: None)
    )
    used_counts = as_tensors(layout, counts) if scheduled else counts
    with pytest.raises(ValueError, match="wrong"):
        wire_reference.decode(malformed, reference_layout(layout), counts)
    message = (
        f"The buffer of worker 1 is refused: .*{problem}.* Received: .*, expected: "
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        decode_sparse(as_buffers(valid, malformed), layout, used_counts)


@pytest.mark.parametrize(
    ("words", "scheduled"), in_turn([0, 1, 5, 14, 16], [False, True])
)
def test_wrong_length_raises(words, scheduled):
    layout, counts = [TensorSpec("", (40,), tf.float32, False, "float32")], [8]
    valid = encode_changed(layout, counts, np.arange(8) * 4, np.ones(8, "float32"))
    assert len(valid) == 15
    malformed = as_buffers(np.resize(valid, words))
    used_counts = as_tensors(layout, counts) if scheduled else counts
    decode = tf.function(
        lambda b: decode_sparse(b, layout, used_counts),
        input_signature=[tf.TensorSpec([1, None], tf.int32)],
        autograph=False,
    )
    with pytest.raises(REFUSAL, match=f"Received: {words}.*expected: 15"):
        decode_sparse(malformed, layout, used_counts)
    with pytest.raises(REFUSAL, match=f"Received: {words}.*expected: 15"):
        decode(malformed)


@pytest.mark.parametrize("eager", [False, True])
def test_refused_buffer_changes_no_weight(monkeypatch, eager):
    variable = keras.Variable(np.ones((40, 40), "float32"))
    optimizer = tf_dgc.DGCOptimizer(keras.optimizers.SGD(1.0), 0.99)
    optimizer.build([variable])
    damage_replies(monkeypatch)

    def step():
        optimizer.apply([tf.random.normal((40, 40))], [variable])

    with pytest.raises(tf.errors.InvalidArgumentError, match="The buffer of worker 0"):
        step() if eager else tf.function(step, autograph=False)()
    np.testing.assert_array_equal(variable.numpy(), 1)
    assert optimizer.stats.steps == 0


# --- sent values ----------------------------------------------------------------------


def test_dense_vector_round_trip():
    layout = [
        TensorSpec("", (3,), tf.float32, False, "sign"),
        TensorSpec("", (2,), tf.float64, True, "sign"),
    ]
    tensors = [tf.constant([1.0, 2.0, 3.0]), tf.constant([0.1, 0.2], tf.float64)]
    vector = encode_dense(tensors, tf.constant(False), tf.float64)
    assert vector.dtype == tf.float64
    assert 2 * vector.shape[0] == dense_words(layout)
    sums, nonfinite = decode_dense(vector + vector, layout)
    assert int(nonfinite) == 2
    for actual, t in zip(sums, tensors, strict=True):
        assert actual.dtype == t.dtype
        np.testing.assert_array_equal(actual, 2 * t)


@settings(max_examples=fewer(100))
@given(
    size=st.integers(1, 60),
    sparsity=st.floats(0, 0.99),
    uncompressed=st.sampled_from([None, "", *value_types.UNCOMPRESSED_CHOICES]),
    momentum=st.booleans(),
    dtype=st.sampled_from(["float32", "float64"]),
    value_dtype=st.sampled_from(VALUE_DTYPES),
    seed=st.integers(0, 1000),
)
def test_sent_values_and_residual_add_up(
    size, sparsity, uncompressed, momentum, dtype, value_dtype, seed
):
    """Sent values plus residual equal the values before.

    The sum is exact unless the residual itself is rounded, as with signs, whose
    values have a common magnitude.
    """
    rng = np.random.default_rng(seed)
    before = (rng.normal(size=size) * rng.integers(0, 2, size)).astype(dtype)
    velocity = tf.constant(rng.normal(size=size).astype(dtype)) if momentum else None
    uncompressed_dtype = uncompressed or None
    uncompressed = uncompressed is not None
    layout = [
        TensorSpec(
            "",
            (size,),
            tf.as_dtype(dtype),
            uncompressed,
            value_dtype,
            uncompressed_dtype,
        )
    ]
    step = plan_step(layout, sparsity, num_workers=1)
    vector, words, (v,), (r,) = tensorflow_ops.select_and_encode(
        step, [velocity], [tf.constant(before)], tf.constant(True), [tf.constant(0)]
    )
    (sent,), _ = tensorflow_ops.decode_and_sum(step, vector, words[tf.newaxis])
    if value_dtype == "sign":
        np.testing.assert_allclose(
            sent + r, before, rtol=0, atol=8 * np.finfo(dtype).eps
        )
    else:
        np.testing.assert_array_equal(sent + r, before)
    exact = uncompressed or step.dense or value_dtype in {dtype, "float64"}
    if exact and not uncompressed_dtype:
        assert not np.any((sent.numpy() != 0) & (r.numpy() != 0))
    if momentum and (uncompressed or step.dense or step.counts[0] == size):
        np.testing.assert_array_equal(v, velocity)  # momentum survives


def test_plan_is_dense_if_gathering_costs_more():
    layout = [TensorSpec("", (1_000_000,), tf.float32, False, "float32")]
    narrow = [layout[0]._replace(value_dtype="sign")]
    assert plan_step(layout, 0.75, num_workers=32).dense is True
    assert plan_step(layout, 0.75, num_workers=2).dense is False
    assert plan_step(layout, 0.75, num_workers=8).dense is True
    assert plan_step(narrow, 0.75, num_workers=8).dense is False
    assert plan_step(layout, 0.999, num_workers=64).dense is False
    assert plan_step(layout, 0.0, num_workers=1).dense is True
    for tensors, sparsity, num_workers in itertools.product(
        (layout, narrow), (0.0, 0.75, 0.999), (1, 2, 8, 32, 64)
    ):
        static = plan_step(tensors, sparsity, num_workers)
        schedule = ScheduledSparsity(tf.constant(sparsity, tf.float64), minimum=0.0)
        scheduled = plan_step(tensors, schedule, num_workers)
        assert bool(scheduled.dense) == static.dense
        assert int(scheduled.entries) == static.entries


@pytest.mark.parametrize(
    ("minimum", "num_workers", "never_dense"),
    [(0.75, 2, True), (0.75, 8, False), (0.0, 2, False), (0.99, 8, True)],
)
def test_plan_with_a_minimum_sparsity(minimum, num_workers, never_dense):
    layout = [TensorSpec("", (1_000_000,), tf.float32, False, "float32")]
    for sparsity in (minimum, 0.999):
        static = plan_step(layout, sparsity, num_workers)
        schedule = ScheduledSparsity(tf.constant(sparsity, tf.float64), minimum)
        scheduled = plan_step(layout, schedule, num_workers)
        assert (scheduled.dense is False) == never_dense
        assert bool(scheduled.dense) == static.dense
        assert int(scheduled.entries) == static.entries
        if never_dense:
            assert static.num_bytes <= scheduled.most_bytes
            assert (
                scheduled.most_bytes
                == plan_step(layout, minimum, num_workers).num_bytes
            )
        else:
            assert scheduled.most_bytes is None
