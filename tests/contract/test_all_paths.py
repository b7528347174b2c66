"""Deep Gradient Compression has three paths through a step, and one contract.

`CompressedOptimizer` with `TopK`, and `DGCOptimizer` with the native operations and
without: all make the same bits of the same inputs, in weights, residual and velocity.
"""

import contextlib
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from selection import rows

import tf_dgc
from tf_dgc.ops import loader
from tf_dgc.schedules import PiecewiseConstantSparsity
from tf_dgc.steps import composed, kinds, native, plan

SGD = keras.optimizers.SGD
HAS_NATIVE = loader.native().library is not None
# From 4096 entries on the native operations guess a threshold. The last is exempt.
SHAPES = [(70, 64), (40, 30), (7, 3)]
NATIVE = ("native", "mixed")
STEPS = 3
EXAMPLES = 8
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking takes minutes


class Case(NamedTuple):
    """Settings that all paths are given.

    Attributes:
        workers: how many.
        inner: makes the inner optimizer.
        sparsity: number or schedule.
        value_dtype: of what is sent.
        dtype: of the variables.
        missing: tensors without a gradient in the second step.
        exact: draw numbers whose sums are exact: in a dense step of more than two
            workers, the collective adds in an order of its own.
        paths: that must agree. "composed" knows no dense steps, so it codes values also
            where all are sent, and sends few also where that costs more than all.
        apart: whether exempt tensors are summed by a collective of their own, however
            small they are.
        settings: others.
    """

    workers: int
    inner: Callable[[], Any] = lambda: SGD(0.125, momentum=0.9)
    sparsity: Any = 0.97
    value_dtype: str | None = None
    dtype: str = "float32"
    missing: tuple[int, ...] = ()
    exact: bool = False
    paths: tuple[str, ...] = ("composed", "tensorflow", "native")
    apart: bool = False
    settings: dict[str, Any] = MappingProxyType({})


FROM_DENSE = PiecewiseConstantSparsity([1, 2], [0.0, 0.9, 0.98])
FROM_COSTLY = PiecewiseConstantSparsity([1, 2], [0.0, 0.2, 0.98])
# The first alone uses the native operations; decay makes all call the inner optimizer.
MIXED = {"inner": lambda: SGD(0.125, momentum=0.9, weight_decay=0.01)}
# Tracing takes as many times as long as there are workers; examples take no time.
CASES = {
    "nesterov": Case(1, lambda: SGD(0.125, momentum=0.9, nesterov=True)),
    "error feedback": Case(1, lambda: SGD(0.125)),
    "no correction": Case(1, settings={"momentum_correction": False}),
    "no masking": Case(1, settings={"factor_masking": False}),
    "all compressed": Case(1, settings={"min_compress_size": 0}),
    "missing gradients": Case(1, missing=(0, 2)),
    "adam": Case(1, lambda: keras.optimizers.Adam(0.125), value_dtype="bfloat16"),
    "clipnorm": Case(1, lambda: SGD(0.125, momentum=0.9, clipnorm=3.0)),
    "clipvalue": Case(1, lambda: SGD(0.125, momentum=0.9, clipvalue=0.5)),
    "float16 on the wire": Case(1, value_dtype="float16"),
    "bfloat16 on the wire": Case(1, value_dtype="bfloat16"),
    "float64": Case(1, dtype="float64"),
    "float64, coded": Case(1, dtype="float64", value_dtype="float16"),
    "bfloat16 variables": Case(1, value_dtype="sign", dtype="bfloat16"),
    "small loss scale": Case(
        *(1, lambda: SGD(2.0**-14, momentum=0.9, loss_scale_factor=2**-6)),
        value_dtype="sign",
        dtype="float16",
    ),
    "never sparse, float16 variables": Case(
        *(1, lambda: SGD(2.0**-14, momentum=0.9, loss_scale_factor=2**-6), 0.0),
        dtype="float16",
    ),
    "warm-up, float16 variables": Case(
        1, lambda: SGD(2.0**-10, momentum=0.9), FROM_DENSE, dtype="float16"
    ),
    "never sparse": Case(2, sparsity=0.0),
    "float16 variables": Case(
        *(2, lambda: SGD(2.0**-10, momentum=0.9, nesterov=True)),
        dtype="float16",
        paths=("composed", "native"),
    ),
    "warm-up": Case(2, sparsity=FROM_DENSE, paths=("composed", "native")),
    "warm-up, coded": Case(
        *(2, MIXED["inner"], FROM_COSTLY, "sign"), paths=("tensorflow", "mixed")
    ),
    "mixed workers": Case(2, **MIXED, paths=("mixed", "native")),
    "momentum": Case(3, paths=("composed", "native")),
    "global_clipnorm": Case(
        *(2, lambda: SGD(0.125, momentum=0.9, global_clipnorm=5.0)),
        paths=("tensorflow", "native"),
    ),
    "sign on the wire": Case(4, value_dtype="sign", paths=("tensorflow", "native")),
    "warm-up of four": Case(
        *(4, lambda: SGD(0.125, momentum=0.5), FROM_DENSE),
        exact=True,
        paths=("composed", "native"),
    ),
    "exempt apart": Case(
        *(3, lambda: SGD(0.125, momentum=0.5)),
        exact=True,
        apart=True,
        paths=("composed", "native"),
    ),
    "exempt apart, warm-up": Case(
        *(3, MIXED["inner"], FROM_DENSE, "sign"),
        exact=True,
        apart=True,
        paths=("tensorflow", "mixed"),
    ),
    "exempt apart, float64": Case(
        3, dtype="float64", apart=True, paths=("tensorflow", "native")
    ),
    "costly warm-up": Case(3, sparsity=FROM_COSTLY, paths=("tensorflow", "native")),
}


