"""Gradient accumulation compared with Keras's, and with steps of one call."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import SHAPES, Trainer, initial_weights, make_gradients
from selection import rows

import tf_dgc

O = keras.optimizers  # noqa: E741
CALLS = 2  # a power of 2, so that means are exact even if graphs multiply by 1 / CALLS
RATES = O.schedules.PiecewiseConstantDecay([3, 5], [0.25, 0.125, 0.0625])  # by calls
AVERAGED = {"use_ema": True, "ema_momentum": 0.5}
INNER = {
    "sgd": lambda **more: O.SGD(0.25, momentum=0.5, weight_decay=0.01, **more),
    "clipped": lambda **more: O.SGD(0.25, global_clipnorm=2.0, **more),
    "adam": lambda **more: O.Adam(0.125, **more),
    "scheduled sgd": lambda rate=RATES, **more: O.SGD(
        rate, momentum=0.5, nesterov=True, weight_decay=0.01, **more
    ),
    "scheduled adam": lambda rate=RATES, **more: O.AdamW(rate, 0.01, **more),
    "averaged": lambda **more: O.SGD(0.25, **AVERAGED, **more),
    "overwritten": lambda **more: O.SGD(
        0.25, ema_overwrite_frequency=2, **AVERAGED, **more
    ),
}
METHODS = {
    "dense": lambda inner: tf_dgc.DGCOptimizer(inner, 0.0),
    "dgc": lambda inner: tf_dgc.DGCOptimizer(inner, 0.97),
    "scheduled": lambda inner: tf_dgc.DGCOptimizer(
        inner, tf_dgc.schedules.PiecewiseConstantSparsity([2], [0.0, 0.97])
    ),
    "qsgd": lambda inner: tf_dgc.CompressedOptimizer(inner, "qsgd"),
    "power_sgd": lambda inner: tf_dgc.CompressedOptimizer(inner, "power_sgd"),
}


def make_trainer(strategy, method, inner, calls=CALLS):
    settings = {"gradient_accumulation_steps": calls} if calls > 1 else {}
    return Trainer(
        strategy,
        lambda: METHODS[method](INNER[inner](**settings)),
        initial_weights("float32"),
    )


def means(steps):
    """Return the mean gradients of each `CALLS` calls, by step and worker."""
    return [
        [
            [sum(values) / np.float32(CALLS) for values in zip(*worker, strict=True)]
            for worker in zip(*steps[i : i + CALLS], strict=True)
        ]
        for i in range(0, len(steps), CALLS)
    ]


def make_alone(strategy, inner):
    settings = {"gradient_accumulation_steps": CALLS}
    weights = initial_weights("float32")
    return Trainer(strategy, lambda: INNER[inner](**settings), weights)


def assert_close(trainer, reference):
    for weight, expected in zip(trainer.weights(), reference.weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("inner", INNER)
def test_without_compression_it_equals_keras(strategies, inner):
    wrapped = make_trainer(strategies[1], "dense", inner)
    alone = make_alone(strategies[1], inner)
    for gradients in make_gradients(1, 4 * CALLS + 1, "float32"):
        wrapped.step(gradients)
        alone.step(gradients)
        assert_close(wrapped, alone)
        for name in ("iterations", "learning_rate"):
            value = float(getattr(wrapped.optimizer, name))
            assert value == float(getattr(alone.optimizer, name))
    for trainer in (wrapped, alone):
        trainer.optimizer.finalize_variable_values(trainer.variables)
    assert_close(wrapped, alone)


@pytest.mark.parametrize("inner", ["scheduled sgd", "scheduled adam", "averaged"])
def test_resumes_within_a_step_like_an_uninterrupted_keras(strategies, inner):
    calls = make_gradients(1, 4 * CALLS, "float32")
    alone = make_alone(strategies[1], inner)
    first, second = (make_trainer(strategies[1], "dense", inner) for _ in range(2))
    for call in calls:
        alone.step(call)
    for call in calls[: CALLS + 1]:
        first.step(call)
    second.load(first.save())
    for call in calls[CALLS + 1 :]:
        second.step(call)
    for trainer in (second, alone):
        trainer.optimizer.finalize_variable_values(trainer.variables)
    assert_close(second, alone)


@pytest.mark.parametrize(
    ("method", "inner"),
    rows(
        itertools.product(METHODS, ["scheduled sgd", "scheduled adam"]),
        [("dgc", "scheduled sgd"), ("dgc", "scheduled adam")],
    ),
)
def test_the_rate_is_that_of_the_last_call(strategies, method, inner):
    """Bit for bit, also for delayed entries."""
    several = make_trainer(strategies[2], method, inner)
    make = functools.partial(INNER[inner], rate=1.0)
    weights = initial_weights("float32")
    one = Trainer(strategies[2], lambda: METHODS[method](make()), weights)
    calls = make_gradients(2, 4 * CALLS, "float32")
    for call in calls:
        several.step(call)
    for num_steps, gradients in enumerate(means(calls)):
        one.optimizer.learning_rate = float(RATES(num_steps * CALLS + CALLS - 1))
        one.step(gradients)
    assert float(several.optimizer.learning_rate) == 0.0625
    for weight, expected in zip(several.weights(), one.weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)


def test_averages_under_a_strategy(strategies):
    """Two workers with one gradient have the averages of one worker."""
    several, one = (make_trainer(strategies[n], "dense", "averaged") for n in (2, 1))
    for (gradients,) in make_gradients(1, 2 * CALLS + 1, "float32"):
        several.step([[g / 2 for g in gradients]] * 2)
        one.step([gradients])
    for trainer in (several, one):
        trainer.optimizer.finalize_variable_values(trainer.variables)
    assert_close(several, one)


def test_several_steps_per_execution():
    """Each call has its own rate, even if a graph has several calls."""
    features = np.random.default_rng(0).normal(size=(64, 40)).astype("float32")
    kernels = []
    for wrap in (lambda inner: inner, lambda inner: tf_dgc.DGCOptimizer(inner, 0.0)):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50)])
        inner = INNER["scheduled sgd"](gradient_accumulation_steps=2)
        model.compile(wrap(inner), "mse", steps_per_execution=4)
        model.fit(features, features[:, :1], 8, verbose=0, shuffle=False)
        kernels.append(model.get_weights()[0])
    np.testing.assert_allclose(*kernels, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "number"),
    rows(
        itertools.product(METHODS, (1, 2, 3)),
        [("dgc", 2), ("scheduled", 2), ("power_sgd", 3)],
    ),
)
def test_a_step_is_that_of_the_mean(strategies, method, number):
    """Bit for bit; other calls change no weight and send nothing."""
    calls = make_gradients(number, 4 * CALLS, "float32")
    several = make_trainer(strategies[number], method, "sgd")
    one = make_trainer(strategies[number], method, "sgd", calls=1)
    for num_steps, gradients in enumerate(means(calls)):
        before = several.weights()
        for call in calls[num_steps * CALLS : (num_steps + 1) * CALLS]:
            for weight, expected in zip(several.weights(), before, strict=True):
                np.testing.assert_array_equal(weight, expected)
            assert several.optimizer.stats.steps == num_steps
            several.step(call)
        one.step(gradients)
        for weight, expected in zip(several.weights(), one.weights(), strict=True):
            np.testing.assert_array_equal(weight, expected)
    assert several.optimizer.stats == one.optimizer.stats


def test_rows_are_added_up():
    """Rows of an embedding's gradients may repeat, within a call or in another one."""
    table = keras.Variable(np.zeros((60, 40), "float32"))
    whole = keras.Variable(np.zeros((60, 40), "float32"))
    optimizers = [
        tf_dgc.DGCOptimizer(O.SGD(1.0, gradient_accumulation_steps=2), 0.9)
        for _ in range(2)
    ]
    for indices in ([3, 3, 7], [7, 50, 1], [0, 0, 0], [3, 2, 1]):
        values = (
            np.random.default_rng(indices[0]).normal(size=(3, 40)).astype("float32")
        )
        sparse = tf.IndexedSlices(values, np.array(indices), (60, 40))
        optimizers[0].apply([sparse], [table])
        optimizers[1].apply([tf.convert_to_tensor(sparse)], [whole])
    assert np.count_nonzero(table) > 100
    np.testing.assert_allclose(table, whole, rtol=1e-6)


