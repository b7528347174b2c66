"""Steps from the same inputs by different implementations, and their comparison."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf
from contract import gradients_with_idle_rows, idle_rows
from harness import Trainer, initial_weights
from hypothesis import Phase
from hypothesis import strategies as st

# From 4096 entries on, native operations estimate a threshold. The last tensor is
# uncompressed.
SHAPES = [(70, 64), (40, 30), (7, 3)]
STEPS = 3
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking takes minutes

# Zeros, values that float16 or every type codes as 0, and values whose sums overflow.
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.1, 6e-8, -1e-9, 1e-30, 1.2e-38, 1e-40, 1e-310]
LARGE = [6e4, -7e4, 2.0**126, -(2.0**127), 3e38, 3.4e38, -1e300, 1.7e308]


class Numbers(NamedTuple):
    """Tensors of few distinct numbers, optionally with noise.

    Attributes:
        palette: numbers, equally likely.
        noise: scale of the noise.
        seed: seed of the order and the noise.
    """

    palette: list[float]
    noise: float
    seed: int

    def tensors(self, workers, dtype):
        """Return finite numbers, `[worker][tensor]`."""
        rng = np.random.default_rng(self.seed)
        largest = float(tf.as_dtype(dtype).max)

        def tensor(shape):
            numbers = rng.choice(self.palette, shape)
            if self.noise:
                numbers = numbers + self.noise * rng.normal(size=shape)
            return np.clip(numbers, -largest, largest).astype(dtype)

        return [[tensor(s) for s in SHAPES] for _ in range(workers)]


class Example(NamedTuple):
    """Initial state and gradients of some steps.

    Attributes:
        iteration: iteration of the first step.
        velocity: initial velocity.
        residual: initial residual.
        gradients: gradients of each step.
        bad: step, worker, tensor, position and value of each non-finite entry.
    """

    iteration: int
    velocity: Numbers
    residual: Numbers
    gradients: list[Numbers]
    bad: list[tuple[int, int, int, int, float]]

    def steps(self, workers, dtype, missing=()):
        """Return `gradients[step][worker][tensor]`."""
        steps = [numbers.tensors(workers, dtype) for numbers in self.gradients]
        for step, worker, tensor, position, value in self.bad:
            flat = steps[step][worker % workers][tensor].reshape(-1)
            flat[position % flat.size] = value
        steps[1] = [without(local, missing) for local in steps[1]]
        return steps


def numbers(exact):
    any_size = st.sampled_from(SPECIAL) | st.sampled_from(LARGE) | st.floats(-9, 9)
    ordinary = st.sampled_from(SPECIAL) | st.floats(-9, 9)
    small = st.integers(-8, 8).map(float)
    elements = [small] if exact else [ordinary, any_size]
    return st.builds(
        Numbers,
        palette=st.one_of(st.lists(e, min_size=1, max_size=4) for e in elements),
        noise=st.just(0.0) if exact else st.sampled_from([0.0, 0.0, 1e-3, 1.0, 1e4]),
        seed=st.integers(0, 2**32 - 1),
    )


def examples(workers, exact=False):
    bad_entry = st.tuples(
        st.integers(0, STEPS - 1),
        st.integers(0, workers - 1),
        st.integers(0, len(SHAPES) - 1),
        st.integers(0, 9999),
        st.sampled_from([np.nan, np.inf, -np.inf]),
    )
    return st.builds(
        Example,
        iteration=st.sampled_from([0, 0, 1, 2, 1000]),
        velocity=numbers(exact),
        residual=numbers(exact),
        gradients=st.lists(numbers(exact), min_size=STEPS, max_size=STEPS),
        bad=st.lists(bad_entry, max_size=2),
    )


def without(tensors, missing):
    return [None if i in missing else t for i, t in enumerate(tensors)]


class Path(Trainer):
    """A trainer that is traced once and can be restarted from any state."""

    def __init__(self, strategy, make_optimizer, dtype="float32", missing=()):
        self.dtype = tf.as_dtype(dtype).as_numpy_dtype
        weights = initial_weights(self.dtype, SHAPES)
        super().__init__(strategy, make_optimizer, weights, traced=True)
        variables = [*self.variables, *self.optimizer.variables]
        self._initial = [(c, c.numpy()) for v in variables for c in self._copies(v)]
        zeros = [np.zeros_like(w) for w in weights]
        for absent in {(), missing}:
            self.step([without(zeros, absent)] * strategy.num_replicas_in_sync)

    def _copies(self, variable):
        return self.strategy.experimental_local_results(variable.value)

    def restart(self, iteration, velocity, residual):
        """Set all state; `velocity` and `residual` are indexed `[worker][tensor]`."""
        for copy, value in self._initial:
            copy.assign(value)
        for copy in self._copies(self.optimizer.iterations):
            copy.assign(iteration)
        optimizer = self.optimizer
        # Second moments are not negative.
        second_moment = [[np.abs(v) for v in local] for local in velocity]
        state = (
            (optimizer.velocity, velocity),
            (optimizer.residual, residual),
            (optimizer.second_moment, second_moment),
        )
        for variables, values in state:
            for i, variable in enumerate(variables):
                for copy, worker in zip(self._copies(variable), values, strict=True):
                    copy.assign(worker[i])

    def outcome(self, gradients):
        """Take a step; return by name the results that all paths must share."""
        try:
            self.step(gradients)
        except tf.errors.InvalidArgumentError as error:
            assert "The sum over workers of what was sent is not finite" in str(error)
            return {"refused": True, **self._values("weights", self.variables)}
        optimizer = self.optimizer
        return {
            "nonfinite": optimizer.stats.nonfinite,
            "entries": optimizer.stats.entries,
            **self._values("weights", self.variables),
            **self._values("velocity", optimizer.velocity),
            **self._values("residual", optimizer.residual),
            **self._values("second moment", optimizer.second_moment),
            **self._values("state", self._states()),
        }

    def _states(self):
        return [v for state in self.optimizer.compressor_state for v in state.values()]

    def _values(self, name, variables):
        return {
            f"{name} {i} of worker {worker}": copy.numpy()
            for i, variable in enumerate(variables)
            for worker, copy in enumerate(self._copies(variable))
        }


def check_equal_steps(paths, example, workers, wide="float32", missing=()):
    """Take an example's steps along all paths, by name, and compare."""
    for path in paths.values():
        path.restart(
            example.iteration,
            example.velocity.tensors(workers, wide),
            example.residual.tensors(workers, wide),
        )
    dtype = next(iter(paths.values())).dtype
    for gradients in example.steps(workers, dtype, missing):
        outcomes = {p: path.outcome(gradients) for p, path in paths.items()}
        compare(outcomes)
        if any("refused" in outcome for outcome in outcomes.values()):
            break


