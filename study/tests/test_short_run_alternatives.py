"""The methods of `study/short_runs.py`, against NumPy."""

import keras
import numpy as np
import pytest
from experiments import budget, short_runs
from harness import Trainer, initial_weights, make_gradients
from rivals import error_feedback, top_k_variants

import tf_dgc
from tf_dgc.testing import Simulation

SHAPE, WORKERS, STEPS = (40, 30), 3, 6
K = 120  # of 1,200 entries, at 90 %
RATE = 0.125


def largest(values, k=K):
    """Return the k largest entries, and zeros elsewhere."""
    smallest = np.sort(np.abs(values), axis=None)[-k]
    return np.where(np.abs(values) >= smallest, values, 0)


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
        estimate, self.shift = self.shift + sent, self.shift + 0.5 * sent
        return estimate


class DecayingErrorFeedback:
    """Top-k with a residual that decays."""

    def __init__(self):
        self.residual = np.zeros(SHAPE)

    def step(self, gradient):
        accumulated = 0.95 * self.residual + gradient
        sent = largest(accumulated)
        self.residual = accumulated - sent
        return sent


@pytest.mark.parametrize(
    ("method", "reference"),
    [
        (error_feedback.MomentumEF21(0.9), EF21Momentum),
        (error_feedback.EControl(0.9), EControl),
        (error_feedback.SparseDIANA(0.9), DIANA),
        (error_feedback.DecayingTopK(0.9), DecayingErrorFeedback),
    ],
    ids=lambda parameter: getattr(parameter, "name", ""),
)
def test_method_equals_numpy_reference(method, reference):
    simulation = Simulation(method, [SHAPE], WORKERS, "float64")
    workers = [reference() for _ in range(WORKERS)]
    for gradients in make_gradients(WORKERS, STEPS, shapes=[SHAPE]):
        (total,) = simulation.step(gradients)
        expected = sum(w.step(g) for w, (g,) in zip(workers, gradients, strict=True))
        np.testing.assert_allclose(total, expected, rtol=1e-10)


def test_hard_threshold_sends_the_average_number_above_it():
    method = top_k_variants.HardThreshold(1.5)
    simulation = Simulation(method, [SHAPE], WORKERS, "float64")
    residual = np.zeros((WORKERS, *SHAPE))
    for gradients in make_gradients(WORKERS, STEPS, shapes=[SHAPE]):
        residual += [g for (g,) in gradients]
        counts = [np.count_nonzero(np.abs(values) > 1.5) for values in residual]
        k = min(round(sum(counts) / WORKERS), 300)  # a quarter of 1,200
        sent = np.array([largest(values, k) for values in residual])
        residual -= sent
        (total,) = simulation.step(gradients)
        np.testing.assert_allclose(total, sent.sum(axis=0), rtol=1e-10)


def test_residual_level_reaches_its_target():
    """The density begins at a quarter, falls, and then stays about constant."""
    method = top_k_variants.ResidualLevel(2.0)
    simulation = Simulation(method, [SHAPE], WORKERS, "float64")
    residual, density, largest_norm = np.zeros((WORKERS, *SHAPE)), 0.25, 0.0
    sizes = []
    for gradients in make_gradients(WORKERS, 150, shapes=[SHAPE]):
        stacked = np.array([g for (g,) in gradients])
        largest_norm = max(largest_norm, np.linalg.norm(stacked))
        density *= (np.linalg.norm(residual) / (2.0 * largest_norm)) ** 0.1
        density = min(max(density, 1 / 1200), 0.25)
        sizes.append(max(1, int(np.ceil(density * 1200 - 1e-9))))
        residual += stacked
        sent = np.array([largest(values, sizes[-1]) for values in residual])
        residual -= sent
        (total,) = simulation.step(gradients)
        np.testing.assert_allclose(total, sent.sum(axis=0), rtol=1e-5)
    assert min(sizes) < sizes[-1] < 300
    assert np.linalg.norm(residual) == pytest.approx(2.0 * largest_norm, rel=0.3)


def test_root_top_k_has_the_density_over_all_layers():
    sizes = [4 * 1200, 1200]
    method = top_k_variants.RootTopK.like(0.1, sizes, None)
    ks = [0.1 * 6000 * share for share in (2 / 3, 1 / 3)]
    shapes = [(80, 60), SHAPE]
    simulation = Simulation(method, shapes, WORKERS, "float64", error_feedback=False)
    (gradients,) = make_gradients(WORKERS, 1, shapes=shapes)
    totals = simulation.step(gradients)
    for i, (total, k) in enumerate(zip(totals, ks, strict=True)):
        expected = sum(largest(worker[i], round(k)) for worker in gradients)
        np.testing.assert_allclose(total, expected, rtol=1e-10)


SHAPES = [(60, 50), (50,), (50, 30)]


@pytest.mark.slow
@pytest.mark.parametrize("types", [{}, short_runs.NARROW])
def test_budget_equals_the_optimizers_count(strategies, types):
    steps = 100
    run_budget = budget.Budget(SHAPES, steps, 2)
    schedule = run_budget.fit(budget.flushed(budget.constant, 0.5), **types)
    total = run_budget.total(schedule, **types)
    assert schedule.boundaries == [50, 51]
    assert 0.95 * run_budget.bytes < total <= run_budget.bytes
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer(
            "sgd", schedule, diagnostics=tf_dgc.Diagnostics(check_every=None), **types
        ),
        initial_weights("float32", SHAPES),
    )
    for gradients in make_gradients(2, steps, "float32", SHAPES):
        trainer.step(gradients)
    assert float(trainer.optimizer.stats.bytes) == total


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
def test_optimizers_of_all_runs_can_be_built(strategies):
    class Task:
        learning_rate, clipnorm = RATE, 1.0

    run_budget = budget.Budget(SHAPES, 100, 2)
    for name, run in short_runs.RUNS.items():
        with strategies[2].scope():
            sgd = keras.optimizers.SGD(RATE, 0.9, global_clipnorm=1.0)
            optimizer = run.make(sgd, run_budget, Task)
            optimizer.build([keras.Variable(np.zeros(s, "float32")) for s in SHAPES])
        assert run.purpose, name
