"""Native preconditioning of gradients, bit-equal to that of TensorFlow operations."""

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


def make_divisor_numbers(active=True, epsilon=1e-7):
    step, factors = tf.constant(3.0, tf.float64), tf.constant([1.0, 4.0])
    return divisor_numbers(factors, step, 0.9, 0.999, epsilon, active)


def make_step(dtype, epsilon=1e-7, active=True, momentum=True, has_nan=False):
    """Return a step of two preconditioned tensors and an uncompressed one."""
    wide = "float64" if dtype == "float64" else "float32"
    layout = [
        TensorSpec(str(i), shape, tf.as_dtype(wide), uncompressed=len(shape) < 2)
        for i, shape in enumerate(SHAPES)
    ]
    rng = np.random.default_rng(7)

    def variables(name, make_values):
        result = [
            PerWorkerVariable(s, wide, f"{name}{i}") for i, s in enumerate(SHAPES)
        ]
        for variable in result:
            variable.value.assign(make_values(tuple(variable.shape)))
        return result

    def random_values(shape):
        return rng.normal(size=shape) * 10.0 ** rng.integers(-20, 19, shape)

    gradients = [
        np.clip(random_values(s), -6e4, 6e4) * rng.integers(0, 2, s) for s in SHAPES
    ]
    if has_nan:
        gradients[0][5, 5] = np.nan
    moments = variables(
        "moment", lambda s: random_values(s) ** 2 * rng.integers(0, 2, s)
    )
    rows = tf.unstack(make_divisor_numbers(active, epsilon))
    divisors = [Divisor(m, row, active) for m, row in zip(moments, rows, strict=False)]
    return LocalStep(
        StepPlan(layout, COUNTS, False),
        [tf.cast(tf.constant(g), dtype) for g in gradients],
        [1.0, 0.375, 1.0],
        variables("velocity", random_values) if momentum else None,
        variables("residual", random_values),
        [tf.constant(11)] * 3,
        0.9 if momentum else 0.0,
        False,
        True,
        [*divisors, None],
    )


def compress(path, step):
    """Return the vector, the buffer and the state after a step."""
    words = tf.function(lambda: path.compress(step)[1:])()
    moments = [d.moment for d in step.divisors if d]
    state = [*(step.velocity or []), *step.residual, *moments]
    return [*(w.numpy() for w in words), *(v.value.numpy() for v in state)]


CASES = {
    "float32": {},
    "float64": {"dtype": "float64"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "no epsilon": {"epsilon": 0.0},
    "no momentum": {"momentum": False},
    "not active": {"active": False},
    "not finite": {"has_nan": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "level"), in_turn(CASES, ["avx2", "baseline", "avx512"])
)
def test_native_results_are_bit_equal(monkeypatch, case, level):
    settings = {"dtype": "float32", **CASES[case]}
    monkeypatch.setenv("TF_DGC_VECTOR_LEVEL", level)
    actual = compress(native, make_step(**settings))
    expected = compress(tensorflow_ops, make_step(**settings))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"divided": [0]}, "a moment and five numbers"),
        ({"divisors": tf.zeros([2, 4], tf.float64)}, "a moment and five numbers"),
        ({"divided": [0, 3]}, "no such gradient to be divided"),
        ({"divided": [1, 0]}, "The second moment of tensor 0 must have 3500 entries"),
    ],
)
def test_invalid_operands_raise_and_change_nothing(monkeypatch, changes, message):
    step = make_step("float32")
    before = [v.value.numpy() for v in step.residual]
    stock_operands = native.divisor_operands

    def operands(divisors):
        return {**stock_operands(divisors), **changes}

    monkeypatch.setattr(native, "divisor_operands", operands)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        native.compress(step)
    for variable, value in zip(step.residual, before, strict=True):
        np.testing.assert_array_equal(variable.value.numpy(), value)
