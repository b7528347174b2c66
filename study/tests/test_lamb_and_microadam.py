"""1-bit LAMB and MicroAdam, which `study/adam.py` compares with, against NumPy."""

import itertools

import numpy as np
import pytest
from harness import Trainer, initial_weights, make_gradients
from lossy import largest, levels, signs
from rivals import lamb, micro, onebit

import tf_dgc
from tf_dgc.testing import Simulation

RATE, DECAY, STEPS, DENSE = 0.125, 0.05, 9, 4
SHAPES = [(40, 6, 5), (5,)]  # the second is exempt


class OneBitLamb:
    """Li et al., algorithm 1, with decay of weights apart and biases corrected."""

    def __init__(self, weights, num_workers):
        self.weights, self.number, self.t = weights, num_workers, 0
        zeros = [np.zeros_like(w) for w in weights]
        self.m, self.v, self.fresh = ([z.copy() for z in zeros] for _ in range(3))
        self.kept = [np.zeros_like(weights[0]) for _ in range(num_workers)]
        self.mean, self.factor = [None, None], [1.0, 1.0]

    def step(self, gradients):
        dense = self.t < DENSE
        self.t += 1
        for i, w in enumerate(self.weights):
            w -= DECAY * RATE * w
            before = self.m[i]
            self.m[i] = self._momentum(i, [g[i] for g in gradients], dense)
            gradient = (self.m[i] - 0.9 * before) / 0.1
            self.fresh[i] = 0.999 * self.fresh[i] + 0.001 * gradient**2
            if dense:
                self.v[i] = self.fresh[i].copy()
            still = self._root(self.v[i], min(self.t, DENSE))
            moves = self.v[i] > 0
            update = self.m[i] / (1 - 0.9**self.t) / still * moves
            if dense:
                scale = np.linalg.norm(w) / np.linalg.norm(update)
                scale = np.clip(scale, 0.01, 10) if np.any(w) else 1.0
                mean = self.mean[i] or scale
                self.mean[i] = 0.9 * mean + 0.1 * scale
            else:
                ratio = np.max(still / self._root(self.fresh[i], self.t) * moves)
                last = self.factor[i]
                wanted = np.clip(ratio, 0.5, 4.0)
                self.factor[i] = np.clip(wanted, 0.9 * last, 1.1 * last)
                scale = self.factor[i] * self.mean[i]
            w -= RATE * scale * update

    def _momentum(self, i, gradients, dense):
        if dense or i == 1:
            return 0.9 * self.m[i] + 0.1 * sum(gradients)
        total, moves = 0.0, self.v[i] > 0
        for worker, gradient in enumerate(gradients):
            mine = 0.9 * self.m[i] / self.number + 0.1 * gradient + self.kept[worker]
            coded = signs(mine * moves) * moves
            self.kept[worker] = (mine - coded) * moves
            total += coded
        return total

    @staticmethod
    def _root(moment, steps):
        return np.sqrt(moment / (1 - 0.999**steps)) + 1e-7


def test_one_bit_lamb(strategies):
    def make():
        dense = onebit.first_steps(DENSE)
        rule = lamb.FrozenLamb(dense, learning_rate=RATE, weight_decay=DECAY)
        return tf_dgc.CompressedOptimizer(
            rule,
            onebit.OneBitMomentum(dense),
            corrections=tf_dgc.Corrections(adam=False),
        )

    trainer = Trainer(strategies[2], make, initial_weights("float64", SHAPES))
    reference = OneBitLamb(initial_weights("float64", SHAPES), 2)
    late = make_gradients(2, STEPS, shapes=SHAPES)
    for whole, uncompressed in itertools.chain(*late[:DENSE]):
        whole[:4] = uncompressed[0] = 0
    for gradients in late:
        trainer.step(gradients)
        reference.step(gradients)
        for mine, expected in zip(trainer.weights(), reference.weights, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)
    assert all(0.5 < factor < 1 or 1 < factor < 4 for factor in reference.factor)


def test_what_microadam_keeps():
    """The largest of the accumulator are sent, and the others rounded to 16 levels."""
    shape = (40, 31)  # a last bucket that is not full
    simulation = Simulation(micro.MicroTopK(0.9), [shape], 3, "float64")
    kept = np.zeros((3, *shape))
    for gradients in make_gradients(3, STEPS, shapes=[shape]):
        (total,) = simulation.step(gradients)
        expected = 0.0
        for worker, (gradient,) in enumerate(gradients):
            there = gradient + kept[worker]
            sent = largest(there, 124)
            kept[worker] = levels(there - sent, 64, 16)
            expected += sent
        np.testing.assert_allclose(total, expected, rtol=1e-10)


@pytest.mark.parametrize("values", [[3.0], [0.0] * 70, [-1.0] * 64 + [2.0, -2.0]])
def test_levels_of_few_and_equal_numbers(values):
    found = micro.in_levels(np.array(values), 64)
    np.testing.assert_array_equal(found, values)


class WindowAdam:
    """Modoranu et al., `AdamStats`: moments from the last gradients alone.

    The second tensor, which is exempt, has AdamW's, of all gradients.
    """

    def __init__(self, weights, window):
        self.weights, self.window = weights, window
        self.seen = []

    def step(self, gradients):
        self.seen.append([sum(parts) for parts in zip(*gradients, strict=True)])
        t = len(self.seen)
        for i, w in enumerate(self.weights):
            window = self.window if i == 0 else t
            recent = [step[i] for step in self.seen[::-1][:window]]
            m = sum(0.9**age * g for age, g in enumerate(recent))
            v = sum(0.999**age * g**2 for age, g in enumerate(recent))
            m, v = 0.1 * m / (1 - 0.9**t), 0.001 * v / (1 - 0.999**t)
            w -= DECAY * RATE * w
            w -= RATE * m / (np.sqrt(v) + 1e-7)


@pytest.mark.slow
def test_moments_of_a_window(strategies):
    rule = micro.WindowAdam(3, learning_rate=RATE, weight_decay=DECAY)
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.CompressedOptimizer(rule, "none"),
        initial_weights("float64", SHAPES),
    )
    reference = WindowAdam(initial_weights("float64", SHAPES), 3)
    for gradients in make_gradients(2, STEPS, shapes=SHAPES):
        trainer.step(gradients)
        reference.step(gradients)
        for mine, expected in zip(trainer.weights(), reference.weights, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)
