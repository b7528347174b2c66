"""Detection of values that are not finite, by TensorFlow and native operations."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dgc import clipping, native_library

DTYPES = ["float32", "float64", "bfloat16", "float16"]
native = pytest.mark.skipif(
    native_library.load_library().library is None, reason="not built"
)


@pytest.fixture(params=[False, pytest.param(True, marks=native)])
def all_finite(request):
    return lambda *tensors: bool(clipping.all_finite(tensors, request.param))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_entry_that_is_not_finite(all_finite, dtype):
    limit = tf.as_dtype(dtype).max
    for size in (1, 7, 300_000):
        for value in (np.nan, np.inf, -np.inf):
            values = np.full(size, limit)  # their sum overflows
            finite = tf.cast(tf.constant(values), dtype)
            assert all_finite(finite)
            values[size // 2] = value
            assert not all_finite(finite, tf.cast(tf.constant(values), dtype))


def test_mixed_types_and_empty_tensors(all_finite):
    tensors = [tf.ones([3, 4], dtype) for dtype in DTYPES]
    assert all_finite(*tensors, tf.zeros([0, 5]))
    assert not all_finite(*tensors, tf.constant([1.0, -np.inf]))
    assert all_finite(tf.constant([0.0, -0.0, 1e-45, -1e-310]))


@native
def test_native_scales_are_the_same():
    gradients = [tf.ones([5]), tf.constant([np.inf, 1.0]), tf.ones([2], tf.float16)]
    for tensors, scales in [
        (gradients[:1], [0.5]),
        (gradients, [1.0, 1.0, 0.5]),
        (gradients[2:], [1e6]),  # overflows float16, but not the residual's dtype
        ([tf.constant([3e38])], [4.0]),
    ]:
        results = [
            clipping.scales_or_nan(tensors, scales, use_native)
            for use_native in (False, True)
        ]
        np.testing.assert_array_equal(*results)
