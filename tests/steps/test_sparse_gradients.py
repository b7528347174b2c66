"""Gradients of a few rows: the same steps as with dense gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc import native_library
from tf_dgc.optimizers.validation import uses_error_feedback
from tf_dgc.steps import accumulation, native

SHAPE = (300, 33)  # rows cross the boundaries of parallel parts
STEPS = 4
SCHEDULE = tf_dgc.schedules.PiecewiseConstantSparsity([2], [0, 0.9])
METHODS = [
    tf_dgc.compressors.NoCompression(),
    tf_dgc.compressors.TwoBit(0.25),
    tf_dgc.compressors.SignSGD(),
    tf_dgc.compressors.STC(0.9),
    tf_dgc.compressors.AdaComp(),
    tf_dgc.compressors.RandomK(0.9),
    tf_dgc.compressors.PowerSGD(2),
    tf_dgc.compressors.ATOMO(2),
]
PATHS = (
    ["native", "tensorflow"]
    if native_library.load_library().library
    else ["tensorflow"]
)


def make_slices(rng, dtype):
    """Return a gradient of a few rows, some of them repeated."""
    rows = rng.integers(0, SHAPE[0], 20)
    rows[5:8] = rows[0]
    values = rng.normal(size=(20, SHAPE[1])).astype(dtype)
    return tf.IndexedSlices(tf.constant(values), tf.constant(rows), SHAPE)


def train(gradients, dtype="float32", momentum=0.9, **settings):
    """Return weights, residual, velocity and second moment after all steps."""
    settings = {"sparsity": 0.97, **settings}
    variable = keras.Variable(np.ones(SHAPE, dtype), dtype=dtype)
    inner_settings = settings.pop("inner", {})
    if momentum is None:
        inner = keras.optimizers.Adam(0.125, **inner_settings)
    else:
        inner = keras.optimizers.SGD(0.125, momentum, **inner_settings)
    optimizer = tf_dgc.DGCOptimizer(inner, **settings)
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, variable)])
    state = [*optimizer.residual, *optimizer.velocity, *optimizer.second_moment]
    return [variable.numpy(), *(v.numpy() for v in state)]


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("float32", {}),
        ("float64", {}),
        ("float16", {}),
        ("bfloat16", {"sparsity": 0.9}),
        ("float32", {"momentum": 0.0}),
        ("float32", {"sparsity": SCHEDULE}),
        ("float32", {"min_compress_size": 10**6}),
        ("float32", {"inner": {"clipvalue": 0.5}}),
        ("float32", {"momentum": None}),
        ("float16", {"momentum": None, "inner": {"clipvalue": 0.5}}),
        ("float32", {"momentum": None, "sparsity": SCHEDULE}),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_bit_equal_to_dense_gradients(monkeypatch, path, dtype, settings):
    if path != "native":
        monkeypatch.setattr(native, "is_available", lambda variables: False)
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
    rng = np.random.default_rng(3)
    sparse = [make_slices(rng, numpy_dtype) for _ in range(STEPS)]
    dense = [accumulation.to_dense(g, tf.zeros(SHAPE, dtype)) for g in sparse]
    actual, expected = (train(g, dtype, **settings) for g in (sparse, dense))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["clipnorm", "global_clipnorm"])
def test_norm_is_that_of_summed_rows(name):
    rng = np.random.default_rng(4)
    sparse = [make_slices(rng, "float32") for _ in range(STEPS)]
    dense = [accumulation.to_dense(g, tf.zeros(SHAPE)) for g in sparse]
    inner = {name: 0.25}
    for a, b in zip(train(sparse, inner=inner), train(dense, inner=inner), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("path", PATHS)
def test_without_rows_the_gradient_is_zero(monkeypatch, path):
    if path != "native":
        monkeypatch.setattr(native, "is_available", lambda variables: False)
    gradient = tf.IndexedSlices(tf.zeros((0, 33)), tf.zeros([0], tf.int32), SHAPE)
    weights, *state = train([gradient])
    np.testing.assert_array_equal(weights, np.ones(SHAPE))
    assert not any(np.any(s) for s in state)


def test_row_that_is_not_finite_skips_the_step():
    gradient = make_slices(np.random.default_rng(5), "float32")
    bad = tf.IndexedSlices(gradient.values * [np.nan], gradient.indices, SHAPE)
    weights, *state = train([bad])
    np.testing.assert_array_equal(weights, np.ones(SHAPE))
    assert not any(np.any(s) for s in state)


def test_rows_are_ascending_and_distinct():
    gradient = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), [7, 3, 7], (9, 1))
    rows = accumulation.to_rows(gradient, tf.zeros((9, 1)))
    np.testing.assert_array_equal(rows.indices, [3, 7])
    np.testing.assert_array_equal(rows.values, [[2.0], [5.0]])


@pytest.mark.parametrize("row", [-1, 300])
@pytest.mark.parametrize("path", PATHS)
def test_rows_out_of_range_raise(monkeypatch, path, row):
    if path != "native":
        monkeypatch.setattr(native, "is_available", lambda variables: False)
    gradient = tf.IndexedSlices(tf.ones((1, 33)), tf.constant([row]), SHAPE)
    with pytest.raises(tf.errors.InvalidArgumentError):
        train([gradient])


def make_optimizer(method, momentum=0.0, inner=None):
    """Return an optimizer that corrects momentum, Adam or nothing."""
    return tf_dgc.CompressedOptimizer(
        inner or keras.optimizers.SGD(0.125, momentum),
        method,
        corrections=tf_dgc.Corrections(momentum=momentum > 0),
    )


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("correction", ["nothing", "momentum", "adam"])
def test_every_method_supports_rows(method, correction):
    """In the native engine and TensorFlow operations, with and without residual."""
    if correction == "momentum" and not uses_error_feedback(method, None):
        pytest.skip("momentum correction needs error feedback")

    def weights(gradients):
        variable = keras.Variable(np.ones(SHAPE, "float32"))
        inner = keras.optimizers.Adam(0.125) if correction == "adam" else None
        momentum = 0.9 if correction == "momentum" else 0.0
        optimizer = make_optimizer(method, momentum, inner)
        for gradient in gradients:
            optimizer.apply_gradients([(gradient, variable)])
        state = [*optimizer.residual, *optimizer.velocity, *optimizer.second_moment]
        return [variable.numpy(), *(v.numpy() for v in state)]

    rng = np.random.default_rng(6)
    sparse = [make_slices(rng, "float32") for _ in range(3)]
    dense = [accumulation.to_dense(g, tf.zeros(SHAPE)) for g in sparse]
    for a, b in zip(weights(sparse), weights(dense), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif("native" not in PATHS, reason="there are no native operations")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_never_becomes_dense(dtype):
    variable = keras.Variable(np.ones(SHAPE, "float32"))
    optimizer = make_optimizer(tf_dgc.compressors.TwoBit(0.25), 0.9)
    optimizer.build([variable])

    @tf.function
    def step(values, rows):
        gradient = tf.IndexedSlices(values, rows, SHAPE)
        optimizer.apply_gradients([(gradient, variable)])

    values = tf.TensorSpec([None, SHAPE[1]], dtype)
    graph = step.get_concrete_function(values, tf.TensorSpec([None], tf.int32)).graph
    scattered = [o for o in graph.get_operations() if o.type == "ScatterNd"]
    assert not scattered


@pytest.mark.parametrize("row", [-1, 300])
def test_rows_out_of_range_raise_in_the_engine(row):
    variable = keras.Variable(np.ones(SHAPE, "float32"))
    optimizer = make_optimizer(tf_dgc.compressors.TwoBit(0.25))
    gradient = tf.IndexedSlices(tf.ones((1, 33)), tf.constant([row]), SHAPE)
    with pytest.raises(tf.errors.InvalidArgumentError):
        optimizer.apply_gradients([(gradient, variable)])
