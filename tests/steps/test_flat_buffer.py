"""The flat buffer: tensors that a method compresses as one."""

import keras
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc import compressors
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.steps.flat_buffer import flat_views


def tensors(*sizes, uncompressed=False):
    return [
        TensorSpec(f"t{i}", (n,), tf.float32, uncompressed) for i, n in enumerate(sizes)
    ]


def test_positions_in_the_flat_buffer_are_int32():
    half = 2**30
    (view,) = flat_views(tensors(half, half - 1), entire_model=True)
    assert view.seen.size == tf.int32.max
    with pytest.raises(ValueError, match=r"2 tensors from t0 on, with 2147483648"):
        flat_views(tensors(half, half), entire_model=True)
    assert len(flat_views(tensors(half, half), entire_model=False)) == 2
    assert (
        len(flat_views(tensors(half, half, uncompressed=True), entire_model=True)) == 2
    )


@pytest.mark.parametrize("method", [compressors.GlobalTopK, compressors.LGC])
def test_too_large_model_raises_before_allocation(method, monkeypatch):
    """Two variables of 8 entries each, with positions up to 15."""
    monkeypatch.setattr(type(tf.int32), "max", 15)
    variables = [keras.Variable(tf.zeros([2, 4])) for _ in range(2)]
    optimizer = tf_dgc.CompressedOptimizer("sgd", method(0.5), min_compress_size=0)
    with pytest.raises(ValueError, match=r"at most 15 entries.*with 16 entries"):
        optimizer.build(variables)