# Every path, dtype, coding and number of workers at least once; the rest is `slow`.
ALWAYS = [
    "nesterov",
    "no masking",
    "missing gradients",
    "adam",
    "clipnorm",
    "float64, coded",
    "bfloat16 variables",
    "small loss scale",
    "warm-up, float16 variables",
    "never sparse",
    "mixed workers",
    "sign on the wire",
    "exempt apart",
]


# --- the paths ------------------------------------------------------------------------


def make_optimizer(path, case):
    if path != "composed":
        return tf_dgc.DGCOptimizer(
            case.inner(), case.sparsity, value_dtype=case.value_dtype, **case.settings
        )
    if case.sparsity == 0:
        return tf_dgc.CompressedOptimizer(case.inner(), "none", **case.settings)
    method = tf_dgc.compressors.TopK(case.sparsity, case.value_dtype)
    given = {"momentum_correction": True, **case.settings}
    return tf_dgc.CompressedOptimizer(case.inner(), method, **given)


@contextlib.contextmanager
def traced_as(path, apart):
    """Let what is traced be composed, or use the native operations.

    Of these, all workers, none, or the first. Exempt tensors are apart, or as usual.
    """
    real = native.is_live

    def is_live(variables):
        context = tf.distribute.get_replica_context()
        replica = tf.get_static_value(context.replica_id_in_sync_group)
        wanted = {"native": True, "mixed": replica == 0}
        return wanted.get(path, False) and real(variables)

    chosen = [composed.begin] if path == "composed" else kinds.KINDS
    with (
        mock.patch.object(native, "is_live", is_live),
        mock.patch.object(kinds, "KINDS", chosen),
        mock.patch.object(plan, "_WORTH_A_COLLECTIVE", 0 if apart else 2**16),
    ):
        yield


class Path(Trainer):
    """A trainer that is traced once and starts again and again, from any state."""

    def __init__(self, strategy, path, case):
        self.dtype = tf.as_dtype(case.dtype).as_numpy_dtype
        weights = initial_weights(self.dtype, SHAPES)
        super().__init__(
            strategy, lambda: make_optimizer(path, case), weights, traced=True
        )
        variables = [*self.variables, *self.optimizer.variables]
        self._at_first = [(c, c.numpy()) for v in variables for c in self._copies(v)]
        zeros = [np.zeros_like(w) for w in weights]
        with traced_as(path, case.apart):
            for missing in {(), case.missing}:
                self.step([without(zeros, missing)] * case.workers)

    def _copies(self, variable):
        return self.strategy.experimental_local_results(variable.value)

    def restart(self, iteration, velocity, residual):
        """Set all state; `velocity[worker][tensor]`, and `residual` likewise."""
        for copy, value in self._at_first:
            copy.assign(value)
        for copy in self._copies(self.optimizer.iterations):
            copy.assign(iteration)
        state = (self.optimizer.velocity, velocity), (self.optimizer.residual, residual)
        for variables, values in state:
            for i, variable in enumerate(variables):
                for copy, worker in zip(self._copies(variable), values, strict=True):
                    copy.assign(worker[i])

    def outcome(self, gradients):
        """Take a step; return everything that paths must agree about, by its name."""
        try:
            self.step(gradients)
        except tf.errors.InvalidArgumentError as error:
            assert "The sum over workers of what was sent is not finite" in str(error)
            return {"refused": True, **self._of_workers("weights", self.variables)}
        optimizer = self.optimizer
        return {
            "nonfinite": optimizer.stats.nonfinite,
            "entries": optimizer.stats.entries,
            **self._of_workers("weights", self.variables),
            **self._of_workers("velocity", optimizer.velocity),
            **self._of_workers("residual", optimizer.residual),
        }

    def _of_workers(self, name, variables):
        return {
            f"{name} {i} of worker {worker}": copy.numpy()
            for i, variable in enumerate(variables)
            for worker, copy in enumerate(self._copies(variable))
        }