def test_a_variable_without_gradient_in_the_last_call():
    """It keeps its accumulated gradient, which Keras drops."""
    pair = [keras.Variable(np.zeros(SHAPES[0], "float32")) for _ in range(2)]
    optimizer = tf_dgc.DGCOptimizer(O.SGD(1.0, gradient_accumulation_steps=2), 0.0)
    ones = tf.ones(SHAPES[0])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([ones, ones], pair)
        optimizer.apply([ones, None], pair)
        optimizer.apply([ones, ones], pair)
        optimizer.apply([ones, ones], pair)
    assert np.all(pair[0].numpy() == -2.0)
    assert np.all(pair[1].numpy() == -1.5)


def test_nonfinite_gradients_are_not_accumulated(strategies):
    trainer = make_trainer(strategies[2], "dgc", "sgd")
    calls = make_gradients(2, 2 * CALLS, "float32")
    calls[1][0][0].flat[5] = np.nan
    for call in calls:
        trainer.step(call)
    assert trainer.optimizer.stats.nonfinite == 1
    assert all(np.isfinite(w).all() for w in trainer.weights())


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_resumes_within_a_step(strategies, workers):
    """Bit for bit; another number of workers has the same total."""
    calls = make_gradients(2, 2 * CALLS, "float32")
    first = make_trainer(strategies[2], "dgc", "sgd")
    for call in calls[: CALLS + 1]:
        first.step(call)
    second = make_trainer(strategies[workers], "dgc", "sgd")
    second.load(first.save())
    sums = [t.optimizer.state.accumulation.sums for t in (first, second)]
    for old, new in zip(*sums, strict=True):
        total = new.gather().sum(axis=0)
        np.testing.assert_allclose(old.gather().sum(axis=0), total, rtol=1e-5)
    if workers == 2:
        for call in calls[CALLS + 1 :]:
            first.step(call)
            second.step(call)
        for weight, expected in zip(second.weights(), first.weights(), strict=True):
            np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_resuming_with_another_number_of_calls(strategies, before, after):
    """The rate is Keras's, and a step applies the mean of all its calls."""
    rate = O.schedules.PolynomialDecay(1.0, 64, 0.0)
    first, second = (
        Trainer(
            strategies[1],
            lambda n=n: tf_dgc.DGCOptimizer(
                O.SGD(rate, gradient_accumulation_steps=n), 0.0
            ),
            [np.zeros((40, 50), "float32")],
        )
        for n in (before, after)
    )
    ones = [[np.ones((40, 50), "float32")]]
    for _ in range(7):
        first.step(ones)
    second.load(first.save())
    initial = second.weights()[0]
    for num_steps in range(7, 64):
        assert float(second.optimizer.learning_rate) == 1 - num_steps / 64
        second.step(ones)
        if np.any(second.weights()[0] != initial):
            break
    np.testing.assert_array_equal(initial - second.weights()[0], 1 - num_steps / 64)


