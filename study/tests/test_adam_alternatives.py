"""What `study/adam.py` compares Adam correction with, against NumPy."""

import keras
import numpy as np
import pytest
from experiments import adam
from harness import Trainer, initial_weights, make_gradients
from local_reference import AdamW, LocalRun
from lossy import largest, signs
from rivals import onebit
from rivals.ef21 import EF21
from rivals.lamb import FrozenLamb
from rivals.waiting import WaitingAdam

import tf_dgc
from tf_dgc.testing import Simulation

RATE, DECAY, STEPS = 0.125, 0.05, 8
SHAPES = [(40, 30), (5,)]  # the second is exempt
ZERO_ONE = [0, 1, 3, 6]


class OneBitAdam:
    """Tang et al., algorithm 1, with a second moment that follows in some steps."""

    def __init__(self, weights, num_workers, dense_steps, whole):
        self.weights, self.number, self.whole = weights, num_workers, whole
        self.dense_steps, self.step_number, self.followed = dense_steps, 0, 0
        self.m = [np.zeros_like(w) for w in weights]
        self.v = [np.zeros_like(w) for w in weights]
        self.kept = [np.zeros_like(weights[0]) for _ in range(num_workers)]

    def step(self, gradients):
        dense = self.step_number in self.dense_steps
        self.step_number += 1
        self.followed += dense
        for i, w in enumerate(self.weights):
            grads = [worker[i] for worker in gradients]
            if dense:
                self.v[i] = 0.999 * self.v[i] + 0.001 * sum(grads) ** 2
            if dense or i == 1 or self.whole:
                self.m[i] = 0.9 * self.m[i] + 0.1 * sum(grads)
            else:
                self.m[i] = sum(self._sent(k, g) for k, g in enumerate(grads))
            if i == 0:
                self.m[i] *= self.v[i] > 0
            w -= DECAY * RATE * w
            rate = (
                RATE * np.sqrt(1 - 0.999**self.followed) / (1 - 0.9**self.step_number)
            )
            w -= rate * self.m[i] / (np.sqrt(self.v[i]) + 1e-7) * (self.v[i] > 0)

    def _sent(self, worker, gradient):
        mask = self.v[0] > 0
        mine = 0.9 * self.m[0] / self.number + 0.1 * gradient + self.kept[worker]
        coded = signs(mine * mask) * mask
        self.kept[worker] = (mine - coded) * mask
        return coded


def late_gradients(steps, late):
    """Return gradients of which some entries are zero in the first steps."""
    found = make_gradients(2, steps, shapes=SHAPES)
    for workers in found[:late]:
        for whole, uncompressed in workers:
            whole[:4] = uncompressed[0] = 0
    return found


@pytest.mark.parametrize(
    ("dense_steps", "whole"),
    [
        (ZERO_ONE, False),
        pytest.param([0, 1], False, marks=pytest.mark.slow),
        pytest.param([0, 1], True, marks=pytest.mark.slow),
    ],
)
def test_one_bit_adam(strategies, dense_steps, whole):
    weights = initial_weights("float64", SHAPES)

    def make():
        rule = onebit.FrozenAdam(dense_steps, learning_rate=RATE, weight_decay=DECAY)
        method = onebit.OneBitMomentum(dense_steps, whole=whole)
        return tf_dgc.CompressedOptimizer(
            rule, method, corrections=tf_dgc.Corrections(adam=False)
        )

    trainer = Trainer(strategies[2], make, weights)
    reference = OneBitAdam(initial_weights("float64", SHAPES), 2, dense_steps, whole)
    for gradients in late_gradients(STEPS, 2):
        trainer.step(gradients)
        reference.step(gradients)
        for mine, expected in zip(trainer.weights(), reference.weights, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)
    for mine, expected in zip(
        trainer.local(trainer.optimizer.residual), reference.kept, strict=True
    ):
        np.testing.assert_allclose(0.1 * mine[0], expected, atol=1e-6)


@pytest.mark.parametrize("kind", [onebit.FrozenAdam, FrozenLamb])
def test_entries_without_a_second_moment_stay(strategies, kind):
    """They would be divided by epsilon alone, and nothing of them is kept back."""

    def make():
        rule = kind([0, 1], learning_rate=RATE, weight_decay=0.0)
        return tf_dgc.CompressedOptimizer(
            rule,
            onebit.OneBitMomentum([0, 1]),
            corrections=tf_dgc.Corrections(adam=False),
        )

    before = initial_weights("float64", SHAPES)
    trainer = Trainer(strategies[2], make, before)
    for gradients in late_gradients(4, 2):
        trainer.step(gradients)
    (whole, uncompressed), (start, first) = trainer.weights(), before
    np.testing.assert_array_equal(whole[:4], start[:4])
    assert np.all(whole[4:] != start[4:])
    assert uncompressed[0] == first[0]
    for residual, *_ in trainer.local(trainer.optimizer.residual):
        assert not np.any(residual[:4])
        assert np.all(residual[4:])


