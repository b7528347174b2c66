"""What the operations that apply a rule refuse; `optimizers` tests what they do."""

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


def ones_of(number):
    return [tf.Variable(tf.ones([5])) for _ in range(number)]


def operands(**changes):
    """Return what all the operations take, for Adam of a variable of 5 entries."""
    variables = changes.pop("variables", None) or ones_of(3)
    given = {
        "rules": ["adam"],
        "rule_of": [0],
        "decays": [True],
        "hyperparameters": tf.constant([[0.1] * 6], tf.float64),
        **changes,
    }
    return variables, {**given, "updated": [v.handle for v in variables]}


def words_of(values):
    agreed = native.layout_attributes(PLAN)
    body = to_words(tf.constant(values, tf.float32))
    return buffer.add_header(agreed["fingerprint"], 5 + 5, [body], tf.constant(True))


def apply_words(words, **changes):
    """Apply buffers of one worker; return the variables that were given."""
    variables, given = operands(**changes)
    try:
        native.ops().tf_dgc_apply(
            **given,
            buffers=words[tf.newaxis],
            counts=native.entry_counts(PLAN),
            T=[tf.float32],
            **native.layout_attributes(PLAN),
        )
    except tf.errors.InvalidArgumentError as error:
        return variables, str(error)
    return variables, ""


def apply_sums(sums, flat=False, **changes):
    variables, given = operands(**changes)
    try:
        native.ops().tf_dgc_apply_sums(**given, sums=sums, flat=flat)
    except tf.errors.InvalidArgumentError as error:
        return variables, str(error)
    return variables, ""


def is_unchanged(variables):
    return all(np.all(v.numpy() == 1) for v in variables)


def test_good_words():
    variables, wrong = apply_words(words_of([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert wrong == ""
    assert not np.any(variables[0].numpy() == 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_words_change_nothing(bad):
    variables, wrong = apply_words(words_of([1.0, 2.0, 3.0, 4.0, bad]))
    assert "not finite" in wrong
    assert is_unchanged(variables)


def ones(*sizes):
    return [tf.ones([n]) for n in sizes]


@pytest.mark.parametrize(
    ("sums", "flat", "changes", "what"),
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
            *(ones(5), False, {"hyperparameters": tf.zeros([1, 5], tf.float64)}),
            "must be 6 hyperparameters",
        ),
    ],
)
def test_what_does_not_fit_changes_nothing(sums, flat, changes, what):
    variables, wrong = apply_sums(sums, flat, **changes)
    assert what in wrong
    assert is_unchanged(variables)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda: tf.Variable(tf.ones([4])), "must have 5 entries of type float"),
        (lambda: tf.Variable(tf.ones([5], tf.float64)), "double"),
    ],
)
def test_a_slot_that_does_not_fit_changes_nothing(other, what):
    variables = [*ones_of(2), other()]
    _, wrong = apply_sums(ones(5), variables=variables)
    assert what in wrong
    assert is_unchanged(variables)


def test_a_variable_that_is_its_own_slot():
    first, second = ones_of(2)
    _, wrong = apply_sums(ones(5), variables=[first, second, first])
    assert "passed twice" in wrong


def test_an_old_value_that_is_still_read_stays_as_it_was():
    variables = ones_of(3)
    before = [v.read_value() for v in variables]
    apply_sums(ones(6), flat=True, variables=variables)
    assert not np.any(variables[0].numpy() == 1)
    for value in before:
        np.testing.assert_array_equal(value, np.ones(5))
