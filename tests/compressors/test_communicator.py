"""Communicators: what steps may ask for, of all workers, of groups and of pairs."""

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
    """A step of this file's own: two rounds, each with another partner."""
    for partner in (worker ^ 1, worker ^ 3):
        (theirs,) = yield [SendRecv(words_of(values), partner)]
        values = (values + tf.bitcast(theirs, tf.float32).numpy()) / 2
    return values


def test_pairs_that_swap():
    """Every worker gets another reply; after two rounds all hold the mean."""
    values = np.random.default_rng(0).normal(size=(4, 5)).astype("float32")
    record = [[] for _ in values]
    found = run_all([gossip(i, row) for i, row in enumerate(values)], record)
    for mean in found:
        np.testing.assert_allclose(mean, values.mean(axis=0), rtol=1e-5, atol=1e-7)
    partners = [[swap.partner for swap in asked] for asked in record]
    assert partners == [[1, 3], [0, 2], [3, 1], [2, 0]]


def in_groups(worker, group):
    mine = tf.constant([float(worker)])
    total, gathered = yield [
        AllReduce(mine, group),
        AllGather(words_of([worker]), group),
    ]
    rows = tf.bitcast(gathered, tf.float32).numpy().ravel()
    nothing = tf.zeros([0], tf.int32)
    dense, sparse = yield [
        DenseOrSparse(True, mine, nothing),
        DenseOrSparse(False, mine, words_of([worker]), group=group),
    ]
    again = tf.bitcast(sparse.buffers, tf.float32).numpy().ravel().tolist()
    return total.numpy().item(), rows.tolist(), dense.total.numpy().item(), again


def test_groups_have_replies_of_their_own():
    groups = [(0, 2), (1, 3), (0, 2), (1, 3)]
    found = run_all([in_groups(i, group) for i, group in enumerate(groups)])
    even, odd = (2, [0, 2], 6, [0, 2]), (4, [1, 3], 6, [1, 3])
    assert found == [even, odd, even, odd]


def ask(*messages):
    for message in messages:
        yield [message]


def one(group=None):
    return AllReduce(tf.ones([1]), group)


def swap(partner):
    return SendRecv(words_of([1.0]), partner)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([[one((0, 1))], [one()]], "must make the same request. Received"),
        ([[one((1,))], [one((1,))]], "must name workers in ascending order"),
        (
            [[one()], [AllGather(words_of([1.0]))]],
            "must make the same request. Received",
        ),
        ([[swap(1)], [one()]], "by both workers"),
        ([[swap(1)], [swap(1)]], "by both workers"),
        ([[swap(2)], [swap(0)]], "by both workers"),
        ([[one()], [one(), one()]], "more rounds than others"),
    ],
)
def test_workers_that_do_not_match(messages, said):
    with pytest.raises(ValueError, match=said):
        run_all([ask(*asked) for asked in messages])


class Doubling(Communicator):
    """Another communicator: as if there were a second worker with the same."""

    def answer(self, request, check=None):
        assert check is None
        return 2 * request.values


def test_the_optimizers_communicator_is_replaced():
    variable = keras.Variable(np.ones((3, 4), "float32"))
    optimizer = tf_dgc.CompressedOptimizer(keras.optimizers.SGD(1.0), "none")
    optimizer.communicator = Doubling(tf.distribute.get_strategy())
    optimizer.apply([tf.ones((3, 4))], [variable])
    np.testing.assert_array_equal(variable.numpy(), -1)
