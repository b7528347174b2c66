"""0/1 Adam of `study/adam.py`, against NumPy."""

import keras
import numpy as np
import pytest
from experiments import adam
from harness import Trainer, initial_weights, make_gradients
from lossy import signs
from rivals import zero_one

RATE, DECAY, STEPS = 0.125, 0.05, 12
SHAPES = [(40, 30), (5,)]  # the second is exempt
DENSE, ENDS = [0, 2], [0, 1, 2, 3, 6, 8, 11]


class Reference:
    """Lu et al., algorithm 1, of all workers."""

    def __init__(self, weights, num_workers, rates):
        self.number, self.rates, self.step_number = num_workers, rates, 0
        self.weights = [[w.copy() for w in weights] for _ in range(num_workers)]
        self.anchor = [w.copy() for w in weights]
        self.m, self.moved, self.kept = (
            [[np.zeros_like(w) for w in weights] for _ in range(num_workers)]
            for _ in range(3)
        )
        self.v = [np.zeros_like(w) for w in weights]
        self.summed, self.followed = 0.0, 0

    def step(self, gradients):
        t, self.step_number = self.step_number, self.step_number + 1
        self.followed += t in DENSE
        decay = 1 - self.rates[t] * DECAY
        corrected = np.sqrt(1 - 0.999**self.followed) / (1 - 0.9 ** (t + 1))
        rate = self.rates[t] * corrected
        self.summed += rate
        for i in range(len(self.v)):
            self.anchor[i] *= decay
            for weights in self.weights:
                weights[i] *= decay
            grads = [worker[i] for worker in gradients]
            if t in DENSE:
                self._dense(i, sum(grads), rate)
            else:
                self._locally(i, grads, rate)
                if t in ENDS:
                    self._end(i)
        if t in ENDS:
            self.summed = 0.0

    def _by(self, i, value):
        return value / (np.sqrt(self.v[i]) + 1e-7) * (self.v[i] > 0)

    def _dense(self, i, total, rate):
        self.v[i] = 0.999 * self.v[i] + 0.001 * total**2
        for k in range(self.number):
            self.m[k][i] = 0.9 * self.m[k][i] + 0.1 * total
            self.weights[k][i] -= self._by(i, rate * self.m[k][i])
        self.anchor[i] = self.weights[0][i].copy()

    def _locally(self, i, grads, rate):
        for k, gradient in enumerate(grads):
            mean = 0.9 * self.m[k][i] + 0.1 * self.number * gradient
            self.m[k][i] = mean * (self.v[i] > 0)
            self.moved[k][i] += rate * self.m[k][i]
            self.weights[k][i] -= self._by(i, rate * self.m[k][i])

    def _end(self, i):
        mask, total = self.v[i] > 0, 0
        for k in range(self.number):
            asked = (self.moved[k][i] + self.kept[k][i]) * mask
            coded = asked if i == 1 else signs(asked) * mask
            self.kept[k][i] = asked - coded
            total = total + coded / self.number
        self.anchor[i] -= self._by(i, total)
        for k in range(self.number):
            self.weights[k][i] = self.anchor[i].copy()
            self.m[k][i], self.moved[k][i] = total / self.summed, 0 * total


@pytest.mark.parametrize("late", [0, 2])
def test_against_numpy(strategies, late):
    """With entries that are zero in the first steps, and have no second moment."""
    schedule = keras.optimizers.schedules.CosineDecay(RATE, STEPS)
    rates = [float(schedule(t)) for t in range(STEPS)]
    trainer = Trainer(
        strategies[2],
        lambda: zero_one.ZeroOneAdam(
            keras.optimizers.AdamW(schedule, weight_decay=DECAY), DENSE, ENDS
        ),
        initial_weights("float64", SHAPES),
    )
    reference = Reference(initial_weights(shapes=SHAPES), 2, rates)
    steps = make_gradients(2, STEPS, shapes=SHAPES)
    for workers in steps[:late]:
        for whole, uncompressed in workers:
            whole[:4] = uncompressed[0] = 0
    for t, gradients in enumerate(steps):
        trainer.step(gradients)
        reference.step(gradients)
        found = trainer.local(trainer.variables)
        for mine, expected in zip(found, reference.weights, strict=True):
            for tensor, wanted in zip(mine, expected, strict=True):
                np.testing.assert_allclose(tensor, wanted, atol=2e-5)
        for first, second in zip(*found, strict=True):
            assert np.array_equal(first, second) == (t in ENDS)
    words = -(-40 * 30 // 32)
    coded = 4 * (1 + words) + 4 * 5
    sent = len(DENSE) * 4 * 1205 + (len(ENDS) - len(DENSE)) * coded
    assert trainer.optimizer.stats.bytes == sent


def test_when_rounds_end():
    """They are of one step until the rate has halved, and of 16 at most."""
    ends = zero_one.ends_of_rounds(1500)
    lengths = np.diff([-1, *ends])
    assert ends[-1] == 1499
    assert list(dict.fromkeys(lengths[:-1])) == [1, 2, 4, 8, 16]
    assert lengths[:750].tolist() == [1] * 750
    dense = zero_one.dense_steps(1500)
    assert set(dense) < set(ends)
    assert max(dense) < 750


def test_it_is_among_the_runs():
    inner = keras.optimizers.AdamW(RATE)
    assert isinstance(adam.RUNS["0/1 adam"].make(inner, 100), zero_one.ZeroOneAdam)
