"""What `study/horizons.py` compares, against NumPy."""

import keras
import numpy as np
import pytest
from experiments import budget, horizons
from harness import Trainer, initial_weights, make_gradients
from rivals import feedback, levels

import tf_dgc
from tf_dgc.testing import Simulation

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


def first(values, k):
    """Return the k entries of largest magnitude, all else zero."""
    least = np.sort(np.abs(values), axis=None)[-k]
    return np.where(np.abs(values) >= least, values, 0)


def test_hard_threshold():
    """Each worker sends as many as are above the threshold on average."""
    method = levels.HardThreshold(1.5)
    simulation = Simulation(method, [SHAPE], WORKERS, "float64")
    waiting = np.zeros((WORKERS, *SHAPE))
    for gradients in make_gradients(WORKERS, STEPS, shapes=[SHAPE]):
        waiting += [g for (g,) in gradients]
        above = [np.count_nonzero(np.abs(w) > 1.5) for w in waiting]
        k = min(round(sum(above) / WORKERS), 300)  # a quarter of 1,200
        sent = np.array([first(w, k) for w in waiting])
        waiting -= sent
        (total,) = simulation.step(gradients)
        np.testing.assert_allclose(total, sent.sum(axis=0), rtol=1e-10)


def test_residual_level():
    """The density is a quarter, falls while little waits, and then stands."""
    simulation = Simulation(levels.ResidualLevel(2.0), [SHAPE], WORKERS, "float64")
    waiting, density, largest = np.zeros((WORKERS, *SHAPE)), 0.25, 0.0
    sizes = []
    for gradients in make_gradients(WORKERS, 150, shapes=[SHAPE]):
        given = np.array([g for (g,) in gradients])
        largest = max(largest, np.linalg.norm(given))
        density *= (np.linalg.norm(waiting) / (2.0 * largest)) ** 0.1
        density = min(max(density, 1 / 1200), 0.25)
        sizes.append(max(1, int(np.ceil(density * 1200 - 1e-9))))
        waiting += given
        sent = np.array([first(w, sizes[-1]) for w in waiting])
        waiting -= sent
        (total,) = simulation.step(gradients)
        np.testing.assert_allclose(total, sent.sum(axis=0), rtol=1e-5)
    assert min(sizes) < sizes[-1] < 300
    assert np.linalg.norm(waiting) == pytest.approx(2.0 * largest, rel=0.3)


def test_a_sparsity_by_layer_spends_one_budget():
    sizes = [4 * 1200, 1200]
    method = levels.RootTopK.like(0.1, sizes, None)
    sent = [0.1 * 6000 * share for share in (2 / 3, 1 / 3)]
    shapes = [(80, 60), SHAPE]
    simulation = Simulation(method, shapes, WORKERS, "float64", error_feedback=False)
    (gradients,) = make_gradients(WORKERS, 1, shapes=shapes)
    totals = simulation.step(gradients)
    for i, (total, k) in enumerate(zip(totals, sent, strict=True)):
        expected = sum(first(own[i], round(k)) for own in gradients)
        np.testing.assert_allclose(total, expected, rtol=1e-10)


SHAPES = [(60, 50), (50,), (50, 30)]


@pytest.mark.slow
@pytest.mark.parametrize("types", [{}, horizons.NARROW])
def test_a_budget_is_what_an_optimizer_counts(strategies, types):
    steps = 100
    spent = budget.Budget(SHAPES, steps, 2)
    schedule = spent.fit(budget.flushed(budget.constant, 0.5), **types)
    assert schedule.boundaries == [50, 51]
    assert 0.95 * spent.bytes < spent.total(schedule, **types) <= spent.bytes
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer(
            "sgd", schedule, diagnostics=tf_dgc.Diagnostics(check_every=None), **types
        ),
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
    for name, run in horizons.RUNS.items():
        with strategies[2].scope():
            sgd = keras.optimizers.SGD(RATE, 0.9, global_clipnorm=1.0)
            made = run.make(sgd, spent, Task)
            made.build([keras.Variable(np.zeros(s, "float32")) for s in SHAPES])
        assert run.why, name
