"""What `benchmarks/horizons.py` compares, against NumPy."""

import keras
import numpy as np
import pytest
from adaptive import budget, feedback, short
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc.testing.simulation import Simulation

SHAPE, WORKERS, STEPS = (40, 30), 3, 6
SENT = 120  # of 1,200 entries, at 90 %
RATE = 0.125


def largest(values):
    """Return the largest entries, all else zero."""
    least = np.sort(np.abs(values), axis=None)[-SENT]
    return np.where(np.abs(values) >= least, values, 0)


class EF21Momentum:
    """Fatkhullin et al., algorithm 1."""

    def __init__(self):
        self.momentum, self.estimate = np.zeros((2, *SHAPE))

    def step(self, gradient):
        self.momentum = 0.9 * self.momentum + 0.1 * gradient
        self.estimate += largest(self.momentum - self.estimate)
        return self.estimate


class EControl:
    """Gao et al., algorithm 1."""

    def __init__(self):
        self.error, self.shift = np.zeros((2, *SHAPE))

    def step(self, gradient):
        sent = largest(0.1 * self.error + gradient - self.shift)
        self.error = self.error + gradient - self.shift - sent
        self.shift = self.shift + sent
        return self.shift


class DIANA:
    """Mishchenko et al., algorithm 1, with top-k."""

    def __init__(self):
        self.shift = np.zeros(SHAPE)

    def step(self, gradient):
        sent = largest(gradient - self.shift)
        arrives, self.shift = self.shift + sent, self.shift + 0.5 * sent
        return arrives


class Forgetting:
    """Error feedback that decays."""

    def __init__(self):
        self.residual = np.zeros(SHAPE)

    def step(self, gradient):
        waiting = 0.95 * self.residual + gradient
        sent = largest(waiting)
        self.residual = waiting - sent
        return sent


@pytest.mark.parametrize(
    ("method", "reference"),
    [
        (feedback.MomentumEF21(0.9), EF21Momentum),
        (feedback.EControl(0.9), EControl),
        (feedback.SparseDIANA(0.9), DIANA),
        (feedback.ForgettingTopK(0.9), Forgetting),
    ],
    ids=lambda made: getattr(made, "name", ""),
)
def test_methods(method, reference):
    simulation = Simulation(method, [SHAPE], WORKERS, "float64")
    workers = [reference() for _ in range(WORKERS)]
    for gradients in make_gradients(WORKERS, STEPS, shapes=[SHAPE]):
        (total,) = simulation.step(gradients)
        expected = sum(w.step(g) for w, (g,) in zip(workers, gradients, strict=True))
        np.testing.assert_allclose(total, expected, rtol=1e-10)


SHAPES = [(60, 50), (50,), (50, 30)]


@pytest.mark.slow
@pytest.mark.parametrize("types", [{}, short.NARROW])
def test_a_budget_is_what_an_optimizer_counts(strategies, types):
    steps = 100
    spent = budget.Budget(SHAPES, steps, 2)
    schedule = spent.fit(budget.flushed(budget.constant, 0.5), **types)
    assert schedule.boundaries == [50, 51]
    assert 0.95 * spent.bytes < spent.total(schedule, **types) <= spent.bytes
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer("sgd", schedule, check_every=None, **types),
        initial_weights("float32", SHAPES),
    )
    for gradients in make_gradients(2, steps, "float32", SHAPES):
        trainer.step(gradients)
    counted = float(trainer.optimizer.stats.bytes)
    assert counted == spent.total(schedule, **types)


def test_shapes_of_schedules():
    stages = budget.staged((0.2, 4), (0.5, 1.5), (1, 0.75))
    boundaries, values = stages(0.01, 100)
    assert boundaries == [20, 50]
    assert values == pytest.approx([0.96, 0.985, 0.9925])
    boundaries, values = budget.flushed(stages, 0.2)(0.01, 100)
    assert boundaries == [20, 20, 21, 50]
    assert values[2] == 0
    assert budget.warm_up(0.25, 100)[1] == [0.75, 0.9375, 0.984375, 0.996, 0.75]


@pytest.mark.slow
def test_every_run_can_be_made(strategies):
    class Task:
        learning_rate, clipnorm = RATE, 1.0

    spent = budget.Budget(SHAPES, 100, 2)
    for name, run in short.RUNS.items():
        with strategies[2].scope():
            sgd = keras.optimizers.SGD(RATE, 0.9, global_clipnorm=1.0)
            made = run.make(sgd, spent, Task)
            made.build([keras.Variable(np.zeros(s, "float32")) for s in SHAPES])
        assert run.why, name
