"""Large collectives in chunks: the same sums and rows for every chunk size."""

import numpy as np
import pytest
import tensorflow as tf
from selection import in_turn

from tf_dgc._internals import tf_collectives
from tf_dgc.collectives import cross_device
from tf_dgc.multiworker import chunks

SIZE = 64  # bytes of a chunk


class Launches:
    """Stands for collectives with replicas that send multiples of this one's tensor."""

    def __init__(self, num_replicas=3):
        self.bytes = []
        self._num_replicas = num_replicas

    def reduce(self, tensor):
        self._record(tensor)
        return tensor * sum(range(1, self._num_replicas + 1))

    def gather(self, tensor):
        self._record(tensor)
        return tf.concat([tensor * (1 + i) for i in range(self._num_replicas)], 0)

    def _record(self, tensor):
        size = tensor.dtype.size * tf.size(tensor)
        tf.py_function(lambda n: self.bytes.append(int(n)), [size], [])


SHAPES = [(1,), (16,), (17,), (32,), (100,), (10, 7), (3, 0), (0,), (9, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_chunks_give_the_result_of_the_whole(shape, dtype):
    values = np.random.default_rng(0).normal(size=shape, scale=100).astype(dtype)
    launches = Launches()

    def both(tensor):
        total = chunks.chunked_all_reduce(launches.reduce, tensor, size=SIZE)
        rows = chunks.chunked_all_gather(launches.gather, tensor, 3, size=SIZE)
        return total, rows

    expected = (
        Launches().reduce(tf.constant(values)),
        Launches().gather(tf.constant(values)),
    )
    for run in (both, tf.function(both, autograph=False)):
        launches.bytes.clear()
        for result, whole in zip(run(tf.constant(values)), expected, strict=True):
            np.testing.assert_array_equal(result, whole)
        assert sum(launches.bytes) == 2 * values.nbytes
        assert max(launches.bytes) <= SIZE + 8
        assert len(launches.bytes) == 2 * max(1, -(-values.nbytes // SIZE))


def test_lengths_that_the_graph_computes():
    launches = Launches()

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.int32)])
    def gather(words):
        return chunks.chunked_all_gather_of_unknown_length(
            launches.gather, words, 3, 1000, size=SIZE
        )

    for length, expected in [(1, 1), (16, 1), (17, 2), (32, 2), (64, 4), (250, 16)]:
        launches.bytes.clear()
        words = tf.range(length)
        np.testing.assert_array_equal(gather(words), Launches().gather(words))
        assert len(launches.bytes) == expected
        assert sum(launches.bytes) == 4 * length


def test_small_tensors_go_whole():
    """The graph of a tensor that is known to be small has no extra operations."""

    @tf.function(
        autograph=False, input_signature=[tf.TensorSpec([chunks.CHUNK_BYTES // 4])]
    )
    def one(tensor):
        return chunks.chunked_all_reduce(lambda x: 2.0 * x, tensor)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.int32)])
    def other(words):
        return chunks.chunked_all_gather_of_unknown_length(
            lambda x: 2 * x, words, 2, chunks.CHUNK_BYTES
        )

    for function in (one, other):
        types = [
            op.type for op in function.get_concrete_function().graph.get_operations()
        ]
        assert "Mul" in types
        assert not {"Case", "ConcatV2", "StridedSlice"} & set(types)


@pytest.mark.parametrize(("dense", "scheduled"), in_turn([True, False], [False, True]))
def test_a_large_step(strategies, dense, scheduled):
    """All replicas of a process launch their chunks concurrently."""
    hook = cross_device.compressed_cross_device_ops(strategies[2])
    n = 2 * chunks.CHUNK_BYTES // 4 + 500
    vectors = np.random.default_rng(0).normal(size=[2, n]).astype("float32")
    words = vectors.view(np.int32)[:, : n - 100]
    before = hook.count()[None]
    shape = None if scheduled else n
    local = strategies[2].experimental_local_results

    @tf.function(
        autograph=False,
        input_signature=[
            *[tf.TensorSpec([shape])] * 2,
            *[tf.TensorSpec([shape and shape - 100], tf.int32)] * 2,
            tf.TensorSpec([], tf.bool),
        ],
    )
    def exchange(a, b, c, d, dense_now):
        pairs = tf_collectives.per_replica
        with strategies[2].scope():
            choice = dense_now if scheduled else dense
            results = hook.communicate(
                choice, pairs([a, b]), pairs([c, d]), (4 * n, 4 * n)
            )
            return [local(r) for r in results]

    totals, buffers = exchange(*vectors, *words, dense)
    for total, buffer in zip(totals, buffers, strict=True):
        np.testing.assert_array_equal(total, vectors.sum(axis=0) if dense else [])
        np.testing.assert_array_equal(buffer, [] if dense else words.reshape(-1))
    started, finished = np.subtract(hook.count()[None], before)
    assert started == finished == (4 if scheduled and not dense else 3)
