"""Bits of every number type come back as they went, also of odd lengths."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dgc.codecs import bits


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 5)])
@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "float32", "float64", "int32", "int64"]
)
def test_numbers_come_back(name, shape):
    drawn = np.random.default_rng(0).normal(size=shape) * 100
    values = tf.cast(tf.constant(drawn), name)
    words = bits.to_words(values)
    assert words.dtype == tf.int32
    assert words.shape == [bits.num_words_of(values.dtype, int(tf.size(values)))]
    for like in (values, tf.TensorSpec(shape, name)):
        back = bits.from_words(words, like)
        assert back.shape == shape
        np.testing.assert_array_equal(back.numpy(), values.numpy())
