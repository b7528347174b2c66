"""Stock optimizers whose updates are conditional, under a strategy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients
from selection import slow

import tf_dgc

O = keras.optimizers  # noqa: E741
SHAPES = [(8, 5), (5,)]
AVERAGES = {"use_ema": True, "ema_momentum": 0.5}
INNER = {
    "accumulates": lambda: O.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=2, weight_decay=0.1
    ),
    "averages": lambda: O.Adam(0.1, ema_overwrite_frequency=3, **AVERAGES),
    "both": lambda: O.SGD(
        0.1, gradient_accumulation_steps=2, ema_overwrite_frequency=2, **AVERAGES
    ),
}
WRAPPERS = {
    "stock": lambda inner: inner,
    "dgc": lambda inner: tf_dgc.DGCOptimizer(inner, 0.0),
    "compressed": lambda inner: tf_dgc.CompressedOptimizer(inner, "none"),
}


def weights_after(strategy, make, traced, number, steps=7):
    """Return the weights after steps with the same gradients on all workers."""
    trainer = Trainer(strategy, make, initial_weights("float32", SHAPES), traced)
    for (gradients,) in make_gradients(1, steps, "float32", SHAPES):
        trainer.step([[g / number for g in gradients]] * number)
    return trainer.weights()


@pytest.fixture(scope="module")
def one_replica():
    class Strategy(tf.distribute.MirroredStrategy):
        _collective_key_base = 500  # as in conftest.py

    return tf_dgc.prepare(Strategy(["CPU:0"]))


def assert_equal(weights, expected):
    for value, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_workers_equal_keras_alone(strategies, wrapper, inner):
    tf_dgc.prepare(strategies[2])
    make = INNER[inner]
    expected = weights_after(strategies[1], make, False, 1)
    wrap = WRAPPERS[wrapper]
    weights = weights_after(strategies[2], lambda: wrap(make()), True, 2)
    assert_equal(weights, expected)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_strategy_of_one_worker_equals_keras_alone(one_replica, wrapper):
    make, wrap = INNER["both"], WRAPPERS[wrapper]
    weights = weights_after(one_replica, lambda: wrap(make()), True, 1)
    assert_equal(weights, weights_after(tf.distribute.get_strategy(), make, False, 1))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_outer_optimizer_overwrites_by_its_averages(strategies, num_workers):
    """With rounds of one step, it averages the same weights as Keras."""

    def make_sgd(rate):
        return O.SGD(rate, ema_overwrite_frequency=3, **AVERAGES)

    weights = weights_after(
        strategies[num_workers],
        lambda: tf_dgc.LocalOptimizer(O.SGD(0.1), 1, outer=make_sgd(1.0)),
        True,
        num_workers,
    )
    expected = weights_after(strategies[1], lambda: make_sgd(0.1), False, 1)
    assert_equal(weights, expected)


@pytest.mark.parametrize("inner", INNER)
def test_clipping_is_that_of_eager_keras(strategies, inner):
    """Each replica clips its own gradients, as an eager step of Keras does."""

    def make():
        optimizer = INNER[inner]()
        optimizer.clipnorm = 0.5
        return optimizer

    tf_dgc.prepare(strategies[2])
    traced = weights_after(strategies[2], make, True, 2)
    eager = weights_after(strategies[2], make, False, 2)
    assert_equal(traced, eager)


@pytest.mark.parametrize("steps", [1, slow(2)])
def test_fit_with_a_stock_optimizer_that_accumulates(strategies, one_replica, steps):
    """Also in the loop of `steps_per_execution`."""
    x = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    def fit_weights(strategy):
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(1, kernel_initializer="ones")]
            )
            model.compile(INNER["both"](), "mse", steps_per_execution=steps)
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    tf_dgc.prepare(strategies[2])
    expected = fit_weights(strategies[1])
    for strategy in (strategies[2], one_replica):
        assert_equal(fit_weights(strategy), expected)


@pytest.mark.slow
def test_a_loss_scale_around_an_optimizer_that_accumulates(strategies):
    tf_dgc.prepare(strategies[2])

    def make():
        return O.LossScaleOptimizer(INNER["accumulates"](), initial_scale=4.0)

    weights = weights_after(strategies[2], make, True, 2)
    assert_equal(weights, weights_after(strategies[1], make, False, 1))


def test_tensorflow_refuses_a_nested_function_within_a_step(strategies):
    strategy = tf_dgc.prepare(strategies[2])
    with strategy.scope():
        variable, sgd = keras.Variable(np.ones((3,))), O.SGD(0.1)
        sgd.build([variable])

    @tf.function
    def within():
        sgd.apply([tf.ones((3,))], [variable])

    with pytest.raises(RuntimeError, match="nested"):
        strategy.run(tf.function(lambda: within()))


def test_a_model_created_outside_of_the_optimizers_scope_raises(strategies):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with strategies[2].scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.raises(ValueError, match="Move the call that creates the model"):
        model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
