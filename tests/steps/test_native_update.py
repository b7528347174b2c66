"""Invalid operands of the native update rules; tests/optimizers checks the results."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dgc import native_library
from tf_dgc.codecs import buffer
from tf_dgc.codecs.bits import to_words
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.steps import native
from tf_dgc.steps.base import StepPlan

pytestmark = pytest.mark.skipif(
    native_library.load_library().library is None,
    reason=f"no native operations: {native_library.load_library().reason}",
)

PLAN = StepPlan([TensorSpec("", (5,), tf.float32, True)], [5], False)


def make_variables(number):
    return [tf.Variable(tf.ones([5])) for _ in range(number)]


def operands(**changes):
    """Return operands of all operations, for Adam and a variable of 5 entries."""
    variables = changes.pop("variables", None) or make_variables(3)
    fields = {
        "rules": ["adam"],
        "rule_of": [0],
        "decays": [True],
        "hyperparameters": tf.constant([[0.1] * 6], tf.float64),
        **changes,
    }
    return variables, {**fields, "updated": [v.handle for v in variables]}


def make_buffer(values):
    attributes = native.layout_attributes(PLAN)
    body = to_words(tf.constant(values, tf.float32))
    return buffer.add_header(
        attributes["fingerprint"], 5 + 5, [body], tf.constant(True)
    )


def apply_words(words, **changes):
    """Apply the buffer of one worker; return the variables and the error message."""
    variables, arguments = operands(**changes)
    try:
        native.ops().tf_dgc_apply(
            **arguments,
            buffers=words[tf.newaxis],
            counts=native.entry_counts(PLAN),
            T=[tf.float32],
            **native.layout_attributes(PLAN),
        )
    except tf.errors.InvalidArgumentError as error:
        return variables, str(error)
    return variables, ""


def apply_sums(sums, flat=False, **changes):
    variables, arguments = operands(**changes)
    try:
        native.ops().tf_dgc_apply_sums(**arguments, sums=sums, flat=flat)
    except tf.errors.InvalidArgumentError as error:
        return variables, str(error)
    return variables, ""


def are_unchanged(variables):
    return all(np.all(v.numpy() == 1) for v in variables)


def test_valid_buffer_is_applied():
    variables, error = apply_words(make_buffer([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert error == ""
    assert not np.any(variables[0].numpy() == 1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_buffer_that_is_not_finite_changes_nothing(value):
    variables, error = apply_words(make_buffer([1.0, 2.0, 3.0, 4.0, value]))
    assert "not finite" in error
    assert are_unchanged(variables)


def ones(*sizes):
    return [tf.ones([n]) for n in sizes]


@pytest.mark.parametrize(
    ("sums", "flat", "changes", "message"),
    [
        (ones(4), False, {}, "one sum per entry"),
        (ones(6), False, {}, "one sum per entry"),
        (ones(5, 5), False, {}, "one sum per entry"),
        (ones(5), True, {}, "a flag first"),
        (ones(7), True, {}, "a flag first"),
        (ones(6, 1), True, {}, "a flag first"),
        (ones(5), False, {"rules": ["sgd"]}, "before its slots in `updated`, in all 1"),
        (ones(5), False, {"rules": ["adagrad"]}, "no update rule 'adagrad'"),
        (ones(5), False, {"rule_of": [1]}, "no such rule"),
        (ones(5), False, {"rule_of": [0, 0]}, "one value of `rule_of`"),
        (
            ones(5),
            False,
            {"hyperparameters": tf.zeros([1, 5], tf.float64)},
            "must be 6 hyperparameters",
        ),
    ],
)
def test_invalid_operands_change_nothing(sums, flat, changes, message):
    variables, error = apply_sums(sums, flat, **changes)
    assert message in error
    assert are_unchanged(variables)


@pytest.mark.parametrize(
    ("make_slot", "message"),
    [
        (lambda: tf.Variable(tf.ones([4])), "must have 5 entries of type float"),
        (lambda: tf.Variable(tf.ones([5], tf.float64)), "double"),
    ],
)
def test_invalid_slot_changes_nothing(make_slot, message):
    variables = [*make_variables(2), make_slot()]
    _, error = apply_sums(ones(5), variables=variables)
    assert message in error
    assert are_unchanged(variables)


def test_variable_that_is_its_own_slot_raises():
    first, second = make_variables(2)
    _, error = apply_sums(ones(5), variables=[first, second, first])
    assert "passed twice" in error


def test_value_read_before_stays_unchanged():
    variables = make_variables(3)
    before = [v.read_value() for v in variables]
    apply_sums(ones(6), flat=True, variables=variables)
    assert not np.any(variables[0].numpy() == 1)
    for value in before:
        np.testing.assert_array_equal(value, np.ones(5))
