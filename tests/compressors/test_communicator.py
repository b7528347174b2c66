"""Requests of steps to all workers, to groups and to pairs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.requests import AllGather, AllReduce, DenseOrSparse, SendRecv
from tf_dgc.testing import run_all


def words_of(values):
    return tf.bitcast(tf.constant(values, tf.float32), tf.int32)


def gossip(worker, values):
    """Average with two partners, one after another."""
    for partner in (worker ^ 1, worker ^ 3):
        (words,) = yield [SendRecv(words_of(values), partner)]
        values = (values + tf.bitcast(words, tf.float32).numpy()) / 2
    return values


def test_send_receive_between_pairs():
    """Workers get different replies; after two rounds all hold the mean."""
    values = np.random.default_rng(0).normal(size=(4, 5)).astype("float32")
    record = [[] for _ in values]
    means = run_all([gossip(i, row) for i, row in enumerate(values)], record)
    for mean in means:
        np.testing.assert_allclose(mean, values.mean(axis=0), rtol=1e-5, atol=1e-7)
    partners = [[request.partner for request in requests] for requests in record]
    assert partners == [[1, 3], [0, 2], [3, 1], [2, 0]]


def in_groups(worker, group):
    values = tf.constant([float(worker)])
    total, gathered = yield [
        AllReduce(values, group),
        AllGather(words_of([worker]), group),
    ]
    rows = tf.bitcast(gathered, tf.float32).numpy().ravel()
    empty = tf.zeros([0], tf.int32)
    dense, sparse = yield [
        DenseOrSparse(True, values, empty),
        DenseOrSparse(False, values, words_of([worker]), group=group),
    ]
    sparse_rows = tf.bitcast(sparse.buffers, tf.float32).numpy().ravel().tolist()
    dense_total = dense.total.numpy().item()
    return total.numpy().item(), rows.tolist(), dense_total, sparse_rows


def test_groups_get_separate_replies():
    groups = [(0, 2), (1, 3), (0, 2), (1, 3)]
    results = run_all([in_groups(i, group) for i, group in enumerate(groups)])
    even, odd = (2, [0, 2], 6, [0, 2]), (4, [1, 3], 6, [1, 3])
    assert results == [even, odd, even, odd]


def one_request_per_round(*requests):
    for request in requests:
        yield [request]


def all_reduce(group=None):
    return AllReduce(tf.ones([1]), group)


def send_recv(partner):
    return SendRecv(words_of([1.0]), partner)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (
            [[all_reduce((0, 1))], [all_reduce()]],
            "must make the same request. Received",
        ),
        (
            [[all_reduce((1,))], [all_reduce((1,))]],
            "must name workers in ascending order",
        ),
        (
            [[all_reduce()], [AllGather(words_of([1.0]))]],
            "must make the same request. Received",
        ),
        ([[send_recv(1)], [all_reduce()]], "by both workers"),
        ([[send_recv(1)], [send_recv(1)]], "by both workers"),
        ([[send_recv(2)], [send_recv(0)]], "by both workers"),
        ([[all_reduce()], [all_reduce(), all_reduce()]], "more rounds than others"),
    ],
)
def test_mismatched_requests_raise(requests, message):
    with pytest.raises(ValueError, match=message):
        run_all([one_request_per_round(*local) for local in requests])


class Doubling(Communicator):
    """Answers as if a second worker had sent the same values."""

    def answer(self, request, check=None):
        assert check is None
        return 2 * request.values


def test_communicator_of_an_optimizer_can_be_replaced():
    variable = keras.Variable(np.ones((3, 4), "float32"))
    optimizer = tf_dgc.CompressedOptimizer(keras.optimizers.SGD(1.0), "none")
    optimizer.communicator = Doubling(tf.distribute.get_strategy())
    optimizer.apply([tf.ones((3, 4))], [variable])
    np.testing.assert_array_equal(variable.numpy(), -1)
