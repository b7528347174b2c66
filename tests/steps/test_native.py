"""The native operations, bit-equal to the TensorFlow operations."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import wire_reference
from harness import Trainer, initial_weights, make_gradients
from selection import rows

import tf_dgc
from tf_dgc import native_library
from tf_dgc.codecs import buffer
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.steps import native
from tf_dgc.steps.base import StepPlan

pytestmark = pytest.mark.skipif(
    native_library.load_library().library is None,
    reason=f"no native operations: {native_library.load_library().reason}",
)

O = keras.optimizers  # noqa: E741
STEPS = 12
SCHEDULE = tf_dgc.schedules.PiecewiseConstantSparsity([3, 6], [0.0, 0.75, 0.99])
SHAPES = [(40, 50), (50,), (130, 70), (7, 3), (0, 4)]
CASES = {
    "momentum": (lambda: O.SGD(0.1, momentum=0.9), {}),
    "nesterov": (lambda: O.SGD(0.1, momentum=0.9, nesterov=True), {}),
    "no momentum": (lambda: O.SGD(0.1), {}),
    "no masking": (
        lambda: O.SGD(0.1, momentum=0.9),
        {"corrections": tf_dgc.Corrections(factor_masking=False)},
    ),
    "no correction": (
        lambda: O.SGD(0.1, momentum=0.9),
        {"corrections": tf_dgc.Corrections(momentum=False)},
    ),
    "clipnorm": (lambda: O.SGD(0.1, momentum=0.9, clipnorm=3.0), {}),
    "global_clipnorm": (lambda: O.SGD(0.1, momentum=0.9, global_clipnorm=5.0), {}),
    "clipvalue": (lambda: O.SGD(0.1, momentum=0.9, clipvalue=0.5), {}),
    "loss scale": (lambda: O.SGD(0.1, momentum=0.9, loss_scale_factor=3.0), {}),
    # A power of 2, so that TensorFlow may multiply by the learning rate first.
    "decay": (lambda: O.SGD(0.1, momentum=0.9, weight_decay=2**-6), {}),
    "adam": (lambda: O.Adam(0.01), {}),
    "schedule": (lambda: O.SGD(0.1, momentum=0.9), {"sparsity": SCHEDULE}),
    "all compressed": (lambda: O.SGD(0.1, momentum=0.9), {"min_compress_size": 0}),
    "one entry": (lambda: O.SGD(0.1, momentum=0.9), {"sparsity": 0.9999}),
    "bfloat16": (lambda: O.SGD(0.1, momentum=0.9), {"value_dtype": "bfloat16"}),
    "float16": (lambda: O.SGD(0.1, momentum=0.9), {"value_dtype": "float16"}),
    "sign": (lambda: O.SGD(0.1, momentum=0.9), {"value_dtype": "sign"}),
    "mxint8": (
        lambda: O.SGD(0.1, momentum=0.9),
        {"value_dtype": "mxint8", "uncompressed_dtype": "bfloat16"},
    ),
    "mxfp4": (
        lambda: O.SGD(0.1, momentum=0.9),
        {"value_dtype": "mxfp4", "uncompressed_dtype": "mxint8", "sparsity": SCHEDULE},
    ),
    "float32": (lambda: O.SGD(0.1, momentum=0.9), {"value_dtype": "float32"}),
}


def train(strategy, case, dtype, gradients):
    """Return weights, residuals, velocities and stats after the steps."""
    inner, settings = CASES[case]
    settings = {"sparsity": 0.97, **settings}
    weights = initial_weights(dtype, SHAPES)
    trainer = Trainer(
        strategy, lambda: tf_dgc.DGCOptimizer(inner(), **settings), weights
    )
    for step in gradients:
        trainer.step(step)
    optimizer = trainer.optimizer
    state = trainer.local(optimizer.residual) + trainer.local(optimizer.velocity)
    return [*trainer.weights(), *itertools.chain(*state)], optimizer.stats


ONE_WORKER = [(case, "float32", 1) for case in CASES]


@pytest.mark.parametrize(
    ("case", "dtype", "num_workers"),
    rows(
        [
            *ONE_WORKER,
            *itertools.product(
                ["momentum", "schedule"], ["float64", "float32"], [2, 3]
            ),
            *itertools.product(["momentum", "bfloat16"], ["bfloat16", "float16"], [1]),
            ("float32", "float64", 2),
            ("adam", "float64", 2),
            ("sign", "float64", 2),
            ("mxint8", "float64", 1),
            ("mxfp4", "float64", 2),
        ],
        # test_all_paths.py has more cases with similar settings.
        [
            ("adam", "float32", 1),
            ("momentum", "float32", 3),
            ("bfloat16", "float16", 1),
        ],
    ),
)
def test_both_paths_give_the_same_bits(
    strategies, monkeypatch, case, dtype, num_workers
):
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
    gradients = make_gradients(num_workers, STEPS, numpy_dtype, SHAPES)
    native_state, native_stats = train(
        strategies[num_workers], case, numpy_dtype, gradients
    )
    monkeypatch.setattr(native, "is_available", lambda variables: False)
    expected, expected_stats = train(
        strategies[num_workers], case, numpy_dtype, gradients
    )
    assert native_stats == expected_stats
    for a, b in zip(native_state, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_warning_under_xla():
    native.warn_of_xla.cache_clear()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(300)])
    sgd = O.SGD(0.1, momentum=0.9)
    model.compile(tf_dgc.DGCOptimizer(sgd, 0.9), "mse", jit_compile=True)
    with pytest.warns(RuntimeWarning, match="jit_compile=False") as caught:
        model.train_on_batch(np.ones((2, 4)), np.ones((2, 300)))
    assert len([w for w in caught if "XLA" in str(w.message)]) == 1


# --- the operations themselves --------------------------------------------------------


def run_compress(gradients, counts, layout, momentum=0.5, offsets=None, scales=None):
    """Compress from zero state; return words, velocity and residual."""
    variables = [tf.Variable(tf.zeros([t.size], t.dtype)) for t in layout + layout]
    velocity, residual = variables[: len(layout)], variables[len(layout) :]
    words = native_library.load_library().library.tf_dgc_compress(
        gradients=gradients,
        velocity=[v.handle for v in velocity],
        residual=[v.handle for v in residual],
        momentum=tf.constant(momentum, tf.float64),
        scales=tf.constant(scales or [1.0] * len(layout), tf.float64),
        counts=tf.constant(counts),
        offsets=tf.constant(offsets or [0] * len(layout)),
        rows=[],
        sparse=[],
        moments=[],
        divided=[],
        divisors=tf.zeros([0, 5], tf.float64),
        nesterov=False,
        factor_masking=True,
        largest_exponents=native._exponents(StepPlan(layout, counts, False)),
        **native.layout_attributes(StepPlan(layout, counts, False)),
    )
    return words, velocity, residual


def reference_layout(layout):
    return [(t.size, t.dtype.name, t.wire_name) for t in layout]


@pytest.mark.parametrize(
    "value_dtype", ["float32", "bfloat16", "float16", "sign", "mxint8", "mxfp4"]
)
@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_buffer_equals_the_reference(monkeypatch, value_dtype, level):
    monkeypatch.setenv("TF_DGC_VECTOR_LEVEL", level)
    rng = np.random.default_rng(3)
    layout = [
        TensorSpec("", (70_000,), tf.float32, False, value_dtype),
        TensorSpec("", (33,), tf.float64, True, "float64"),
        TensorSpec("", (500,), tf.float64, False, value_dtype),
        TensorSpec("", (77,), tf.float32, True, None, "bfloat16"),
        TensorSpec("", (77,), tf.float32, True, None, "mxint8"),
    ]
    counts = [97, 33, 6, 77, 77]
    gradients = [rng.normal(size=t.size).astype(t.dtype.name) for t in layout]
    words, _, residual = run_compress(gradients, counts, layout)
    selections = []
    for g, k, tensor in zip(gradients, counts, layout, strict=True):
        positions = np.sort(np.argsort(-np.abs(g))[:k])
        selections.append(
            (None, g) if tensor.uncompressed else (positions, g[positions])
        )
    reference = wire_reference.encode(
        reference_layout(layout), counts, selections, True
    )
    np.testing.assert_array_equal(words.numpy().view(np.uint32), reference)
    decoded, finite = wire_reference.decode(reference, reference_layout(layout), counts)
    assert finite
    for g, r, (positions, values) in zip(gradients, residual, decoded, strict=True):
        expected = g.copy()
        expected[slice(None) if positions is None else positions] -= values.astype(
            g.dtype
        )
        np.testing.assert_array_equal(r, expected)


@pytest.mark.parametrize("content", ["zeros", "equal", "few zeros left"])
def test_ties_are_broken_from_the_offset(content):
    n, k, offset = 100_000, 100, 99_950
    gradient = np.full(n, 0.0 if content == "zeros" else -2.0, "float32")
    if content == "few zeros left":
        gradient[:] = 0
        gradient[7:57] = 1.0
    layout = [TensorSpec("", (n,), tf.float32, False, "float32")]
    words, _, _ = run_compress([gradient], [k], layout, offsets=[offset])
    ((positions, _),), _ = wire_reference.decode(
        words.numpy().view(np.uint32), reference_layout(layout), [k]
    )
    cyclic = (np.arange(n) - offset) % n
    expected = np.sort(np.lexsort((cyclic, -np.abs(gradient)))[:k])
    np.testing.assert_array_equal(positions, expected)


def test_denormals_are_zero():
    """A velocity that decays to denormals would make every step slow."""
    layout = [TensorSpec("", (5000,), tf.float32, False, "float32")]
    gradient = np.full(5000, 1e-39, "float32")
    _, velocity, residual = run_compress([gradient], [5], layout)
    assert not np.any(velocity[0].numpy())
    assert not np.any(residual[0].numpy())


@pytest.mark.parametrize("share", [1, 7, 5000])
def test_nan_entries_are_skipped(share):
    """Scales of NaN skip a whole step (`clipping.drop`)."""
    layout = [
        TensorSpec("", (5000,), tf.float32, False, "float32"),
        TensorSpec("", (5,), tf.float32, True, "float32"),
    ]
    gradient = np.ones(5000, "float32")
    gradient[::share] = np.nan
    words, velocity, residual = run_compress(
        [gradient, np.ones(5, "float32")], [5, 5], layout
    )
    assert words[buffer.FLAGS_WORD] == 1
    finite = np.isfinite(gradient)
    for state in (velocity[0].numpy(), residual[0].numpy()):
        assert not np.any(state[~finite])
        assert np.count_nonzero(state) == max(np.count_nonzero(finite) - 5, 0)
    np.testing.assert_array_equal(velocity[1], np.ones(5))


def test_overflow_of_the_residual_counts_as_nonfinite():
    layout = [TensorSpec("", (5000,), tf.float64, False, "float64")]
    gradient = np.full(5000, 1e308)
    words, _, _ = run_compress([gradient], [5], layout, scales=[10.0])
    assert words[buffer.FLAGS_WORD] == 1


# --- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "offsets", "size", "message"),
    [
        ([6], [0], 5, "k = 6 entries of a tensor of 5"),
        ([0], [0], 5, "k = 0 entries of a tensor of 5"),
        ([1], [5], 5, "offset"),
        ([1], [0], 4, "must have 4 entries"),
        ([1, 1], [0], 5, "one count per tensor"),
    ],
)
def test_invalid_arguments_raise(counts, offsets, size, message):
    layout = [TensorSpec("", (5,), tf.float32, False, "float32")]
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        run_compress([np.ones(size, "float32")], counts, layout, offsets=offsets)


def test_variable_with_another_shape_raises():
    layout = [TensorSpec("", (5,), tf.float32, True, "float32")]
    words, _, _ = run_compress([np.ones(5, "float32")], [5], layout)
    variable = tf.Variable(tf.zeros([5]), shape=tf.TensorShape(None))
    variable.assign(tf.zeros([2, 2]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="tensor of 4"):
        descend(variable, words, layout, [5])


def descend(variable, words, layout, counts):
    return native_library.load_library().library.tf_dgc_descend(
        variables=[variable.handle],
        rate=tf.constant(0.5, tf.float64),
        buffers=words[tf.newaxis],
        counts=tf.constant(counts),
        T=[t.dtype for t in layout],
        **native.layout_attributes(StepPlan(layout, counts, False)),
    )


LAYOUT = [TensorSpec("", (1000,), tf.float32, False, "float32")]


def valid_words():
    gradient = np.random.default_rng(0).normal(size=1000).astype("float32")
    return run_compress([gradient], [4], LAYOUT)[0].numpy().view(np.uint32)


def seal(words, change):
    change(words)
    return wire_reference.seal(words)


def set_word(i, value):
    def change(words):
        words[i] = value

    return change


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda w: w[:3], "too short"),
        (lambda w: w[:-1], "words and claims"),
        (lambda w: seal(w, set_word(0, 0x44474302)), "format version 2, not 1"),
        (lambda w: seal(w, set_word(0, 7)), "not one of tf_dgc"),
        (lambda w: seal(w, set_word(1, 7)), "another model"),
        (lambda w: seal(w, set_word(2, 6)), "unknown flags"),
        (lambda w: np.where(np.arange(w.size) == 9, w ^ 4, w), "checksum"),
        (lambda w: seal(w, set_word(-1, 0x7F800000)), "not finite"),
        (lambda w: seal(w, set_word(6, 0)), "positions, not 4"),
    ],
)
def test_malformed_buffer_raises_and_changes_nothing(corrupt, message):
    words = tf.constant(corrupt(valid_words()).astype(np.uint32).view(np.int32))
    variable = tf.Variable(tf.ones([1000]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=message) as error:
        descend(variable, words, LAYOUT, [4])
    assert "worker 0" in str(error.value)
    np.testing.assert_array_equal(variable, np.ones(1000))


def test_any_flipped_bit_raises():
    valid = valid_words()
    variable = tf.Variable(tf.ones([1000]))
    for bit in range(32 * valid.size):
        words = valid.copy()
        words[bit // 32] ^= np.uint32(1 << bit % 32)
        with pytest.raises(tf.errors.InvalidArgumentError):
            descend(variable, tf.constant(words.view(np.int32)), LAYOUT, [4])


def test_value_read_before_stays_unchanged():
    words = tf.constant(valid_words().view(np.int32))
    variable = tf.Variable(tf.ones([1000]))
    before = variable.read_value()
    descend(variable, words, LAYOUT, [4])
    assert np.count_nonzero(variable.numpy() != 1) == 4
    np.testing.assert_array_equal(before, np.ones(1000))
