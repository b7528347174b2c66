"""Names of value types in settings."""

import numpy as np
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc import compressors

INVALID = [np.dtype("float16"), tf.bfloat16, np.float16, "float64", ["float16"], 16]


@pytest.mark.parametrize("value", INVALID, ids=str)
def test_other_types_raise(value):
    for method in (compressors.TopK, compressors.SampledThreshold):
        with pytest.raises(ValueError, match="`value_dtype` must be None or one of"):
            method(0.9, value_dtype=value)
    with pytest.raises(ValueError, match="`uncompressed_dtype` must be None or one of"):
        tf_dgc.DGCOptimizer("sgd", uncompressed_dtype=value)


def test_numpy_string_is_a_name():
    assert compressors.TopK(0.9, np.str_("float16")).value_dtype == "float16"
