"""The transition from Adam's own steps to corrected ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients
from selection import in_turn

import tf_dgc
from tf_dgc._internals import keras_rules
from tf_dgc.steps import native

O = keras.optimizers  # noqa: E741
DENSE = 4  # dense steps at the beginning
INNER = {
    "adam": lambda: O.Adam(O.schedules.ExponentialDecay(0.125, 2, 0.5)),
    "amsgrad": lambda: O.Adam(0.125, beta_2=0.6, amsgrad=True),
    "adamax": lambda: O.Adamax(0.125),
    "nadam": lambda: O.Nadam(0.125),
}

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")


def make_trainer(strategy, inner, sparsity):
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([DENSE], [0.0, sparsity])
    return Trainer(
        strategy,
        lambda: tf_dgc.DGCOptimizer(INNER[inner](), schedule),
        initial_weights("float32"),
    )


@pytest.mark.parametrize(("smallest", "stock"), [(0.5, False), (0.0, True)])
def test_stock_steps_are_traced_only_if_possible(strategies, smallest, stock):
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([DENSE], [smallest, 0.97])
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer(INNER["adam"](), schedule),
        initial_weights("float32"),
    )
    for gradients in make_gradients(2, 2, "float32"):
        trainer.step(gradients)
    adam = trainer.optimizer.state.adam
    assert tf.is_tensor(adam.is_uncorrected()) == stock
    assert bool(adam.is_uncorrected()) == stock


def without_first(gradients):
    return [[None, *local[1:]] for local in gradients]


@pytest.mark.parametrize(
    ("inner", "path"), in_turn(INNER, ["operations", "composed"], ["adam", "nadam"])
)
def test_state_of_a_variable_without_gradient_is_transferred(
    strategies, inner, path, monkeypatch
):
    """It does not change until the variable has a gradient again."""
    if path == "composed":
        monkeypatch.setattr(native, "is_available", lambda variables: False)
    trainer = make_trainer(strategies[2], inner, 0.5)  # sparse, with momentum
    steps = make_gradients(2, DENSE + 2, "float32")
    for gradients in steps[:DENSE] + [without_first(g) for g in steps[DENSE:]]:
        trainer.step(gradients)
    optimizer = trainer.optimizer
    rule = optimizer.inner_optimizer
    slots = keras_rules.rule_slots(
        rule, optimizer.state.adam.variant.rule, trainer.variables[0]
    )
    momentum, *moments = (slot.numpy() for slot in slots)
    divisor = moments[-1]
    if inner != "adamax":
        divisor = np.sqrt(divisor / (1 - rule.beta_2 ** (DENSE + 1)))
    states = [optimizer.second_moment, optimizer.largest_moment, optimizer.velocity]
    bfloat16 = tf.bfloat16.as_numpy_dtype  # of synchronizations after both steps
    synchronized = [moment.astype(bfloat16) for moment in moments]
    expected = [*synchronized, momentum / 2 / divisor]
    for variables, values in zip(filter(None, states), expected, strict=True):
        for local in trainer.local(variables):
            np.testing.assert_allclose(local[0], values, rtol=1e-4, atol=1e-6)


def test_the_variable_then_moves_as_far_as_in_keras(strategies):
    """All entries are sent, so that only the divisors differ."""
    alone = Trainer(strategies[1], INNER["adam"], initial_weights("float32"))
    wrapped = make_trainer(strategies[1], "adam", 1e-6)
    pair = (alone, wrapped)
    distances = []
    for step, gradients in enumerate(make_gradients(1, DENSE + 4, "float32")):
        absent = DENSE <= step < DENSE + 2
        before = [trainer.weights()[0] for trainer in pair]
        for trainer in pair:
            trainer.step(without_first(gradients) if absent else gradients)
        after = [trainer.weights()[0] for trainer in pair]
        distances.append(
            [np.abs(a - b).mean() for a, b in zip(after, before, strict=True)]
        )
    np.testing.assert_allclose(*np.transpose(distances), rtol=0.15)


ALWAYS_HALF = tf_dgc.schedules.PiecewiseConstantSparsity([10**6], [0.5, 0.5])
HIGH = tf_dgc.schedules.PiecewiseConstantSparsity([DENSE], [0.0, 0.97])


@pytest.mark.parametrize(
    ("before", "workers", "after", "schedule"),
    [((4, 0.5), 2, 0.5, ALWAYS_HALF), ((1, HIGH), 1, 0.97, HIGH)],
    ids=["fewer workers", "from a schedule"],
)
def test_stock_steps_of_an_earlier_run_count(
    strategies, before, workers, after, schedule
):
    """They count whether or not the current run may have dense steps."""

    def make(workers, sparsity):
        return Trainer(
            strategies[workers],
            lambda: tf_dgc.DGCOptimizer(INNER["adam"](), sparsity),
            initial_weights("float32"),
        )

    first = make(*before)
    for gradients in make_gradients(before[0], DENSE, "float32"):
        first.step(gradients)
    assert not any(np.any(v.numpy()) for v in first.optimizer.second_moment)
    second, third = make(workers, after), make(workers, schedule)
    for trainer in (second, third):
        trainer.load(first.save())
        for gradients in make_gradients(workers, 2, "float32", seed=3):
            trainer.step(gradients)
    for weight, expected in zip(second.weights(), third.weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)
