"""Types of values by which a user asks for them: names."""

import numpy as np
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc import compressors

WRONG = [np.dtype("float16"), tf.bfloat16, np.float16, "float64", ["float16"], 16]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_types_are_names(wrong):
    for make in (compressors.TopK, compressors.SampledThreshold):
        with pytest.raises(ValueError, match="`value_dtype` must be None or one of"):
            make(0.9, value_dtype=wrong)
    with pytest.raises(ValueError, match="`uncompressed_dtype` must be None or one of"):
        tf_dgc.DGCOptimizer("sgd", uncompressed_dtype=wrong)


def test_numpy_s_strings_are_names():
    assert compressors.TopK(0.9, np.str_("float16")).value_dtype == "float16"
