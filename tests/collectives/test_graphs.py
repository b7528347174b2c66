"""Graphs of gossip: mixing matrices, messages between neighbors, and errors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_dgc import collectives
from tf_dgc.collectives import Gossip, Rank, graphs
from tf_dgc.collectives.requests import SendRecv
from tf_dgc.testing import run_all

PATH = [[0.75, 0.25, 0], [0.25, 0.5, 0.25], [0, 0.25, 0.75]]
CIRCLE = [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]  # directed
GRAPHS = [*graphs.NAMED_GRAPHS, PATH, CIRCLE]


def phases(graph, num_workers):
    return Gossip(graph).weights(num_workers)


def cases():
    named = [(graph, n) for graph in graphs.NAMED_GRAPHS for n in range(1, 10)]
    return [*named, (PATH, 3), (CIRCLE, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "num_workers"), cases())
def test_weights_are_doubly_stochastic_and_lead_to_a_consensus(graph, num_workers):
    product = np.eye(num_workers)
    for matrix in phases(graph, num_workers) * 400:
        if len(phases(graph, num_workers)) == 1:
            graphs.check_mixing_matrix(matrix)
        assert np.all(matrix >= 0)
        np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=1e-12)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-12)
        product = matrix @ product
    np.testing.assert_allclose(product, 1 / num_workers, atol=1e-3)


@pytest.mark.parametrize("num_workers", [2, 4, 8, 16])
def test_one_peer_graphs_reach_the_mean_exactly(num_workers):
    matrices = phases("exponential", num_workers)
    assert len(matrices) == np.log2(num_workers)
    assert all(np.all((m > 0).sum(axis=1) == 2) for m in matrices)
    np.testing.assert_array_equal(
        np.linalg.multi_dot([*matrices, np.eye(num_workers)]), 1 / num_workers
    )


def test_torus_has_four_neighbors():
    (matrix,) = phases("torus", 12)
    assert np.all((matrix > 0).sum(axis=1) == 5)
    assert set(np.flatnonzero(matrix[0])) == {0, 1, 3, 4, 8}  # 3 x 4
    np.testing.assert_array_equal(matrix, matrix.T)


@pytest.mark.parametrize(("graph", "num_workers"), cases())
def test_words_travel_only_between_neighbors(graph, num_workers):
    gossip = Gossip(graph)
    words = np.arange(7 * num_workers, dtype="int32").reshape(-1, 7)
    for phase, matrix in enumerate(gossip.weights(num_workers)):
        ranks = [Rank(worker, num_workers) for worker in range(num_workers)]
        requests = [[] for _ in ranks]
        rounds = [
            gossip.gather_near(tf.constant(w), rank, phase)
            for w, rank in zip(words, ranks, strict=True)
        ]
        gathered = run_all(rounds, requests)
        for rank, rows, messages in zip(ranks, gathered, requests, strict=True):
            neighbors = gossip.neighbors(rank, phase)
            np.testing.assert_array_equal(rows, words[neighbors].reshape(-1, 7))
            is_linked = (matrix + matrix.T)[rank.worker] > 0
            partners = [
                m.partner if isinstance(m, SendRecv) else sum(m.group) - rank.worker
                for m in messages
            ]
            assert sorted(partners) == [
                i for i in np.flatnonzero(is_linked) if i != rank.worker
            ]


@pytest.mark.parametrize(("graph", "num_workers"), cases())
def test_each_worker_has_one_partner_at_a_time(graph, num_workers):
    for matrix in phases(graph, num_workers):
        for pairs in graphs.matchings(matrix):
            members = [m for pair in pairs for m in pair]
            assert len(set(members)) == len(members)


@pytest.mark.parametrize("graph", GRAPHS)
def test_config(graph):
    gossip = Gossip(graph, step_size=0.5)
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(gossip)
    )
    assert again.get_config() == gossip.get_config()
    assert repr(again) == repr(gossip)
    assert collectives.get(gossip) is gossip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"graph": "star"}, "or a square matrix of weights"),
        ({"graph": None}, "or a square matrix of weights"),
        ({"graph": []}, "or a square matrix of weights"),
        ({"graph": [[1, 0], [0]]}, "or a square matrix of weights"),
        ({"graph": [[0.5, 0.5, 0], [0.5, 0.5, 0]]}, "or a square matrix of weights"),
        ({"graph": [[1.5, -0.5], [-0.5, 1.5]]}, r"must be in \[0, 1\]"),
        ({"graph": [[np.nan, 1], [1, 0]]}, r"must be in \[0, 1\]"),
        ({"graph": [[0.5, 0.5], [0.4, 0.6]]}, "must be doubly stochastic"),
        ({"graph": np.eye(3)}, r"must be connected.*worker 0 reaches \[0\] of 3"),
        ({"graph": [[0, 1], [1, 0]]}, "pass their weights around"),
        ({"graph": np.roll(np.eye(3), 1, axis=0)}, "pass their weights around"),
        ({"step_size": 0}, r"`step_size` must be a number in \(0, 1\]"),
        *(
            ({"step_size": size}, r"`step_size` must be a number in \(0, 1\]")
            for size in (1.5, np.nan, "0.5", [1], True)
        ),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(ValueError, match=f"(?s){message}.*Received"):
        Gossip(**settings)


def test_matrix_of_another_size_raises():
    with pytest.raises(ValueError, match="a row and a column for each worker"):
        Gossip(PATH).weights(2)


def test_one_worker_may_have_any_matrix():
    gossip = Gossip(PATH)
    np.testing.assert_array_equal(gossip.weights(1), [[[1]]])
    assert gossip.neighbors(Rank(0, 1), 0) == []


def test_matrix_is_copied():
    matrix = np.array(PATH)
    gossip = Gossip(matrix)
    matrix[:] = 0
    np.testing.assert_array_equal(gossip.weights(3), [PATH])
