"""0/1 Adam of `study/adam.py`, against NumPy."""

import keras
import numpy as np
import pytest
from experiments import adam
from harness import Trainer, initial_weights, make_gradients
from lossy import signs
from rivals import zero_one_adam

RATE, DECAY, STEPS = 0.125, 0.05, 12
SHAPES = [(40, 30), (5,)]  # the second is uncompressed
DENSE, ENDS = [0, 2], [0, 1, 2, 3, 6, 8, 11]


class Reference:
    """Lu et al., algorithm 1, for all workers."""

    def __init__(self, weights, num_workers, rates):
        self.num_workers, self.rates, self.step_number = num_workers, rates, 0
        self.weights = [[w.copy() for w in weights] for _ in range(num_workers)]
        self.anchor = [w.copy() for w in weights]
        self.m, self.delta, self.residual = (
            [[np.zeros_like(w) for w in weights] for _ in range(num_workers)]
            for _ in range(3)
        )
        self.v = [np.zeros_like(w) for w in weights]
        self.sum_of_rates, self.num_dense = 0.0, 0

    def step(self, gradients):
        t, self.step_number = self.step_number, self.step_number + 1
        self.num_dense += t in DENSE
        decay = 1 - self.rates[t] * DECAY
        correction = np.sqrt(1 - 0.999**self.num_dense) / (1 - 0.9 ** (t + 1))
        rate = self.rates[t] * correction
        self.sum_of_rates += rate
        for i in range(len(self.v)):
            self.anchor[i] *= decay
            for weights in self.weights:
                weights[i] *= decay
            grads = [worker[i] for worker in gradients]
            if t in DENSE:
                self._dense_step(i, sum(grads), rate)
            else:
                self._local_step(i, grads, rate)
                if t in ENDS:
                    self._synchronize(i)
        if t in ENDS:
            self.sum_of_rates = 0.0

    def _update(self, i, value):
        return value / (np.sqrt(self.v[i]) + 1e-7) * (self.v[i] > 0)

    def _dense_step(self, i, total, rate):
        self.v[i] = 0.999 * self.v[i] + 0.001 * total**2
        for k in range(self.num_workers):
            self.m[k][i] = 0.9 * self.m[k][i] + 0.1 * total
            self.weights[k][i] -= self._update(i, rate * self.m[k][i])
        self.anchor[i] = self.weights[0][i].copy()

    def _local_step(self, i, grads, rate):
        for k, gradient in enumerate(grads):
            mean = 0.9 * self.m[k][i] + 0.1 * self.num_workers * gradient
            self.m[k][i] = mean * (self.v[i] > 0)
            self.delta[k][i] += rate * self.m[k][i]
            self.weights[k][i] -= self._update(i, rate * self.m[k][i])

    def _synchronize(self, i):
        mask, total = self.v[i] > 0, 0
        for k in range(self.num_workers):
            accumulated = (self.delta[k][i] + self.residual[k][i]) * mask
            decoded = accumulated if i == 1 else signs(accumulated) * mask
            self.residual[k][i] = accumulated - decoded
            total = total + decoded / self.num_workers
        self.anchor[i] -= self._update(i, total)
        for k in range(self.num_workers):
            self.weights[k][i] = self.anchor[i].copy()
            self.m[k][i], self.delta[k][i] = total / self.sum_of_rates, 0 * total


@pytest.mark.parametrize("late", [0, 2])
def test_zero_one_adam_equals_numpy_reference(strategies, late):
    """Some entries are zero in the first steps and so have no second moment."""
    schedule = keras.optimizers.schedules.CosineDecay(RATE, STEPS)
    rates = [float(schedule(t)) for t in range(STEPS)]
    trainer = Trainer(
        strategies[2],
        lambda: zero_one_adam.ZeroOneAdam(
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
        per_worker = trainer.local(trainer.variables)
        for weights, expected in zip(per_worker, reference.weights, strict=True):
            for tensor, expected_tensor in zip(weights, expected, strict=True):
                np.testing.assert_allclose(tensor, expected_tensor, atol=2e-5)
        for first, second in zip(*per_worker, strict=True):
            assert np.array_equal(first, second) == (t in ENDS)
    words = -(-40 * 30 // 32)
    round_bytes = 4 * (1 + words) + 4 * 5
    sent = len(DENSE) * 4 * 1205 + (len(ENDS) - len(DENSE)) * round_bytes
    assert trainer.optimizer.stats.bytes == sent


def test_rounds_grow_from_1_to_16_steps():
    """The first rounds have one step, until the learning rate has halved."""
    ends = zero_one_adam.ends_of_rounds(1500)
    lengths = np.diff([-1, *ends])
    assert ends[-1] == 1499
    assert list(dict.fromkeys(lengths[:-1])) == [1, 2, 4, 8, 16]
    assert lengths[:750].tolist() == [1] * 750
    dense = zero_one_adam.dense_steps(1500)
    assert set(dense) < set(ends)
    assert max(dense) < 750


def test_zero_one_adam_is_among_the_runs():
    optimizer = adam.RUNS["0/1 adam"].make(keras.optimizers.AdamW(RATE), 100)
    assert isinstance(optimizer, zero_one_adam.ZeroOneAdam)
