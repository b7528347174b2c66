"""Sparsity as a function of the iteration."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc import schedules
from tf_dgc.optimizers.state import consensus_texts
from tf_dgc.schedules import schedule_fingerprint

D = keras.optimizers.schedules


@pytest.mark.parametrize(
    ("boundaries", "values"),
    [
        ([2, 1], [0.1, 0.2, 0.3]),
        ([1], [0.1]),
        ([1], [0.5, 1.0]),
        ([], [math.nan]),
        ([1.5], [0.1, 0.2]),
        ([None], [0.1, 0.2]),
    ],
)
def test_bad_piecewise_schedules_are_refused(boundaries, values):
    with pytest.raises(ValueError, match="Received"):
        schedules.PiecewiseConstantSparsity(boundaries, values)


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_steps": -1},
        {"warmup_steps": 0},
        {"warmup_steps": 1.5},
        {"warmup_steps": None},
        {"warmup_steps": math.inf},
        {"stages": []},
        {"stages": None},
        {"final_sparsity": 1.0},
    ],
)
def test_bad_warmup_schedules_are_refused(settings):
    with pytest.raises(ValueError, match="Received"):
        schedules.WarmupSparsity(**{"warmup_steps": 4, **settings})


def test_numbers_of_numpy():
    stages = np.array([0.25, 0.5], "float32")
    warmup = schedules.WarmupSparsity(np.int64(2), np.float32(0.75), stages)
    values = [float(warmup(tf.constant(step))) for step in range(3)]
    assert values == [0.25, 0.5, 0.75]
    piecewise = schedules.PiecewiseConstantSparsity(np.array([1, 2]), [0, 0.5, 0.75])
    for schedule in (warmup, piecewise):
        json.dumps(schedule.get_config())


def test_warmup_reaches_its_stages():
    warmup = schedules.WarmupSparsity(8)
    values = [float(warmup(tf.constant(step))) for step in range(10)]
    assert (
        values == [0.75] * 2 + [0.9375] * 2 + [0.984375] * 2 + [0.996] * 2 + [0.999] * 2
    )


@pytest.mark.parametrize(
    ("steps", "sparsity"),
    [
        (1, 0.75),
        (60, 0.75),
        (75, 0.8),
        (300, 1 - 15 / 300),
        (15_000, 0.999),
        (1e6, 0.999),
    ],
)
def test_sparsity_for_steps(steps, sparsity):
    assert schedules.for_steps(steps) == pytest.approx(sparsity, rel=1e-12)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "300"])
def test_bad_number_of_steps(steps):
    with pytest.raises(ValueError, match="Received: steps="):
        schedules.for_steps(steps)


def grows(step):
    return 0.5 + tf.cast(step, tf.float64) * 1e-5


def make_table(last=0.99, size=50):
    """Return a schedule that is defined for its first steps only."""

    def table(step):
        tf.debugging.assert_less(step, tf.constant(size, step.dtype))
        return tf.gather(tf.constant(np.linspace(0.5, last, size)), step)

    return table


@pytest.mark.parametrize("schedule", [grows, make_table()])
@pytest.mark.parametrize("inner", ["sgd", "adam"])
def test_a_schedule_is_called_only_with_steps_that_are_taken(schedule, inner):
    variable = keras.Variable(np.zeros((40, 50), "float32"))
    optimizer = tf_dgc.DGCOptimizer(inner, schedule)
    functions = optimizer.schedule_functions()
    consensus_texts(optimizer.consensus_config(), functions, [variable])
    optimizer.apply([tf.ones((40, 50))], [variable])
    assert optimizer.stats.entries_per_step < 2000


class Stated(schedules.SparsitySchedule):
    final = 0.9

    def __call__(self, iteration):
        return tf.gather(tf.constant([0.5, 0.9], tf.float64), iteration)

    def get_config(self):
        return {}


@pytest.mark.parametrize(
    ("sparsity", "final"),
    [
        (0.7, 0.7),
        (schedules.WarmupSparsity(8, 0.95), 0.95),
        (schedules.PiecewiseConstantSparsity([1], [0.5, 0.8]), 0.8),
        (D.PiecewiseConstantDecay([1], [0.5, 0.8]), 0.8),
        (D.PolynomialDecay(0.5, 10, 0.8), 0.8),
        (Stated(), 0.9),
        (D.PiecewiseConstantDecay([1], [0.5, 1.0]), 0.5),
        (grows, 0.5),  # has no final value
    ],
)
def test_final_sparsity(sparsity, final):
    assert schedules.final_sparsity(sparsity) == final
    delay = tf_dgc.compressors.TopK(sparsity).mean_delay
    assert delay == pytest.approx(final / (1 - final))


@pytest.mark.parametrize(("attribute", "value"), [("final", 1.0), ("smallest", -0.1)])
def test_attributes_of_a_schedule_are_checked(attribute, value):
    schedule = type("Wrong", (Stated,), {attribute: value})()
    with pytest.raises(
        ValueError, match=rf"`{attribute}` must be a number in \[0, 1\)"
    ):
        tf_dgc.DGCOptimizer("sgd", schedule)


class Constant(tf_dgc.schedules.SparsitySchedule):
    """Returns a number that float32 rounds below the stated minimum."""

    final = smallest = 0.9

    def __init__(self, make):
        self.make = make

    def __call__(self, iteration):
        return self.make(0.9)

    def get_config(self):
        return {"make": self.make}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("make", [float, tf.constant, np.float32])
def test_rounding_to_float32_below_the_stated_minimum_is_accepted(make, traced):
    variable = keras.Variable(np.zeros((400, 500), "float32"))
    optimizer = tf_dgc.DGCOptimizer("sgd", Constant(make))
    optimizer.build([variable])

    def step():
        optimizer.apply([tf.ones((400, 500))], [variable])

    (tf.function(step) if traced else step)()
    assert optimizer.stats.entries == 20_000


@pytest.mark.parametrize("traced", [False, True])
def test_a_value_below_the_stated_minimum_ends_the_step(traced):
    schedule = type("Wrong", (Stated,), {"smallest": 0.6})()
    variable = keras.Variable(np.zeros((40, 50), "float32"))
    optimizer = tf_dgc.DGCOptimizer("sgd", schedule)
    optimizer.build([variable])

    def step():
        optimizer.apply([tf.ones((40, 50))], [variable])

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[0\.6, 1\), but ret"):
        (tf.function(step) if traced else step)()


def branches(step):
    return tf.cond(step < 3, lambda: tf.constant(0.5), lambda: tf.constant(0.9))


def swapped(step):
    return tf.cond(step < 3, lambda: tf.constant(0.9), lambda: tf.constant(0.5))


def narrow(step):
    return tf.cast(tf.cast(step, tf.int8), tf.float32) / 1000.0


def wide(step):
    return tf.cast(tf.cast(step, tf.int32), tf.float32) / 1000.0


@pytest.mark.parametrize("value", [None, [0.5, 0.9], "much", 1.0])
def test_a_schedule_with_a_bad_value_is_refused(value):
    with pytest.raises(ValueError, match=r"sparsity\(0\)"):
        tf_dgc.DGCOptimizer("sgd", lambda step: value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: schedules.PiecewiseConstantSparsity([3], 0.5),
        lambda: schedules.PiecewiseConstantSparsity(3, [0.5, 0.9]),
        lambda: schedules.PiecewiseConstantPeriod(3, [1, 2]),
        lambda: schedules.WarmupSparsity(4, stages=0.5),
        lambda: schedules.WarmupSparsity("4"),
    ],
)
def test_schedules_of_wrong_types_are_refused(make):
    with pytest.raises(ValueError, match=r"Received: .*(3|0\.5|'4')"):
        make()


def test_schedules_are_compared_by_their_operations():
    fingerprints = [schedule_fingerprint(branches)]
    tf.function(branches).get_concrete_function(tf.TensorSpec([], tf.int64))
    fingerprints.append(schedule_fingerprint(branches))
    assert fingerprints[0] == fingerprints[1]
    tables = [make_table(), make_table(0.98), make_table(size=51)]
    others = [*tables, grows, swapped, narrow, wide]
    assert len({fingerprints[0], *map(schedule_fingerprint, others)}) == 8
    assert schedule_fingerprint(make_table()) == schedule_fingerprint(make_table())
    assert schedule_fingerprint(lambda step: step.numpy() / 10) == 0
