"""Methods whose native sums are rounded differently from TensorFlow's.

All workers use the same implementation; the implementations agree to rounding.
"""

from unittest import mock

import keras
import numpy as np
import pytest
from paths import SHAPES, Path, check_steps_with_idle_rows
from selection import rows

import tf_dgc
from tf_dgc import compressors, native_library
from tf_dgc.steps import engine_step, generic_step, implementations

pytestmark = pytest.mark.skipif(
    native_library.load_library().library is None,
    reason="there are no native operations",
)
SGD = keras.optimizers.SGD
CASES = {
    "rank 2": (
        2,
        lambda: compressors.PowerSGD(2),
        lambda: SGD(0.125),
        {"corrections": tf_dgc.Corrections(scale_before_accumulation=False)},
    ),
    "rank 1, momentum": (
        1,
        lambda: compressors.PowerSGD(1),
        lambda: SGD(0.1, 0.9),
        {
            "corrections": tf_dgc.Corrections(
                momentum=True, scale_before_accumulation=False
            )
        },
    ),
    "no error feedback": (
        2,
        compressors.PowerSGD,
        lambda: SGD(0.1, 0.9),
        {"error_feedback": False},
    ),
    "adam": (
        1,
        compressors.PowerSGD,
        keras.optimizers.Adam,
        {"corrections": tf_dgc.Corrections(adam=False)},
    ),
    "demo": (2, lambda: compressors.DeMo(16, 5, 0.9, False), lambda: SGD(0.125), {}),
    "demo, signs in halves": (
        1,
        lambda: compressors.DeMo(value_dtype="float16"),
        lambda: SGD(0.01),
        {},
    ),
}
CASES["rate"] = (*CASES["rank 2"][:3], {})
UNBOUNDED = [
    name for name in CASES if name not in ("rate", "demo", "demo, signs in halves")
]


def make_path(strategy, name, step_implementation):
    _, method, inner, settings = CASES[name]

    def make_optimizer():
        return tf_dgc.CompressedOptimizer(inner(), method(), **settings)

    with mock.patch.object(implementations, "IMPLEMENTATIONS", [step_implementation]):
        return Path(strategy, make_optimizer)


@pytest.fixture(scope="module", params=rows(CASES, [*UNBOUNDED, "demo"]))
def case(request, strategies):
    """Return the number of workers, and paths by name."""
    workers = CASES[request.param][0]
    step_implementations = {
        "composed": generic_step.start_generic_step,
        "engine": engine_step.start_engine_step,
    }
    return workers, {
        name: make_path(strategies[workers], request.param, step_implementation)
        for name, step_implementation in step_implementations.items()
    }


@pytest.fixture
def rng():
    """Return a generator with the same seed in every test."""
    return np.random.default_rng(11)


def draw(rng, workers, scale=1.0):
    return [
        [scale * rng.normal(size=s).astype(np.float32) for s in SHAPES]
        for _ in range(workers)
    ]


def restart(paths, rng, workers):
    velocity, residual = draw(rng, workers), draw(rng, workers)
    for path in paths.values():
        path.restart(3, velocity, residual)


@pytest.mark.slow
def test_both_implementations_take_nearly_equal_steps(case, rng):
    workers, paths = case
    restart(paths, rng, workers)
    for scale in 1.0, 1e-3, 30.0:
        gradients = draw(rng, workers, scale)
        composed, native = (path.outcome(gradients) for path in paths.values())
        assert native.keys() == composed.keys()
        for name, value in native.items():
            expected, largest = composed[name], np.max(np.abs(composed[name]))
            np.testing.assert_allclose(value, expected, 0, 2e-4 * largest, err_msg=name)


def test_zero_gradients_change_nothing(case, rng):
    workers, paths = case
    zeros = [[np.zeros(s) for s in SHAPES]] * workers
    for path in paths.values():
        path.restart(3, velocity=zeros, residual=zeros)
        before = [v.numpy() for v in path.variables]
        path.outcome([[np.zeros(s, np.float32) for s in SHAPES]] * workers)
        for variable, value in zip(path.variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
    gradients = draw(rng, workers)  # later gradients do change the weights
    for path in paths.values():
        assert "refused" not in path.outcome(gradients)
        assert not np.array_equal(path.variables[0].numpy(), before[0])


@pytest.mark.parametrize("case", UNBOUNDED, indirect=True, scope="module")
def test_rows_without_a_gradient_stay(case):
    workers, paths = case
    for name, path in paths.items():
        check_steps_with_idle_rows({name: path}, workers)


def test_nonfinite_gradient_is_counted(case, rng):
    workers, paths = case
    restart(paths, rng, workers)
    gradients = draw(rng, workers)
    gradients[0][1][2, 3] = np.nan
    for path in paths.values():
        assert path.outcome(gradients)["nonfinite"] == 1


@pytest.mark.parametrize("case", UNBOUNDED, indirect=True, scope="module")
def test_overflowing_sum_raises(case, rng):
    workers, paths = case
    velocity, residual = draw(rng, workers, 0.0), draw(rng, workers, 0.0)
    for path in paths.values():
        path.restart(3, velocity, residual)
        gradients = draw(rng, workers, 6e37)
        before = [v.numpy() for v in path.variables]
        assert path.outcome(gradients).get("refused")
        for variable, value in zip(path.variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)


def test_one_worker_without_native_rules_disables_them_on_all(strategies):
    _, method, inner, _ = CASES["rank 2"]
    engines = mock.Mock(wraps=engine_step.start_engine_step)
    with (
        mock.patch.object(
            implementations,
            "IMPLEMENTATIONS",
            [engines, generic_step.start_generic_step],
        ),
        mock.patch(
            "tf_dgc.optimizers.state.all_workers_have_native_rules", return_value=False
        ),
    ):
        Path(strategies[2], lambda: tf_dgc.CompressedOptimizer(inner(), method()))
    assert engines.call_count > 0
    inputs = engines.call_args.args[0]
    assert engine_step.start_engine_step(inputs) is None
