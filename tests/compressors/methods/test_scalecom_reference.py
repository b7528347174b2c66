"""`ScaleCom` against the paper's algorithm in NumPy, and its bytes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc import compressors
from tf_dgc.testing import Simulation

SIZE, SPARSITY = 400, 0.9
STEPS = 7


def make_gradient_steps(num_workers, steps=STEPS, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(steps, num_workers, SIZE))


def algorithm_1(steps, beta):
    """Yield sum and memories of each step of gradients `steps[step][worker]`."""
    num_workers = steps.shape[1]
    memory = np.zeros((num_workers, SIZE))
    k = round(SIZE * (1 - SPARSITY))
    for step, gradients in enumerate(steps):
        corrected = memory + gradients
        leader = corrected[step % num_workers]
        chosen = np.argsort(-np.abs(leader))[:k]
        sent = np.zeros_like(corrected)
        sent[:, chosen] = corrected[:, chosen]
        memory = (1 - beta) * memory + beta * (corrected - sent)
        yield sent.sum(axis=0), memory.copy()


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_matches_the_paper(num_workers, beta):
    method = compressors.ScaleCom(SPARSITY, beta)
    simulation = Simulation(method, [(SIZE,)], num_workers, "float64")
    steps = make_gradient_steps(num_workers)
    references = algorithm_1(steps, beta)
    for gradients, (expected, memory) in zip(steps, references, strict=True):
        (total,) = simulation.step([[g] for g in gradients])
        np.testing.assert_allclose(total, expected, rtol=1e-12, atol=1e-12)
        residuals = [worker[0] for worker in simulation.residual]
        np.testing.assert_allclose(residuals, memory, rtol=1e-9, atol=1e-12)


def test_bytes_do_not_depend_on_the_number_of_workers():
    sent = set()
    for num_workers in (1, 2, 4, 8):
        method = compressors.ScaleCom(SPARSITY)
        simulation = Simulation(method, [(SIZE,)], num_workers, "float32")
        (gradients,) = make_gradient_steps(num_workers, 1).astype("float32")
        simulation.step([[g] for g in gradients])
        sent.add(simulation.sent_bytes)
        requests = {type(m) for messages in simulation.messages for m in messages}
        assert requests == {compressors.AllReduce}
    assert len(sent) == 1
    assert method.bytes((SIZE,), tf.float32) < 40 * (4 + 1)


def test_workers_lead_in_turn():
    method = compressors.ScaleCom(SPARSITY)
    simulation = Simulation(method, [(SIZE,)], 3, "float64")
    for step in range(5):
        before = [worker[0] for worker in simulation.residual]
        (gradients,) = make_gradient_steps(3, 1, seed=step)
        simulation.step([[g] for g in gradients])
        magnitudes = np.abs(before[step % 3] + gradients[step % 3])
        (sent,) = simulation.sent[0]
        assert set(np.flatnonzero(sent)) == set(np.argsort(-magnitudes)[:40])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_in_an_optimizer(strategies, momentum):
    """Two rounds of sums (words and values), with momentum correction and masking."""

    def make_optimizer():
        sgd = keras.optimizers.SGD(0.125, momentum)
        method = compressors.ScaleCom(SPARSITY)
        return tf_dgc.CompressedOptimizer(
            sgd,
            method,
            corrections=tf_dgc.Corrections(momentum=momentum > 0),
            diagnostics=tf_dgc.Diagnostics(check_every=1),
        )

    trainer = Trainer(strategies[2], make_optimizer, initial_weights())
    for gradient in make_gradients(2, 3):
        trainer.step(gradient)
    for first, second in trainer.replica_weights():
        np.testing.assert_array_equal(first, second)
    assert trainer.optimizer.stats.ratio > 4


@pytest.mark.parametrize("low_pass", [0, -0.5, 1.5, float("nan")])
def test_bad_settings(low_pass):
    with pytest.raises(ValueError, match="`low_pass` must be a number in"):
        compressors.ScaleCom(low_pass=low_pass)
