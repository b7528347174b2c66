"""1-bit LAMB and MicroAdam of `study/adam.py`, against NumPy."""

import itertools

import numpy as np
import pytest
from harness import Trainer, initial_weights, make_gradients
from lossy import largest, levels, signs
from rivals import micro_adam, one_bit_adam, one_bit_lamb

import tf_dgc
from tf_dgc.testing import Simulation

RATE, DECAY, STEPS, DENSE = 0.125, 0.05, 9, 4
SHAPES = [(40, 6, 5), (5,)]  # the second is uncompressed


class OneBitLamb:
    """Li et al., algorithm 1, with decoupled weight decay and bias corrections."""

    def __init__(self, weights, num_workers):
        self.weights, self.num_workers, self.t = weights, num_workers, 0
        zeros = [np.zeros_like(w) for w in weights]
        self.m, self.v, self.fresh = ([z.copy() for z in zeros] for _ in range(3))
        self.residual = [np.zeros_like(weights[0]) for _ in range(num_workers)]
        self.average, self.factor = [None, None], [1.0, 1.0]

    def step(self, gradients):
        dense = self.t < DENSE
        self.t += 1
        for i, w in enumerate(self.weights):
            w -= DECAY * RATE * w
            previous = self.m[i]
            self.m[i] = self._momentum(i, [g[i] for g in gradients], dense)
            gradient = (self.m[i] - 0.9 * previous) / 0.1
            self.fresh[i] = 0.999 * self.fresh[i] + 0.001 * gradient**2
            if dense:
                self.v[i] = self.fresh[i].copy()
            frozen_root = self._root(self.v[i], min(self.t, DENSE))
            mask = self.v[i] > 0
            update = self.m[i] / (1 - 0.9**self.t) / frozen_root * mask
            if dense:
                scale = np.linalg.norm(w) / np.linalg.norm(update)
                scale = np.clip(scale, 0.01, 10) if np.any(w) else 1.0
                average = self.average[i] or scale
                self.average[i] = 0.9 * average + 0.1 * scale
            else:
                fresh_root = self._root(self.fresh[i], self.t)
                ratio = np.clip(np.max(frozen_root / fresh_root * mask), 0.5, 4.0)
                factor = self.factor[i]
                self.factor[i] = np.clip(ratio, 0.9 * factor, 1.1 * factor)
                scale = self.factor[i] * self.average[i]
            w -= RATE * scale * update

    def _momentum(self, i, gradients, dense):
        if dense or i == 1:
            return 0.9 * self.m[i] + 0.1 * sum(gradients)
        total, mask = 0.0, self.v[i] > 0
        for worker, gradient in enumerate(gradients):
            momentum = 0.9 * self.m[i] / self.num_workers + 0.1 * gradient
            accumulated = momentum + self.residual[worker]
            decoded = signs(accumulated * mask) * mask
            self.residual[worker] = (accumulated - decoded) * mask
            total += decoded
        return total

    @staticmethod
    def _root(moment, steps):
        return np.sqrt(moment / (1 - 0.999**steps)) + 1e-7


def test_one_bit_lamb(strategies):
    def make():
        dense = one_bit_adam.first_steps(DENSE)
        rule = one_bit_lamb.FrozenLamb(dense, learning_rate=RATE, weight_decay=DECAY)
        return tf_dgc.CompressedOptimizer(
            rule,
            one_bit_adam.OneBitMomentum(dense),
            corrections=tf_dgc.Corrections(adam=False),
        )

    trainer = Trainer(strategies[2], make, initial_weights("float64", SHAPES))
    reference = OneBitLamb(initial_weights("float64", SHAPES), 2)
    steps = make_gradients(2, STEPS, shapes=SHAPES)
    for whole, uncompressed in itertools.chain(*steps[:DENSE]):
        whole[:4] = uncompressed[0] = 0
    for gradients in steps:
        trainer.step(gradients)
        reference.step(gradients)
        for weights, expected in zip(trainer.weights(), reference.weights, strict=True):
            np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-5)
    assert all(0.5 < factor < 1 or 1 < factor < 4 for factor in reference.factor)


def test_microadam_rounds_the_residual_to_16_levels():
    shape = (40, 31)  # the last bucket is not full
    simulation = Simulation(micro_adam.MicroTopK(0.9), [shape], 3, "float64")
    residual = np.zeros((3, *shape))
    for gradients in make_gradients(3, STEPS, shapes=[shape]):
        (total,) = simulation.step(gradients)
        expected = 0.0
        for worker, (gradient,) in enumerate(gradients):
            accumulated = gradient + residual[worker]
            sent = largest(accumulated, 124)
            residual[worker] = levels(accumulated - sent, 64, 16)
            expected += sent
        np.testing.assert_allclose(total, expected, rtol=1e-10)


@pytest.mark.parametrize("values", [[3.0], [0.0] * 70, [-1.0] * 64 + [2.0, -2.0]])
def test_few_or_equal_values_are_exact_levels(values):
    rounded = micro_adam.round_to_levels(np.array(values), 64)
    np.testing.assert_array_equal(rounded, values)


class WindowAdam:
    """Modoranu et al., `AdamStats`: moments from the last gradients only.

    The second tensor is uncompressed and has AdamW's moments of all gradients.
    """

    def __init__(self, weights, window):
        self.weights, self.window = weights, window
        self.gradients = []

    def step(self, gradients):
        self.gradients.append([sum(parts) for parts in zip(*gradients, strict=True)])
        t = len(self.gradients)
        for i, w in enumerate(self.weights):
            window = self.window if i == 0 else t
            recent = [step[i] for step in self.gradients[::-1][:window]]
            m = sum(0.9**age * g for age, g in enumerate(recent))
            v = sum(0.999**age * g**2 for age, g in enumerate(recent))
            m, v = 0.1 * m / (1 - 0.9**t), 0.001 * v / (1 - 0.999**t)
            w -= DECAY * RATE * w
            w -= RATE * m / (np.sqrt(v) + 1e-7)


@pytest.mark.slow
def test_window_adam_equals_numpy_reference(strategies):
    rule = micro_adam.WindowAdam(3, learning_rate=RATE, weight_decay=DECAY)
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.CompressedOptimizer(rule, "none"),
        initial_weights("float64", SHAPES),
    )
    reference = WindowAdam(initial_weights("float64", SHAPES), 3)
    for gradients in make_gradients(2, STEPS, shapes=SHAPES):
        trainer.step(gradients)
        reference.step(gradients)
        for weights, expected in zip(trainer.weights(), reference.weights, strict=True):
            np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-5)
