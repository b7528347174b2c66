"""Buckets, bins and blocks longer than tensors or than float32 can count."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from peak_memory import peak_memory

import tf_dgc
from tf_dgc import compressors, native_library
from tf_dgc.testing import Simulation

LONG = 2**22  # entries, which take 16 MiB in float32
MIB = 2**20
native = pytest.mark.skipif(
    native_library.load_library().library is None,
    reason="there are no native operations",
)


def make_optimizer(method, shape, dtype="float32", **settings):
    variable = keras.Variable(np.zeros(shape), dtype=dtype)
    inner = keras.optimizers.SGD(1.0)
    settings = {"min_compress_size": 0, **settings}
    optimizer = tf_dgc.CompressedOptimizer(inner, method, **settings)
    optimizer.build([variable])
    return optimizer, variable


@pytest.mark.parametrize(
    "method",
    [
        # In ascending order: freed memory is not always returned to the system.
        compressors.Uniform8Bit(bucket=LONG),
        compressors.AdaComp(bin_size=4 * LONG),
        compressors.QSGD(bucket=8 * LONG, coding="fixed"),
    ],
    ids=lambda m: m.name,
)
def test_memory_of_a_tensorflow_step_depends_on_the_tensor(method):
    simulation = Simulation(method, [(10, 10)], 1)
    gradient = np.ones((10, 10), "float32")
    assert peak_memory(lambda: simulation.step([[gradient]])) < 16 * MIB


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (compressors.QSGD(bucket=100), compressors.QSGD(bucket=10**9)),
        (compressors.Uniform8Bit(), compressors.Uniform8Bit(10**9)),
        (compressors.AdaComp(100), compressors.AdaComp(10**9)),
        # 7 entries of a chunk of 100 are the same share.
        (compressors.ChunkedTopK(100, 7), compressors.ChunkedTopK(10**11, 7 * 10**9)),
        (
            compressors.RotatedQuantization(block=64),
            compressors.RotatedQuantization(block=2**40),
        ),
    ],
    ids=lambda m: m.name,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_longer_than_the_tensor_equals_the_whole_tensor(short, long, dtype):
    gradient = np.random.default_rng(0).normal(size=(10, 10)).astype("float32")
    results = []
    for method in (short, long):
        optimizer, variable = make_optimizer(method, (10, 10), dtype)
        for _ in range(2):
            optimizer.apply([tf.cast(gradient, dtype)], [variable])
        results.append(tf.cast(variable.value, tf.float32).numpy())
    np.testing.assert_array_equal(*results)


@native
@pytest.mark.parametrize(
    ("method", "shape"),
    [
        # The least common multiple of bucket and word is 3.2 million entries.
        (compressors.Uniform8Bit(bucket=100_003), (600, 500)),
        (compressors.RotatedQuantization(block=4 * LONG), (40, 50)),
    ],
    ids=["uniform_8bit", "rotated"],
)
def test_memory_of_a_native_step_depends_on_the_tensor(method, shape):
    optimizer, variable = make_optimizer(method, shape)
    gradient = tf.ones(shape)
    assert peak_memory(lambda: optimizer.apply([gradient], [variable])) < 16 * MIB


@native
@pytest.mark.parametrize(
    ("make_method", "rest"),
    [
        (lambda n: compressors.QSGD(1, n, "fixed"), 1),
        (compressors.Uniform8Bit, 0),
    ],
    ids=["qsgd", "uniform_8bit"],
)
def test_bucket_longer_than_float32_can_count(make_method, rest):
    """The last entry of the first bucket is too small to be sent."""
    bucket = 2**24 + 1
    optimizer, variable = make_optimizer(
        make_method(bucket), (1, bucket + rest), error_feedback=False
    )
    gradient = np.zeros((1, bucket + rest), "float32")
    gradient[0, [0, bucket - 1]] = 1.0, 1e-3
    optimizer.apply([tf.constant(gradient)], [variable])
    gradient[0, bucket - 1] = 0
    np.testing.assert_allclose(variable.numpy(), -gradient, rtol=1e-6)
