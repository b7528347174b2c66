"""What is sent to neighbours is what they decode, by every method that they may use."""

import numpy as np
import pytest
import tensorflow as tf
from selection import rows

from tf_dgc import compressors
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.exchanges import Gossip
from tf_dgc.optimizers import neighbours
from tf_dgc.steps.near import Coder

SHAPES = [(30, 40), (7,), (5, 5)]


def goes(name):
    gossip = Gossip("ring", step_size=0.5)
    try:
        neighbours.check(gossip, compressors.get(name), None, None, 3)
    except ValueError:
        return False
    return True


METHODS = [name for name in compressors.METHODS if goes(name)]


def test_most_methods_are_among_them():
    assert len(METHODS) > 15
    assert {"none", "top_k", "random_k", "float16", "uniform_8bit", "qsgd"} & {*METHODS}


def coder(name, dtype):
    tensors = [
        Tensor(f"t{i}", shape, tf.as_dtype(dtype), i == 1)
        for i, shape in enumerate(SHAPES)
    ]
    return Coder(compressors.get(name), tensors, 3, tf.constant(5, tf.int64))


def some_values(dtype, seed):
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.normal(size=np.prod(s)).astype(dtype)) for s in SHAPES]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", rows(["float32", "float64"], ["float32"]))
def test_others_decode_what_was_sent(name, dtype):
    mine, theirs = some_values(dtype, 0), some_values(dtype, 1)
    words, sent = coder(name, dtype).encode(mine, tf.constant(True), 2)
    found = coder(name, dtype).decode(words, theirs, 2)
    for a, b, value in zip(sent.values, found.values, mine, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.shape == value.shape
    np.testing.assert_array_equal(sent.values[1], mine[1])  # exempt
    assert found.finite
    assert np.linalg.norm(sent.values[0] - mine[0]) <= 1.5 * np.linalg.norm(mine[0])


def test_a_worker_that_is_not_finite_says_so():
    zeros = [tf.zeros([np.prod(s)]) for s in SHAPES]
    words, sent = coder("top_k", "float32").encode(zeros, tf.constant(False), 0)
    found = coder("top_k", "float32").decode(words, some_values("float32", 1), 0)
    assert not sent.finite
    assert not found.finite


def test_what_is_damaged_is_refused():
    words, _ = coder("top_k", "float32").encode(
        some_values("float32", 0), tf.constant(True), 0
    )
    damaged = tf.concat([words[:-1], words[-1:] + 1], axis=0)
    with pytest.raises(tf.errors.InvalidArgumentError):
        coder("top_k", "float32").decode(damaged, some_values("float32", 1), 0)