def test_one_bit_adam_sends_signs():
    simulation = Simulation(onebit.OneBitMomentum([0]), [(64, 64)], 2)
    sent = []
    for gradients in make_gradients(2, 2, "float32", [(64, 64)]):
        simulation.step(gradients)
        sent.append(simulation.sent_bytes)
    dense, coded = sent
    assert dense > 4 * 64 * 64
    assert 64 * 64 / 8 < coded < 64 * 64 / 8 + 200


def test_dense_steps():
    assert onebit.growing_intervals(20, kappa=2) == [0, 1, 2, 4, 6, 10, 14]
    assert onebit.first_steps(3) == [0, 1, 2]


def test_ef21():
    """`g_i += C(grad - g_i)`, and the sum of the g_i is what arrives."""
    simulation = Simulation(EF21(0.9), [(40, 30)], 3, "float64")
    estimates = np.zeros((3, 40, 30))
    for gradients in make_gradients(3, STEPS, shapes=[(40, 30)]):
        (total,) = simulation.step(gradients)
        for worker, (gradient,) in enumerate(gradients):
            estimates[worker] += largest(gradient - estimates[worker], 120)
        np.testing.assert_allclose(total, estimates.sum(0), rtol=1e-10)
    for worker, (sent,) in enumerate(simulation.sent):
        np.testing.assert_allclose(sent, estimates[worker], rtol=1e-10)


@pytest.mark.parametrize("independent", [True, False])
def test_waiting_adam(independent):
    """Entry by entry, T steps of the mean at once when something arrives."""
    rng = np.random.default_rng(0)
    variable = keras.Variable(rng.normal(size=6), dtype="float64")
    rule = WaitingAdam(independent, learning_rate=RATE, weight_decay=0.0, beta_2=0.99)
    weights = variable.numpy()
    m, v, waited = np.zeros((3, 6))
    for step in range(1, STEPS + 1):
        gradient = rng.normal(size=6) * (rng.random(6) < 0.4)
        rule.apply([gradient], [variable])
        for i, g in enumerate(gradient):
            waited[i] += 1
            if not g:
                continue
            mean = g / waited[i]
            square = g**2 / waited[i] if independent else mean**2
            for moment, value, beta in ((m, mean, 0.9), (v, square, 0.99)):
                share = beta ** waited[i]
                moment[i] = share * moment[i] + (1 - share) * value
            rate = RATE * np.sqrt(1 - 0.99**step) / (1 - 0.9**step)
            weights[i] -= rate * waited[i] * m[i] / (np.sqrt(v[i]) + 1e-7)
            waited[i] = 0
        np.testing.assert_allclose(variable.numpy(), weights, rtol=1e-6)


def test_waiting_adam_is_adamw_where_nothing_waits():
    start = initial_weights("float64", SHAPES)
    found = []
    for kind in (WaitingAdam, keras.optimizers.AdamW):
        variables = [keras.Variable(w, dtype="float64") for w in start]
        rule = kind(learning_rate=RATE, weight_decay=DECAY)
        for ((*gradients,),) in make_gradients(1, 4, shapes=SHAPES):
            rule.apply(gradients, variables)
        found.append([v.numpy() for v in variables])
    for mine, expected in zip(*found, strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-5)


def test_local_adam(strategies):
    """Each worker's own AdamW, and its step in signs."""
    make = adam.RUNS["local adam ef_sign_sgd"].make
    trainer = Trainer(
        strategies[2],
        lambda: make(keras.optimizers.AdamW(RATE, weight_decay=DECAY), STEPS),
        initial_weights("float64", SHAPES),
    )
    reference = LocalRun(
        AdamW(RATE, DECAY), 1, compress=lambda v: signs(v) if v.ndim > 1 else v
    ).start(initial_weights(shapes=SHAPES), 2)
    for gradients in make_gradients(2, STEPS, shapes=SHAPES):
        trainer.step(gradients)
        reference.step(gradients)
        for mine, expected in zip(trainer.weights(), reference.weights[0], strict=True):
            np.testing.assert_allclose(mine, expected, atol=1e-5)
