"""Choco-SGD on graphs that change, and by methods that have a state, against NumPy."""

import keras
import numpy as np
import pytest
from gossip_reference import ChangingChoco
from harness import Trainer, initial_weights, make_gradients
from selection import rows

import tf_dgc
from tf_dgc.collectives import Gossip

SHAPES = [(12, 10), (5,)]
SIZE = 120
RATE, GAMMA = 0.125, 0.25
PUSHED = [
    [0.5, 0.5, 0],
    [0, 0.5, 0.5],
    [0.5, 0, 0.5],
]  # nobody hears whom it is heard by
PATH = [[0.75, 0.25, 0], [0.25, 0.5, 0.25], [0, 0.25, 0.75]]
METHODS = {
    "top_k": tf_dgc.compressors.TopK(sparsity=0.9),
    "power_sgd": tf_dgc.compressors.PowerSGD(2),
}


def make_trainer(strategy, graph, method, dtype="float64", traced=None):
    def make():
        return tf_dgc.LocalOptimizer(
            keras.optimizers.SGD(RATE),
            1,
            collective=Gossip(graph, GAMMA),
            compressor=METHODS[method],
            min_compress_size=100,
        )

    return Trainer(strategy, make, initial_weights(dtype, SHAPES), traced=traced)


def flat(tensors):
    return np.concatenate([np.ravel(t) for t in tensors])


def each(trainer):
    """Return the flat weights of each worker."""
    return [flat(w) for w in zip(*trainer.replica_weights(), strict=True)]


def moves(gradients):
    return [-RATE * len(gradients) * flat(g) for g in gradients]


def make_compress(method):
    """Return what makes one worker's compression of the flat weights; biases are sent.

    Of a power iteration only what its factors span counts, whatever their bases.
    """
    state = {"q": np.random.default_rng(0).normal(size=(SHAPES[0][1], 2))}

    def top_k(values):
        kept = np.argsort(np.abs(values))[-12:]
        sent = np.zeros_like(values)
        sent[kept] = values[kept]
        return sent

    def power_sgd(values):
        matrix = values.reshape(SHAPES[0])
        basis = np.linalg.qr(matrix @ state["q"])[0]
        state["q"] = matrix.T @ basis
        return np.ravel(basis @ basis.T @ matrix)

    one = {"top_k": top_k, "power_sgd": power_sgd}[method]
    return lambda values: np.concatenate([one(values[:SIZE]), values[SIZE:]])


CASES = [
    ("exponential", "top_k", 4),
    ("exponential", "power_sgd", 4),
    ("exponential", "top_k", 3),
    ("ring", "power_sgd", 2),
    (PATH, "power_sgd", 3),
    (PUSHED, "top_k", 3),
    (PUSHED, "power_sgd", 3),
]


@pytest.mark.parametrize(
    ("graph", "method", "num_workers"),
    rows(CASES, [CASES[1], (PATH, "power_sgd", 3)]),
)
def test_rounds_are_those_of_the_reference(strategies, graph, method, num_workers):
    trainer = make_trainer(strategies[num_workers], graph, method)
    matrices = Gossip(graph).weights(num_workers)
    run = ChangingChoco(
        matrices, flat(trainer.weights()), GAMMA, lambda: make_compress(method)
    )
    mean = np.mean(each(trainer), axis=0)
    for gradients in make_gradients(num_workers, 6, shapes=SHAPES):
        trainer.step(gradients)
        run.round(moves(gradients))
        for mine, theirs in zip(each(trainer), run.weights, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-10)
        mean = mean + np.mean(moves(gradients), axis=0)
        np.testing.assert_allclose(np.mean(each(trainer), axis=0), mean, rtol=1e-9)


@pytest.mark.parametrize(
    ("graph", "method"),
    [
        pytest.param("exponential", "top_k", marks=pytest.mark.slow),
        pytest.param(PUSHED, "power_sgd", marks=pytest.mark.exhaustive),
        pytest.param(PUSHED, "top_k", marks=pytest.mark.exhaustive),
    ],
)
def test_without_moves_workers_come_to_a_consensus(strategies, graph, method):
    number = 4 if graph == "exponential" else 3
    trainer = make_trainer(strategies[number], graph, method, traced=True)
    first, *_ = make_gradients(number, 1, shapes=SHAPES)
    trainer.step(first)
    still = [[np.zeros(s) for s in SHAPES] for _ in range(number)]

    def distance():
        return np.linalg.norm(np.std(each(trainer), axis=0))

    before = distance()
    for _ in range(60):
        trainer.step(still)
    assert distance() < 0.1 * before


@pytest.mark.parametrize(
    ("graph", "method"),
    rows(
        [("exponential", "power_sgd"), ("ring", "power_sgd"), ("exponential", "top_k")],
        [("exponential", "power_sgd")],
    ),
)
def test_goes_on_bit_for_bit_and_with_others_from_the_mean(strategies, graph, method):
    steps = make_gradients(3, 5, "float32", SHAPES)
    whole, again = (
        make_trainer(strategies[3], graph, method, "float32") for _ in range(2)
    )
    for gradients in steps[:3]:
        whole.step(gradients)
    saved = whole.save()
    again.load(saved)
    for gradients in steps[3:]:
        whole.step(gradients)
        again.step(gradients)
    for mine, theirs in zip(each(whole), each(again), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for number in (1, 2):
        other = make_trainer(strategies[number], graph, method, "float32")
        other.load(saved)
        mean = np.mean(each(other), axis=0)
        (gradients,) = make_gradients(number, 1, "float32", SHAPES)
        other.step(gradients)
        mean = mean + np.mean(moves(gradients), axis=0)
        np.testing.assert_allclose(np.mean(each(other), axis=0), mean, atol=1e-5)


def test_a_worker_that_broke_keeps_the_state(strategies):
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
            mean = mean + np.mean(moves(gradients), axis=0)
            np.testing.assert_allclose(np.mean(each(trainer), axis=0), mean, rtol=1e-9)
        mean = np.mean(each(trainer), axis=0)
    assert trainer.optimizer.resets == 1


def test_behind_weights_that_were_set_copies_are_these(strategies):
    """What was known was of others, and would draw workers back to them."""
    used, fresh = (make_trainer(strategies[2], "ring", "top_k") for _ in range(2))
    steps = make_gradients(2, 6, shapes=SHAPES)
    for gradients in steps[:3]:
        used.step(gradients)
    for variable, value in zip(
        used.variables, initial_weights("float64", SHAPES), strict=True
    ):
        variable.assign(value)
    used.optimizer.restart_round()
    for gradients in steps[3:]:
        used.step(gradients)
        fresh.step(gradients)
        np.testing.assert_allclose(each(used), each(fresh), rtol=1e-12)