def without(tensors, missing):
    return [None if i in missing else t for i, t in enumerate(tensors)]


# --- the inputs -----------------------------------------------------------------------

# Zeros, what is coded as 0 in float16 or in all types, and what sums may not hold.
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.1, 6e-8, -1e-9, 1e-30, 1.2e-38, 1e-40, 1e-310]
LARGE = [6e4, -7e4, 2.0**126, -(2.0**127), 3e38, 3.4e38, -1e300, 1.7e308]


class Numbers(NamedTuple):
    """Tensors of few distinct numbers, or of these and noise.

    Attributes:
        palette: of numbers, equally likely.
        noise: scale of what is added.
        seed: of the order.
    """

    palette: list[float]
    noise: float
    seed: int

    def make(self, workers, dtype):
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
    """What some steps start from, and their gradients.

    Attributes:
        iteration: of the first step.
        velocity: at first.
        residual: at first.
        gradients: of each step.
        bad: step, worker, tensor, position and value of what is not finite.
    """

    iteration: int
    velocity: Numbers
    residual: Numbers
    gradients: list[Numbers]
    bad: list[tuple[int, int, int, int, float]]

    def steps(self, case, dtype):
        """Return `gradients[step][worker][tensor]`."""
        steps = [numbers.make(case.workers, dtype) for numbers in self.gradients]
        for step, worker, tensor, position, value in self.bad:
            flat = steps[step][worker % case.workers][tensor].reshape(-1)
            flat[position % flat.size] = value
        steps[1] = [without(local, case.missing) for local in steps[1]]
        return steps


# All that is sent is 0 in float16; and some of it is more than a float16 sum may hold.
TINY = Example(
    *(0, Numbers([0.0], 1e-12, 1), Numbers([0.0], 1e-12, 2)),
    [Numbers([0.0], 1e-12, seed) for seed in (3, 4, 5)],
    [],
)
BEYOND = Example(
    *(1, Numbers([0.0], 1e3, 1), Numbers([6e4] + [0.0] * 60, 1e3, 2)),
    [Numbers([0.0], 1e2, seed) for seed in (3, 4, 5)],
    [],
)


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


def examples(case):
    one = st.tuples(
        st.integers(0, STEPS - 1),
        st.integers(0, case.workers - 1),
        st.integers(0, len(SHAPES) - 1),
        st.integers(0, 9999),
        st.sampled_from([np.nan, np.inf, -np.inf]),
    )
    return st.builds(
        Example,
        iteration=st.sampled_from([0, 0, 1, 2, 1000]),
        velocity=numbers(case.exact),
        residual=numbers(case.exact),
        gradients=st.lists(numbers(case.exact), min_size=STEPS, max_size=STEPS),
        bad=st.lists(one, max_size=2),
    )


# --- the contract ---------------------------------------------------------------------


@pytest.mark.parametrize("name", rows(CASES, ALWAYS))
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_all_paths_take_the_same_steps(strategies, name):
    case = CASES[name]
    if not HAS_NATIVE:
        case = case._replace(paths=[p for p in case.paths if p not in NATIVE])
    paths = {p: Path(strategies[case.workers], p, case) for p in case.paths}
    wide = "float64" if case.dtype == "float64" else "float32"

    @settings(max_examples=EXAMPLES, deadline=None, phases=PHASES)
    @given(examples(case))
    def check(drawn):
        state = [
            values.make(case.workers, wide)
            for values in (drawn.velocity, drawn.residual)
        ]
        for path in paths.values():
            path.restart(drawn.iteration, *state)
        dtype = next(iter(paths.values())).dtype
        for gradients in drawn.steps(case, dtype):
            outcomes = {p: path.outcome(gradients) for p, path in paths.items()}
            compare(outcomes)
            if any("refused" in outcome for outcome in outcomes.values()):
                break

    if not case.exact:
        check = example(TINY)(example(BEYOND)(check))
    check()


def compare(outcomes):
    (first, expected), *others = outcomes.items()
    for path, outcome in others:
        assert outcome.keys() == expected.keys(), (path, first)
        for name, value in outcome.items():
            what = f"{name}: {path} (x) and {first} (y) differ"
            np.testing.assert_array_equal(value, expected[name], what)
    for outcome in outcomes.values():
        for name, value in outcome.items():
            mine, _, _ = name.partition(" of worker ")
            if mine.startswith("weights"):
                np.testing.assert_array_equal(value, outcome[f"{mine} of worker 0"])