def check_steps_with_idle_rows(paths, workers):
    """Take steps in which most rows have no gradient along all paths, and compare.

    Rows without a gradient must not change.
    """
    zeros = [[np.zeros(s) for s in SHAPES]] * workers
    for path in paths.values():
        path.restart(0, zeros, zeros)
    before = [v.numpy() for path in paths.values() for v in path.variables]
    for step in range(STEPS):
        columns = [gradients_with_idle_rows(workers, s, step) for s in SHAPES]
        gradients = [
            [g.astype(np.float32) for g in local]
            for local in zip(*columns, strict=True)
        ]
        compare({p: path.outcome(gradients) for p, path in paths.items()})
    after = [v.numpy() for path in paths.values() for v in path.variables]
    for value_after, value in zip(after, before, strict=True):
        assert not np.array_equal(value_after, value)
        np.testing.assert_array_equal(idle_rows(value_after), idle_rows(value))


def compare(outcomes):
    (first, expected), *others = outcomes.items()
    for path, outcome in others:
        assert outcome.keys() == expected.keys(), (path, first)
        for name, value in outcome.items():
            message = f"{name}: {path} (x) and {first} (y) differ"
            np.testing.assert_array_equal(value, expected[name], message)
    for outcome in outcomes.values():
        for name, value in outcome.items():
            tensor, _, _ = name.partition(" of worker ")
            if tensor.startswith("weights"):
                np.testing.assert_array_equal(value, outcome[f"{tensor} of worker 0"])
