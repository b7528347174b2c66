"""Choco-SGD on changing graphs, and with methods that keep a state, against NumPy."""

import keras
import numpy as np
import pytest
from gossip_checks import (
    PATH,
    RATE,
    SHAPES,
    disagreement,
    flat,
    local_updates,
    worker_weights,
)
from gossip_reference import ChangingChoco
from harness import Trainer, initial_weights, make_gradients
from selection import rows

import tf_dgc
from tf_dgc.collectives import Gossip

SIZE = 120
GAMMA = 0.25
DIRECTED = [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]
METHODS = {
    "top_k": tf_dgc.compressors.TopK(sparsity=0.9),
    "power_sgd": tf_dgc.compressors.PowerSGD(2),
}


def make_trainer(strategy, graph, method, dtype="float64", traced=None):
    def make_optimizer():
        return tf_dgc.LocalOptimizer(
            keras.optimizers.SGD(RATE),
            1,
            collective=Gossip(graph, GAMMA),
            compressor=METHODS[method],
            min_compress_size=100,
        )

    return Trainer(
        strategy, make_optimizer, initial_weights(dtype, SHAPES), traced=traced
    )


def make_compress(method):
    """Return the compression of one worker's flat weights; biases are sent whole.

    Power iterations are compared by the subspace of their factors, not by its basis.
    """
    state = {"q": np.random.default_rng(0).normal(size=(SHAPES[0][1], 2))}

    def top_k(values):
        indices = np.argsort(np.abs(values))[-12:]
        sent = np.zeros_like(values)
        sent[indices] = values[indices]
        return sent

    def power_sgd(values):
        matrix = values.reshape(SHAPES[0])
        basis = np.linalg.qr(matrix @ state["q"])[0]
        state["q"] = matrix.T @ basis
        return np.ravel(basis @ basis.T @ matrix)

    compress = {"top_k": top_k, "power_sgd": power_sgd}[method]
    return lambda values: np.concatenate([compress(values[:SIZE]), values[SIZE:]])


CASES = [
    ("exponential", "top_k", 4),
    ("exponential", "power_sgd", 4),
    ("exponential", "top_k", 3),
    ("ring", "power_sgd", 2),
    (PATH, "power_sgd", 3),
    (DIRECTED, "top_k", 3),
    (DIRECTED, "power_sgd", 3),
]


@pytest.mark.parametrize(
    ("graph", "method", "num_workers"),
    rows(CASES, [CASES[1], (PATH, "power_sgd", 3)]),
)
def test_rounds_equal_the_reference(strategies, graph, method, num_workers):
    trainer = make_trainer(strategies[num_workers], graph, method)
    matrices = Gossip(graph).weights(num_workers)
    run = ChangingChoco(
        matrices, flat(trainer.weights()), GAMMA, lambda: make_compress(method)
    )
    mean = np.mean(worker_weights(trainer), axis=0)
    for gradients in make_gradients(num_workers, 6, shapes=SHAPES):
        trainer.step(gradients)
        run.round(local_updates(gradients))
        for actual, expected in zip(worker_weights(trainer), run.weights, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-10)
        mean = mean + np.mean(local_updates(gradients), axis=0)
        np.testing.assert_allclose(
            np.mean(worker_weights(trainer), axis=0), mean, rtol=1e-9
        )


@pytest.mark.parametrize(
    ("graph", "method"),
    [
        pytest.param("exponential", "top_k", marks=pytest.mark.slow),
        pytest.param(DIRECTED, "power_sgd", marks=pytest.mark.exhaustive),
        pytest.param(DIRECTED, "top_k", marks=pytest.mark.exhaustive),
    ],
)
def test_workers_reach_a_consensus_with_zero_gradients(strategies, graph, method):
    num_workers = 4 if graph == "exponential" else 3
    trainer = make_trainer(strategies[num_workers], graph, method, traced=True)
    first, *_ = make_gradients(num_workers, 1, shapes=SHAPES)
    trainer.step(first)
    zeros = [[np.zeros(s) for s in SHAPES] for _ in range(num_workers)]
    before = disagreement(trainer)
    for _ in range(60):
        trainer.step(zeros)
    assert disagreement(trainer) < 0.1 * before


@pytest.mark.parametrize(
    ("graph", "method"),
    rows(
        [("exponential", "power_sgd"), ("ring", "power_sgd"), ("exponential", "top_k")],
        [("exponential", "power_sgd")],
    ),
)
def test_resumes_exactly_or_from_the_mean(strategies, graph, method):
    steps = make_gradients(3, 5, "float32", SHAPES)
    trainer, resumed = (
        make_trainer(strategies[3], graph, method, "float32") for _ in range(2)
    )
    for gradients in steps[:3]:
        trainer.step(gradients)
    saved = trainer.save()
    resumed.load(saved)
    for gradients in steps[3:]:
        trainer.step(gradients)
        resumed.step(gradients)
    for actual, expected in zip(
        worker_weights(trainer), worker_weights(resumed), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    for num_workers in (1, 2):
        other = make_trainer(strategies[num_workers], graph, method, "float32")
        other.load(saved)
        mean = np.mean(worker_weights(other), axis=0)
        (gradients,) = make_gradients(num_workers, 1, "float32", SHAPES)
        other.step(gradients)
        mean = mean + np.mean(local_updates(gradients), axis=0)
        np.testing.assert_allclose(
            np.mean(worker_weights(other), axis=0), mean, atol=1e-5
        )


def test_state_stays_after_a_worker_is_reset(strategies):
    trainer = make_trainer(strategies[3], PATH, "power_sgd")
    *before, now, after = make_gradients(3, 4, shapes=SHAPES)
    for gradients in before:
        trainer.step(gradients)
    copies = trainer.strategy.experimental_local_results(trainer.variables[0].value)
    copies[2].assign(np.full(SHAPES[0], np.inf))
    mean = None
    for gradients in (now, after):
        trainer.step(gradients)
        if mean is not None:
            mean = mean + np.mean(local_updates(gradients), axis=0)
            np.testing.assert_allclose(
                np.mean(worker_weights(trainer), axis=0), mean, rtol=1e-9
            )
        mean = np.mean(worker_weights(trainer), axis=0)
    assert trainer.optimizer.resets == 1


def test_set_weights_replace_neighbor_replicas(strategies):
    """Old replicas would draw workers back to the old weights."""
    trainer, fresh = (make_trainer(strategies[2], "ring", "top_k") for _ in range(2))
    steps = make_gradients(2, 6, shapes=SHAPES)
    for gradients in steps[:3]:
        trainer.step(gradients)
    for variable, value in zip(
        trainer.variables, initial_weights("float64", SHAPES), strict=True
    ):
        variable.assign(value)
    trainer.optimizer.restart_round()
    for gradients in steps[3:]:
        trainer.step(gradients)
        fresh.step(gradients)
        np.testing.assert_allclose(
            worker_weights(trainer), worker_weights(fresh), rtol=1e-12
        )
