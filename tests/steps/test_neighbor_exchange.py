"""Neighbors decode what was sent, with every method that gossip supports."""

import numpy as np
import pytest
import tensorflow as tf
from selection import rows

from tf_dgc import compressors
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import Gossip, Rank
from tf_dgc.local.gossip import Neighbors, check_gossip
from tf_dgc.steps.neighbors import NeighborCoder
from tf_dgc.steps.state import initial_value
from tf_dgc.testing import run_all

SHAPES = [(30, 40), (7,), (5, 5)]


def goes(name):
    gossip = Gossip("ring", step_size=0.5)
    try:
        check_gossip(gossip, compressors.get(name), None, None, 3)
    except ValueError:
        return False
    return True


METHODS = [name for name in compressors.METHODS if goes(name)]


def test_most_methods_are_among_them():
    assert len(METHODS) > 15
    some = {
        "none",
        "top_k",
        "random_k",
        "float16",
        "uniform_8bit",
        "one_bit",
        "natural",
    }
    assert some <= {*METHODS}
    assert "power_sgd" in METHODS  # whose state neighbours follow
    assert not {"qsgd", "lgc", "scale_com", "sign_sgd"} & {*METHODS}


def coder(name, dtype):
    tensors = [
        TensorSpec(f"t{i}", shape, tf.as_dtype(dtype), i == 1)
        for i, shape in enumerate(SHAPES)
    ]
    return NeighborCoder(compressors.get(name), tensors, 3, tf.constant(5, tf.int64))


def states(name, dtype):
    """Return the state that a method begins with, of each tensor."""
    method = compressors.get(name)
    return [
        {}
        if i == 1
        else {
            key: tf.constant(initial_value(spec, i), dtype)
            for key, spec in method.state(shape).items()
        }
        for i, shape in enumerate(SHAPES)
    ]


def some_values(dtype, seed):
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.normal(size=np.prod(s)).astype(dtype)) for s in SHAPES]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", rows(["float32", "float64"], ["float32"]))
def test_others_decode_what_was_sent(name, dtype):
    mine, theirs = some_values(dtype, 0), some_values(dtype, 1)
    known = states(name, dtype)
    words, sent = coder(name, dtype).encode(mine, tf.constant(True), 2, known)
    found = coder(name, dtype).decode(words, theirs, 2, known)
    tf.nest.map_structure(np.testing.assert_array_equal, sent.states, found.states)
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


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("name", ["none", "top_k"])
def test_workers_move_by_their_row_of_the_matrix(name, number):
    gossip = Gossip("ring")
    (matrix,) = gossip.weights(number)
    places = [Rank(worker, number) for worker in range(number)]
    values = [some_values("float64", worker) for worker in range(number)]
    coded = [
        coder(name, "float64").encode(v, tf.constant(True), place.worker)
        for v, place in zip(values, places, strict=True)
    ]
    rounds = [
        gossip.gather_near(words, place, 0)
        for (words, _), place in zip(coded, places, strict=True)
    ]
    sent = np.array([np.concatenate(s.values) for _, s in coded])
    pulls = []
    for place, rows_of, mine in zip(places, run_all(rounds), sent, strict=True):
        them = Neighbors(gossip, place, tf.constant(7, tf.int64))
        pull = np.zeros_like(mine)
        for row, worker, share in zip(rows_of, them.workers, them.weights, strict=True):
            theirs = coder(name, "float64").decode(row, values[place.worker], worker)
            pull += share * (np.concatenate(theirs.values) - mine)
        pulls.append(pull)
    np.testing.assert_allclose(pulls, matrix @ sent - sent, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(sum(pulls), 0, atol=1e-13)
