"""Neighbors decode each worker's message, with every method that gossip supports."""

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


def supports_gossip(name):
    gossip = Gossip("ring", step_size=0.5)
    try:
        check_gossip(gossip, compressors.get(name), None, None, 3)
    except ValueError:
        return False
    return True


METHODS = [name for name in compressors.METHODS if supports_gossip(name)]


def test_gossip_supports_most_methods():
    assert len(METHODS) > 15
    supported = {
        "none",
        "top_k",
        "random_k",
        "float16",
        "uniform_8bit",
        "one_bit",
        "natural",
    }
    assert supported <= {*METHODS}
    assert "power_sgd" in METHODS  # neighbors follow its state
    assert not {"qsgd", "lgc", "scale_com", "sign_sgd"} & {*METHODS}


def make_coder(name, dtype):
    tensors = [
        TensorSpec(f"t{i}", shape, tf.as_dtype(dtype), i == 1)
        for i, shape in enumerate(SHAPES)
    ]
    return NeighborCoder(compressors.get(name), tensors, 3, tf.constant(5, tf.int64))


def initial_states(name, dtype):
    """Return a method's initial state for each tensor."""
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


def random_values(dtype, seed):
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.normal(size=np.prod(s)).astype(dtype)) for s in SHAPES]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", rows(["float32", "float64"], ["float32"]))
def test_neighbors_decode_the_sent_values(name, dtype):
    values, other_values = random_values(dtype, 0), random_values(dtype, 1)
    states = initial_states(name, dtype)
    words, sent = make_coder(name, dtype).encode(values, tf.constant(True), 2, states)
    decoded = make_coder(name, dtype).decode(words, other_values, 2, states)
    tf.nest.map_structure(np.testing.assert_array_equal, sent.states, decoded.states)
    for a, b, value in zip(sent.values, decoded.values, values, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.shape == value.shape
    np.testing.assert_array_equal(sent.values[1], values[1])  # uncompressed
    assert decoded.finite
    assert np.linalg.norm(sent.values[0] - values[0]) <= 1.5 * np.linalg.norm(values[0])


def test_nonfinite_flag_reaches_neighbors():
    zeros = [tf.zeros([np.prod(s)]) for s in SHAPES]
    words, sent = make_coder("top_k", "float32").encode(zeros, tf.constant(False), 0)
    decoded = make_coder("top_k", "float32").decode(
        words, random_values("float32", 1), 0
    )
    assert not sent.finite
    assert not decoded.finite


def test_damaged_words_raise():
    words, _ = make_coder("top_k", "float32").encode(
        random_values("float32", 0), tf.constant(True), 0
    )
    damaged = tf.concat([words[:-1], words[-1:] + 1], axis=0)
    with pytest.raises(tf.errors.InvalidArgumentError):
        make_coder("top_k", "float32").decode(damaged, random_values("float32", 1), 0)


@pytest.mark.parametrize("num_workers", range(1, 6))
@pytest.mark.parametrize("name", ["none", "top_k"])
def test_mixing_terms_follow_the_matrix(name, num_workers):
    gossip = Gossip("ring")
    (matrix,) = gossip.weights(num_workers)
    ranks = [Rank(worker, num_workers) for worker in range(num_workers)]
    values = [random_values("float64", worker) for worker in range(num_workers)]
    messages = [
        make_coder(name, "float64").encode(v, tf.constant(True), rank.worker)
        for v, rank in zip(values, ranks, strict=True)
    ]
    rounds = [
        gossip.gather_near(words, rank, 0)
        for (words, _), rank in zip(messages, ranks, strict=True)
    ]
    sent = np.array([np.concatenate(s.values) for _, s in messages])
    mixing_terms = []
    for rank, rows_of, own_values in zip(ranks, run_all(rounds), sent, strict=True):
        neighbors = Neighbors(gossip, rank, tf.constant(7, tf.int64))
        mixing_term = np.zeros_like(own_values)
        for row, worker, share in zip(
            rows_of, neighbors.workers, neighbors.weights, strict=True
        ):
            decoded = make_coder(name, "float64").decode(
                row, values[rank.worker], worker
            )
            mixing_term += share * (np.concatenate(decoded.values) - own_values)
        mixing_terms.append(mixing_term)
    np.testing.assert_allclose(
        mixing_terms, matrix @ sent - sent, rtol=1e-12, atol=1e-14
    )
    np.testing.assert_allclose(sum(mixing_terms), 0, atol=1e-13)
