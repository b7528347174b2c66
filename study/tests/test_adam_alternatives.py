"""Alternatives to Adam correction in `study/adam.py`, against NumPy."""

import keras
import numpy as np
import pytest
from experiments import adam
from harness import Trainer, initial_weights, make_gradients
from local_reference import AdamW, LocalRun
from lossy import largest, signs
from rivals import one_bit_adam
from rivals.delay_aware_adam import DelayAwareAdam
from rivals.ef21 import EF21
from rivals.one_bit_lamb import FrozenLamb

import tf_dgc
from tf_dgc.testing import Simulation

RATE, DECAY, STEPS = 0.125, 0.05, 8
SHAPES = [(40, 30), (5,)]  # the second is uncompressed
ZERO_ONE_DENSE_STEPS = [0, 1, 3, 6]


class OneBitAdam:
    """Tang et al., algorithm 1, with a second moment updated in dense steps only."""

    def __init__(self, weights, num_workers, dense_steps, whole):
        self.weights, self.num_workers, self.whole = weights, num_workers, whole
        self.dense_steps, self.step_number, self.num_dense = dense_steps, 0, 0
        self.m = [np.zeros_like(w) for w in weights]
        self.v = [np.zeros_like(w) for w in weights]
        self.residual = [np.zeros_like(weights[0]) for _ in range(num_workers)]

    def step(self, gradients):
        dense = self.step_number in self.dense_steps
        self.step_number += 1
        self.num_dense += dense
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
                RATE * np.sqrt(1 - 0.999**self.num_dense) / (1 - 0.9**self.step_number)
            )
            w -= rate * self.m[i] / (np.sqrt(self.v[i]) + 1e-7) * (self.v[i] > 0)

    def _sent(self, worker, gradient):
        mask = self.v[0] > 0
        momentum = 0.9 * self.m[0] / self.num_workers + 0.1 * gradient
        accumulated = momentum + self.residual[worker]
        decoded = signs(accumulated * mask) * mask
        self.residual[worker] = (accumulated - decoded) * mask
        return decoded


def make_late_gradients(steps, late):
    """Return gradients in which some entries are zero in the first `late` steps."""
    gradients = make_gradients(2, steps, shapes=SHAPES)
    for workers in gradients[:late]:
        for whole, uncompressed in workers:
            whole[:4] = uncompressed[0] = 0
    return gradients


@pytest.mark.parametrize(
    ("dense_steps", "whole"),
    [
        (ZERO_ONE_DENSE_STEPS, False),
        pytest.param([0, 1], False, marks=pytest.mark.slow),
        pytest.param([0, 1], True, marks=pytest.mark.slow),
    ],
)
def test_one_bit_adam_equals_numpy_reference(strategies, dense_steps, whole):
    weights = initial_weights("float64", SHAPES)

    def make():
        rule = one_bit_adam.FrozenAdam(
            dense_steps, learning_rate=RATE, weight_decay=DECAY
        )
        method = one_bit_adam.OneBitMomentum(dense_steps, whole=whole)
        return tf_dgc.CompressedOptimizer(
            rule, method, corrections=tf_dgc.Corrections(adam=False)
        )

    trainer = Trainer(strategies[2], make, weights)
    reference = OneBitAdam(initial_weights("float64", SHAPES), 2, dense_steps, whole)
    for gradients in make_late_gradients(STEPS, 2):
        trainer.step(gradients)
        reference.step(gradients)
        for weights, expected in zip(trainer.weights(), reference.weights, strict=True):
            np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-5)
    for residuals, expected in zip(
        trainer.local(trainer.optimizer.residual), reference.residual, strict=True
    ):
        np.testing.assert_allclose(0.1 * residuals[0], expected, atol=1e-6)


