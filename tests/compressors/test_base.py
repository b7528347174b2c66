"""Invalid methods, parameters and declarations raise errors that say why."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc import compressors
from tf_dgc.compressors.common import capacity

O = keras.optimizers  # noqa: E741


@pytest.mark.parametrize("identifier", ["topk", None, 3, compressors.TopK])
def test_unknown_compressor_raises(identifier):
    with pytest.raises(ValueError, match=r"the name of a method: \w+, .*Received"):
        tf_dgc.CompressedOptimizer(O.SGD(0.1), identifier)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("top_k", {"sparsity": 1.0}),
        ("top_k", {"value_dtype": "int8"}),
        ("random_k", {"sparsity": -0.5}),
        ("qsgd", {"levels": 0}),
        ("qsgd", {"levels": 2**24}),
        ("qsgd", {"bucket": 1.5}),
        ("diana", {"alpha": 0.0}),
        ("diana", {"alpha": 2.0}),
        ("power_sgd", {"rank": 0}),
    ],
)
def test_parameters_out_of_range_raise(name, settings):
    with pytest.raises(ValueError, match="Received"):
        compressors.METHODS[name](**settings)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("name", "two words"),
        ("kind", None),
        ("reference", None),
        ("aggregation", "mean"),
        ("error_feedback", True),
    ],
)
def test_wrong_class_attributes_raise(fact, value):
    broken = type("Broken", (compressors.TernGrad,), {fact: value})
    with pytest.raises(ValueError, match=f"`{fact}` of a compressor must be .*Broken"):
        tf_dgc.CompressedOptimizer(O.SGD(0.1), broken())


def test_nonzero_initial_worker_state_raises():
    class Broken(compressors.QSGD):
        def state(self, shape):
            return {"memory": compressors.StateSpec(shape, initial=lambda rng: 1.0)}

    optimizer = tf_dgc.CompressedOptimizer(O.SGD(0.1), Broken(), min_compress_size=0)
    with pytest.raises(ValueError, match=r"zero at first.*Received: memory"):
        optimizer.build([keras.Variable(np.zeros((2, 3)))])


def test_capacity_beyond_int32_raises():
    assert capacity.num_words(2**30, 2**20, "float32") > 2**20
    with pytest.raises(ValueError, match="smaller capacity"):
        capacity.num_words(2**31 - 5, 5, "float32")


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        (compressors.SBC(), (2**31 - 5,)),
        (compressors.VarianceBased(), (2**31 - 5,)),
        (compressors.DeMo(), (20_000_000, 65)),  # a tile has 64 columns
    ],
)
def test_sizes_beyond_int32_raise(method, shape):
    with pytest.raises(ValueError, match="int32"):
        method.bytes(shape, tf.float32)
