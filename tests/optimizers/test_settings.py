"""Settings of all Keras optimizers, read and assigned on the wrapper."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer

import tf_dgc
from tf_dgc import NovoGrad
from tf_dgc.optimizers import inner_hyperparameters

O = keras.optimizers  # noqa: E741
SHAPE = (40, 50)


def make_wrapped(**settings):
    return tf_dgc.DGCOptimizer(O.SGD(0.5, **settings), 0.9)


def one_step(optimizer, weights=1.0, gradient=1.0):
    variable = keras.Variable(np.full(SHAPE, weights, "float32"))
    optimizer.apply([tf.fill(SHAPE, np.float32(gradient))], [variable])
    return variable.numpy()


# --- reading and setting --------------------------------------------------------------

VALUES = {
    "clipnorm": 2.0,
    "global_clipnorm": 2.0,
    "clipvalue": 2.0,
    "weight_decay": 0.25,
    "use_ema": True,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 7,
    "loss_scale_factor": 8.0,
}


def test_shared_settings_are_all_of_keras():
    """A new version of Keras may have more."""
    config = O.SGD(0.1).get_config()
    of_sgd = {"name", "learning_rate", "momentum", "nesterov"}
    assert set(inner_hyperparameters.SHARED_SETTINGS) == set(config) - of_sgd


@pytest.mark.parametrize("name", VALUES)
def test_a_setting_reads_as_the_passed_value(name):
    optimizer = make_wrapped(**{name: VALUES[name]})
    assert getattr(optimizer, name) == VALUES[name]
    assert optimizer.get_config()["inner"]["config"][name] == VALUES[name]
    for other in set(inner_hyperparameters.SHARED_SETTINGS) - {name}:
        assert getattr(optimizer, other) == getattr(O.SGD(0.1), other)


@pytest.mark.parametrize("name", VALUES)
def test_an_assigned_setting_acts_like_a_passed_one(name):
    optimizer = make_wrapped()
    setattr(optimizer, name, VALUES[name])
    assert getattr(optimizer, name) == VALUES[name]
    assert optimizer.get_config()["inner"]["config"][name] == VALUES[name]
    passed = make_wrapped(**{name: VALUES[name]})
    expected = one_step(passed, gradient=100.0)
    np.testing.assert_array_equal(one_step(optimizer, gradient=100.0), expected)
    assert len(optimizer.variables) == len(passed.variables)


def test_assigned_weight_decay_is_applied_natively():
    optimizer = make_wrapped()
    optimizer.weight_decay = 0.5
    np.testing.assert_allclose(one_step(optimizer, gradient=0.0), 0.75)


def test_averages_of_the_wrapper_are_the_inner_ones():
    """There is no second set of averages."""
    optimizer = make_wrapped(use_ema=True)
    one_step(optimizer)
    averages = [v for v in optimizer.variables if "average" in v.path]
    assert len(averages) == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gradient_accumulation_steps", 1, "2 or more"),
        ("clipnorm", -1.0, "finite number, 0 or more"),
        ("clipvalue", math.nan, "finite number, 0 or more"),
        ("ema_momentum", 2.0, r"in \[0, 1\]"),
        ("ema_overwrite_frequency", 0.5, "whole number"),
        ("loss_scale_factor", 0.0, "above 0"),
    ],
)
def test_bad_values_are_refused(name, value, message):
    optimizer = make_wrapped()
    before = getattr(optimizer, name)
    with pytest.raises(ValueError, match=f"{message}.*Received: .*{name}="):
        setattr(optimizer, name, value)
    assert getattr(optimizer, name) == before


def test_a_second_kind_of_clipping_is_refused():
    optimizer = make_wrapped(clipnorm=1.0)
    with pytest.raises(ValueError, match="Only one of"):
        optimizer.clipvalue = 1.0
    optimizer.clipnorm = None
    optimizer.clipvalue = 1.0


def test_averages_cannot_be_enabled_after_the_build():
    optimizer = make_wrapped()
    one_step(optimizer)
    with pytest.raises(ValueError, match="`use_ema` cannot be changed any more"):
        optimizer.use_ema = True
    optimizer.use_ema = False


# --- settings of the inner optimizer --------------------------------------------------


@pytest.mark.parametrize("name", inner_hyperparameters.CLIPPING)
@pytest.mark.parametrize("value", [-1, -0.5, math.nan, math.inf, "1", True, [1.0]])
def test_clipping_thresholds(name, value):
    with pytest.raises(ValueError, match=f"clipping threshold.*Received: {name}="):
        make_wrapped(**{name: value})
    with pytest.raises(ValueError, match="clipping threshold"):
        tf_dgc.CompressedOptimizer(O.Adam(0.1, **{name: value}), "qsgd")


@pytest.mark.parametrize("name", inner_hyperparameters.CLIPPING)
def test_a_threshold_of_0_clips_nothing_as_in_keras(name):
    expected = one_step(O.SGD(0.5, **{name: 0}))
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([], [0.0])
    optimizer = tf_dgc.DGCOptimizer(O.SGD(0.5, **{name: 0}), schedule)
    np.testing.assert_allclose(one_step(optimizer), expected)


@pytest.mark.parametrize("factor", [0.0, -2.0, math.nan, math.inf])
def test_loss_scale_factor(factor):
    with pytest.raises(ValueError, match="`loss_scale_factor` must be"):
        make_wrapped(loss_scale_factor=factor)


# --- values of variables --------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2])
def test_learning_rate_and_iterations_convert_to_numbers(strategies, num_workers):
    with strategies[num_workers].scope():
        optimizer = make_wrapped()
        schedule = O.schedules.PiecewiseConstantDecay([5], [0.25, 0.1])
        scheduled = tf_dgc.DGCOptimizer(O.SGD(schedule))
    assert float(optimizer.learning_rate) == 0.5
    assert int(optimizer.iterations) == 0
    assert float(scheduled.learning_rate) == 0.25
    optimizer.learning_rate = 0.75
    assert float(optimizer.learning_rate) == 0.75


@pytest.mark.parametrize("num_workers", [1, 2])
def test_set_weights_of_all_variables(strategies, num_workers):
    weights = [np.ones(SHAPE, "float32")]
    trained, fresh = (
        Trainer(
            strategies[num_workers],
            lambda: tf_dgc.DGCOptimizer(O.Adam(0.1), 0.9),
            weights,
        )
        for _ in range(2)
    )
    rng = np.random.default_rng(0)
    trained.step([[rng.normal(size=SHAPE).astype("float32")]] * num_workers)
    values = [v.numpy() for v in trained.optimizer.variables]
    assert any(v.any() for v in values)
    fresh.optimizer.set_weights(values)
    for variable, expected in zip(fresh.optimizer.variables, values, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)
    for wrong in (values[1:], values[::-1]):
        with pytest.raises(ValueError, match=r"one value for each.*Received"):
            fresh.optimizer.set_weights(wrong)
    with pytest.raises(ValueError, match="built=False"):
        make_wrapped().set_weights([])


# --- repeated rows --------------------------------------------------------------------


def test_novograd_sums_repeated_rows_before_it_squares():
    slices = tf.IndexedSlices(tf.constant([[3.0, 0.0], [1.0, 0.0]]), [1, 1], (2, 2))
    weights = []
    for gradient in (slices, tf.constant([[0.0, 0.0], [4.0, 0.0]])):
        variable = keras.Variable(np.zeros((2, 2), "float32"))
        optimizer = NovoGrad(1.0, epsilon=0.0)
        for _ in range(2):
            optimizer.apply([gradient], [variable])
        weights.append(variable.numpy())
    np.testing.assert_allclose(*weights)


@pytest.mark.parametrize("kind", [tuple, list, np.array, tf.constant])
def test_indices_of_any_kind(kind):
    """TensorFlow and Keras's optimizers accept them."""
    slices = tf.IndexedSlices(np.ones((2, 50), "float32"), kind((3, 3)), SHAPE)
    variable = keras.Variable(np.zeros(SHAPE, "float32"))
    tf_dgc.DGCOptimizer(O.SGD(1.0), 0).apply([slices], [variable])
    np.testing.assert_array_equal(variable.numpy()[3], -2.0)


@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_numbers_of_numpy(kind):
    optimizer = make_wrapped(gradient_accumulation_steps=kind(4))
    assert optimizer.gradient_accumulation_steps == 4
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(optimizer)
    )
    assert again.gradient_accumulation_steps == 4
