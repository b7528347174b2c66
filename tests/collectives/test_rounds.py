"""Collectives of a step, and methods whose `aggregate` is invalid."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc import compressors
from tf_dgc._internals import tf_collectives
from tf_dgc.codecs.bits import num_bytes
from tf_dgc.collectives.requests import AllGather, AllReduce, Result
from tf_dgc.compressors.common import one_round
from tf_dgc.testing import Simulation

O = keras.optimizers  # noqa: E741


class TwoRounds(compressors.Quantizer):
    """Scales by the largest entry of all workers, then sums."""

    name = "two_rounds"
    reference = "this test"

    def bytes(self, shape, dtype):
        return None

    def aggregate(self, values, state, keys):
        largest = yield from one_round.maximum(tf.reduce_max(tf.abs(values)))
        total = yield AllReduce(values / largest)
        return Result(total * largest, values)


@pytest.mark.parametrize(
    ("compressor", "gathers", "sums"),
    [
        (compressors.TopK(0.99), 1, 0),
        (compressors.SignSGD(), 1, 0),
        (compressors.RandomK(0.9), 0, 1),
        (compressors.PowerSGD(2), 0, 2),
        (TwoRounds(), 1, 1),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_collectives_of_a_step(strategies, monkeypatch, compressor, gathers, sums):
    """One collective for all tensors, including uncompressed ones."""
    launches = []

    def spy(name, launch):
        def count(launcher, tensor):
            launches.append(name)
            return launch(launcher, tensor)

        return count

    for name in ("launch_all_gather", "launch_all_reduce"):
        monkeypatch.setattr(
            tf_collectives, name, spy(name, getattr(tf_collectives, name))
        )
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.CompressedOptimizer(O.SGD(0.125, momentum=0.9), compressor),
        initial_weights(),
    )
    trainer.step(*make_gradients(2, 1))
    assert launches.count("launch_all_gather") == 2 * gathers
    assert launches.count("launch_all_reduce") == 2 * sums


@pytest.mark.parametrize("shape", [[2**29], [2**15, None], [None]])
def test_bytes_of_large_vectors(shape):
    """The size is computed while tracing, or in int64, without such a vector."""

    @tf.function(input_signature=[tf.TensorSpec(shape)])
    def count(vector):
        size = num_bytes(vector)
        assert isinstance(size, int) == (None not in shape)
        return tf.cast(size, tf.int64)

    graph = count.get_concrete_function().graph
    products = [op for op in graph.get_operations() if op.type in {"Mul", "Size"}]
    assert all(op.outputs[0].dtype == tf.int64 for op in products)
    assert products or tf.get_static_value(graph.outputs[0]) == 2**31


# --- bad input ------------------------------------------------------------------------


def returns_without_yield(values):
    return Result(values, values)


def yields_a_tensor(values):
    yield values


def gathers_floats(values):
    yield AllGather(tf.reshape(values, [-1]))


def returns_a_tensor(values):
    return (yield AllReduce(values))


@pytest.mark.parametrize(
    ("invalid_aggregate", "message"),
    [
        (returns_without_yield, "must be a generator"),
        (yields_a_tensor, "must yield `AllReduce` of a float"),
        (gathers_floats, "`AllGather` of an int32"),
        (returns_a_tensor, r"must end with `return Result\(...\)`"),
    ],
)
def test_invalid_aggregate_raises(invalid_aggregate, message):
    class Broken(TwoRounds):
        def aggregate(self, values, state, keys):
            return invalid_aggregate(values)

    with pytest.raises(ValueError, match=f"Broken.* {message}"):
        Simulation(Broken(), [(2, 3)], 1).step([[np.zeros((2, 3))]])


class LongerThanStated(compressors.OneRound, compressors.Quantizer):
    name = "longer"
    reference = "this test"

    def words(self, size, dtype):
        return size

    def encode(self, values, keys):
        return tf.zeros([values.shape[0] + 1], tf.int32)

    def decode(self, words, size, dtype):
        return tf.zeros([size], dtype)


class OtherThanStated(compressors.Quantizer):
    name = "other"
    reference = "this test"

    def __init__(self, factor):
        self.factor = factor

    def get_config(self):
        return {"factor": self.factor}

    def bytes(self, shape, dtype):
        return 40

    def aggregate(self, values, state, keys):
        yield AllGather(tf.zeros([self.factor * 10], tf.int32))
        return Result(values, values)


@pytest.mark.parametrize(
    "compressor", [LongerThanStated(), OtherThanStated(2), OtherThanStated(0)]
)
def test_payload_of_another_size_raises(compressor):
    with pytest.raises(ValueError, match=f"{type(compressor).__name__}.* states"):
        Simulation(compressor, [(2, 3)], 1).step([[np.zeros((2, 3))]])
    optimizer = tf_dgc.CompressedOptimizer(O.SGD(0.1), compressor, min_compress_size=0)
    with pytest.raises(ValueError, match=f"{type(compressor).__name__}.* states"):
        optimizer.apply([tf.zeros((2, 3))], [keras.Variable(np.zeros((2, 3)))])