def test_fit_and_config():
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50)])
    sgd = O.SGD(0.1, gradient_accumulation_steps=4)
    model.compile(tf_dgc.DGCOptimizer(sgd, 0.9), "mse")
    inputs = np.random.default_rng(0).normal(size=(64, 40)).astype("float32")
    model.fit(inputs, inputs @ np.ones((40, 50), "float32"), 8, verbose=0)
    assert model.optimizer.stats.steps == int(model.optimizer.iterations) == 2
    again = tf_dgc.DGCOptimizer.from_config(model.optimizer.get_config())
    assert again.gradient_accumulation_steps == 4
    with pytest.raises(ValueError, match="cannot be changed any more"):
        model.optimizer.gradient_accumulation_steps = 2
    again.gradient_accumulation_steps = 2
    assert again.gradient_accumulation_steps == 2


def test_incompatible_settings_are_refused():
    sgd = O.SGD(0.1, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="the last of several calls takes the step"):
        tf_dgc.CompressedOptimizer(
            sgd, "float16", collective=tf_dgc.collectives.Overlapped()
        )
    with pytest.raises(ValueError, match="The outer optimizer takes one step"):
        tf_dgc.LocalOptimizer(O.SGD(0.1), 4, outer=sgd)
    optimizer = tf_dgc.DGCOptimizer(O.SGD(0.1))
    with pytest.raises(ValueError, match="must be None or a whole number of calls"):
        optimizer.gradient_accumulation_steps = 1
    scale = keras.Variable(1.0)
    scale.overwrite_with_gradient = True
    with pytest.raises(ValueError, match="Scales of float8 layers"):
        tf_dgc.DGCOptimizer(sgd).build([keras.Variable([1.0]), scale])


def test_under_a_loss_scale(strategies):
    """All workers skip a call with an overflow."""
    settings = {"gradient_accumulation_steps": 2}
    trainer = Trainer(
        strategies[2],
        lambda: O.LossScaleOptimizer(
            tf_dgc.DGCOptimizer(O.SGD(1.0, **settings), 0.9), initial_scale=2.0
        ),
        [np.zeros((40, 50), "float32")],
    )
    calls = make_gradients(2, 3, "float32", [(40, 50)])
    broken = [[np.full((40, 50), np.inf, "float32")], calls[1][1]]
    before = trainer.weights()
    trainer.step(calls[0])
    trainer.step(broken)
    np.testing.assert_array_equal(trainer.weights(), before)
    trainer.step(calls[2])
    assert np.count_nonzero(trainer.weights()[0]) >= 200
