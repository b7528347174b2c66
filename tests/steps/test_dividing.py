"""Gradients are divided natively as by TensorFlow's operations, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf
from selection import in_turn

from tf_dgc import native_library
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.multiworker.worker_variables import PerWorkerVariable
from tf_dgc.steps import native, tensorflow_ops
from tf_dgc.steps.base import LocalStep, StepPlan
from tf_dgc.steps.preconditioning import Divisor, divisor_numbers

pytestmark = pytest.mark.skipif(
    native_library.load_library().library is None,
    reason=f"no native operations: {native_library.load_library().reason}",
)
SHAPES = [(300, 33), (70, 50), (2001,)]
COUNTS = [100, 7, 2001]


def numbers(active=True, epsilon=1e-7):
    step, factors = tf.constant(3.0, tf.float64), tf.constant([1.0, 4.0])
    return divisor_numbers(factors, step, 0.9, 0.999, epsilon, active)


def make_step(dtype, epsilon=1e-7, active=True, momentum=True, bad=False):
    """Return a step of two tensors that are divided, and an exempt one."""
    wide = "float64" if dtype == "float64" else "float32"
    layout = [
        TensorSpec(str(i), shape, tf.as_dtype(wide), uncompressed=len(shape) < 2)
        for i, shape in enumerate(SHAPES)
    ]
    rng = np.random.default_rng(7)

    def variables(name, make):
        made = [PerWorkerVariable(s, wide, f"{name}{i}") for i, s in enumerate(SHAPES)]
        for variable in made:
            variable.value.assign(make(tuple(variable.shape)))
        return made

    def keys(shape):
        return rng.normal(size=shape) * 10.0 ** rng.integers(-20, 19, shape)

    gradients = [np.clip(keys(s), -6e4, 6e4) * rng.integers(0, 2, s) for s in SHAPES]
    if bad:
        gradients[0][5, 5] = np.nan
    moments = variables("moment", lambda s: keys(s) ** 2 * rng.integers(0, 2, s))
    rows = tf.unstack(numbers(active, epsilon))
    divisors = [Divisor(m, row, active) for m, row in zip(moments, rows, strict=False)]
    return LocalStep(
        StepPlan(layout, COUNTS, False),
        [tf.cast(tf.constant(g), dtype) for g in gradients],
        [1.0, 0.375, 1.0],
        variables("velocity", keys) if momentum else None,
        variables("residual", keys),
        [tf.constant(11)] * 3,
        0.9 if momentum else 0.0,
        False,
        True,
        [*divisors, None],
    )


def results(path, step):
    """Return what a step hands over and leaves."""
    words = tf.function(lambda: path.compress(step)[1:])()
    moments = [d.moment for d in step.divisors if d]
    kept = [*(step.velocity or []), *step.residual, *moments]
    return [*(w.numpy() for w in words), *(v.value.numpy() for v in kept)]


CASES = {
    "float32": {},
    "float64": {"dtype": "float64"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "no epsilon": {"epsilon": 0.0},
    "no momentum": {"momentum": False},
    "not active": {"active": False},
    "not finite": {"bad": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "level"), in_turn(CASES, ["avx2", "baseline", "avx512"])
)
def test_the_same_bits(monkeypatch, case, level):
    settings = {"dtype": "float32", **CASES[case]}
    monkeypatch.setenv("TF_DGC_VECTOR_LEVEL", level)
    mine = results(native, make_step(**settings))
    theirs = results(tensorflow_ops, make_step(**settings))
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"divided": [0]}, "a moment and five numbers"),
        ({"divisors": tf.zeros([2, 4], tf.float64)}, "a moment and five numbers"),
        ({"divided": [0, 3]}, "no such gradient to be divided"),
        ({"divided": [1, 0]}, "The second moment of tensor 0 must have 3500 entries"),
    ],
)
def test_what_does_not_fit_changes_nothing(monkeypatch, changes, what):
    step = make_step("float32")
    before = [v.value.numpy() for v in step.residual]
    given = native.divisor_operands

    def operands(divisors):
        return {**given(divisors), **changes}

    monkeypatch.setattr(native, "divisor_operands", operands)
    with pytest.raises(tf.errors.InvalidArgumentError, match=what):
        native.compress(step)
    for variable, value in zip(step.residual, before, strict=True):
        np.testing.assert_array_equal(variable.value.numpy(), value)
