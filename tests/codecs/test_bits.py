"""Numbers of every dtype as 32-bit words, also of odd lengths."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dgc.codecs import bits


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 5)])
@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "float32", "float64", "int32", "int64"]
)
def test_round_trip(name, shape):
    numbers = np.random.default_rng(0).normal(size=shape) * 100
    values = tf.cast(tf.constant(numbers), name)
    words = bits.to_words(values)
    assert words.dtype == tf.int32
    assert words.shape == [bits.num_words_of(values.dtype, int(tf.size(values)))]
    for like in (values, tf.TensorSpec(shape, name)):
        decoded = bits.from_words(words, like)
        assert decoded.shape == shape
        np.testing.assert_array_equal(decoded.numpy(), values.numpy())