@pytest.mark.parametrize("rule_class", [one_bit_adam.FrozenAdam, FrozenLamb])
def test_entries_without_a_second_moment_do_not_move(strategies, rule_class):
    """Their update would be divided by epsilon alone; they have no residual either."""

    def make():
        rule = rule_class([0, 1], learning_rate=RATE, weight_decay=0.0)
        return tf_dgc.CompressedOptimizer(
            rule,
            one_bit_adam.OneBitMomentum([0, 1]),
            corrections=tf_dgc.Corrections(adam=False),
        )

    initial = initial_weights("float64", SHAPES)
    trainer = Trainer(strategies[2], make, initial)
    for gradients in make_late_gradients(4, 2):
        trainer.step(gradients)
    whole, uncompressed = trainer.weights()
    np.testing.assert_array_equal(whole[:4], initial[0][:4])
    assert np.all(whole[4:] != initial[0][4:])
    assert uncompressed[0] == initial[1][0]
    for residual, *_ in trainer.local(trainer.optimizer.residual):
        assert not np.any(residual[:4])
        assert np.all(residual[4:])


def test_one_bit_adam_sends_signs():
    simulation = Simulation(one_bit_adam.OneBitMomentum([0]), [(64, 64)], 2)
    sent = []
    for gradients in make_gradients(2, 2, "float32", [(64, 64)]):
        simulation.step(gradients)
        sent.append(simulation.sent_bytes)
    dense, one_bit = sent
    assert dense > 4 * 64 * 64
    assert 64 * 64 / 8 < one_bit < 64 * 64 / 8 + 200


def test_numbers_of_dense_steps():
    assert one_bit_adam.growing_intervals(20, kappa=2) == [0, 1, 2, 4, 6, 10, 14]
    assert one_bit_adam.first_steps(3) == [0, 1, 2]


def test_ef21_returns_the_sum_of_estimates():
    """`g_i += C(grad - g_i)`; the result is the sum of the g_i."""
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
def test_delay_aware_adam_equals_numpy_reference(independent):
    """An entry that arrives after T steps gets T steps of the mean at once."""
    rng = np.random.default_rng(0)
    variable = keras.Variable(rng.normal(size=6), dtype="float64")
    rule = DelayAwareAdam(
        independent, learning_rate=RATE, weight_decay=0.0, beta_2=0.99
    )
    weights = variable.numpy()
    m, v, delay = np.zeros((3, 6))
    for step in range(1, STEPS + 1):
        gradient = rng.normal(size=6) * (rng.random(6) < 0.4)
        rule.apply([gradient], [variable])
        for i, g in enumerate(gradient):
            delay[i] += 1
            if not g:
                continue
            mean = g / delay[i]
            square = g**2 / delay[i] if independent else mean**2
            for moment, value, beta in ((m, mean, 0.9), (v, square, 0.99)):
                decay = beta ** delay[i]
                moment[i] = decay * moment[i] + (1 - decay) * value
            rate = RATE * np.sqrt(1 - 0.99**step) / (1 - 0.9**step)
            weights[i] -= rate * delay[i] * m[i] / (np.sqrt(v[i]) + 1e-7)
            delay[i] = 0
        np.testing.assert_allclose(variable.numpy(), weights, rtol=1e-6)


def test_delay_aware_adam_without_delays_is_adamw():
    initial = initial_weights("float64", SHAPES)
    results = []
    for rule_class in (DelayAwareAdam, keras.optimizers.AdamW):
        variables = [keras.Variable(w, dtype="float64") for w in initial]
        rule = rule_class(learning_rate=RATE, weight_decay=DECAY)
        for ((*gradients,),) in make_gradients(1, 4, shapes=SHAPES):
            rule.apply(gradients, variables)
        results.append([v.numpy() for v in variables])
    for weights, expected in zip(*results, strict=True):
        np.testing.assert_allclose(weights, expected, atol=1e-5)


def test_local_adam_equals_numpy_reference(strategies):
    """Each worker has its own AdamW, and sends its delta in signs."""
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
        for weights, expected in zip(
            trainer.weights(), reference.weights[0], strict=True
        ):
            np.testing.assert_allclose(weights, expected, atol=1e-5)
