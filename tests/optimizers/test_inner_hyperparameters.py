"""Hyperparameters that the wrapper applies, and subclasses that apply their own."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc.optimizers import update

O = keras.optimizers  # noqa: E741


class InApply(O.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply([g - tf.reduce_mean(g) for g in grads], trainable_variables)


class InApplyGradients(O.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(g + 1.0, v) for g, v in grads_and_vars])


class InUpdateStep(O.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(tf.sign(gradient), variable, learning_rate)


class InAssign(O.SGD):
    def assign_sub(self, variable, value):
        super().assign_sub(variable, 2.0 * value)


class InWeightDecay(O.SGD):
    def _apply_weight_decay(self, variables):
        for v in variables:
            v.assign(0.5 * v)


class InClipping(O.SGD):
    def _clip_gradients(self, grads):
        return [tf.clip_by_value(g, -0.1, 0.1) for g in grads]


class InMixin:
    @property
    def learning_rate(self):
        return 3.0 * super().learning_rate


class ByMixin(InMixin, O.SGD):
    pass


class InSetting(O.SGD):
    @property
    def weight_decay(self):
        return 0.5

    @weight_decay.setter
    def weight_decay(self, value):
        pass


OVERRIDING = [
    InApply,
    InApplyGradients,
    InUpdateStep,
    InAssign,
    InWeightDecay,
    InClipping,
    ByMixin,
    InSetting,
]


@keras.saving.register_keras_serializable("tests")
class Defaults(O.SGD):
    """Has another constructor, config and method, but the same step."""

    def __init__(self, learning_rate=0.5, momentum=0.9, **settings):
        super().__init__(learning_rate, momentum, **settings)

    def describe(self):
        return "defaults"


def weights_after(make, steps=3):
    shapes = [(40, 50), (50,)]
    trainer = Trainer(
        tf.distribute.get_strategy(), make, initial_weights("float32", shapes)
    )
    for gradients in make_gradients(1, steps, "float32", shapes):
        trainer.step(gradients)
    return trainer.weights()


@pytest.mark.parametrize("kind", OVERRIDING)
def test_a_subclass_does_its_own_step(kind):
    """Tested with a sparsity of 0 as a number, and by a schedule."""
    expected = weights_after(lambda: kind(0.1))
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([], [0.0])
    for sparsity in (0, schedule):
        weights = weights_after(lambda s=sparsity: tf_dgc.DGCOptimizer(kind(0.1), s))
        for a, b in zip(weights, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", OVERRIDING)
def test_a_subclass_that_overrides_a_step_keeps_its_momentum(kind):
    optimizer = tf_dgc.DGCOptimizer(kind(0.1, momentum=0.9))
    assert optimizer.inner_optimizer.momentum == 0.9
    assert update.find_native_rule(kind(0.1), []) is None


def test_a_subclass_that_changes_no_step_is_an_sgd():
    optimizer = tf_dgc.DGCOptimizer(Defaults())
    assert optimizer.inner_optimizer.momentum == 0.0
    assert update.find_native_rule(optimizer.inner_optimizer, []) is None
    assert update.find_native_rule(
        optimizer.inner_optimizer, [], includes_learning_rate=True
    ).is_plain_sgd


def test_overridden_clipping_is_left_to_the_subclass():
    optimizer = tf_dgc.DGCOptimizer(InClipping(0.1, clipnorm=1.0))
    assert optimizer.inner_optimizer.clipnorm == 1.0
    assert optimizer.get_config()["inner"]["config"]["clipnorm"] == 1.0


def with_replaced_method(name, method):
    """Return a function that creates an SGD with one method replaced."""

    def make(rate, **settings):
        inner = O.SGD(rate, **settings)
        stock = getattr(inner, name)
        setattr(inner, name, functools.partial(method, stock))
        return inner

    return make


REPLACED = {
    "update_step": lambda stock, g, v, rate: stock(tf.sign(g), v, rate),
    "apply": lambda stock, grads, variables=None: stock([-g for g in grads], variables),
    "_clip_gradients": lambda stock, grads: [tf.clip_by_value(g, -1, 0) for g in grads],
    "_apply_weight_decay": lambda stock, variables: [
        v.assign(0.5 * v) for v in variables
    ],
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_method_replaced_on_the_object_is_copied(name):
    make = with_replaced_method(name, REPLACED[name])
    expected = weights_after(lambda: make(0.1))
    wrappers = {
        "dense": lambda: tf_dgc.DGCOptimizer(make(0.1), 0),
        "local": lambda: tf_dgc.LocalOptimizer(make(0.1), 1),
    }
    for wrap in wrappers.values():
        for a, b in zip(weights_after(wrap), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    optimizer = tf_dgc.DGCOptimizer(make(0.1, momentum=0.9))
    assert optimizer.inner_optimizer.momentum == 0.9


def test_local_steps_refuse_a_replaced_update_across_replicas():
    make = with_replaced_method(
        "_backend_update_step", lambda stock, *arguments: stock(*arguments)
    )
    with pytest.raises(ValueError, match="_backend_update_step"):
        tf_dgc.LocalOptimizer(make(0.1), 2)


class Fixed(O.SGD):
    """Has settings that are neither arguments nor in its config."""

    def __init__(self, learning_rate=0.5):
        super().__init__(
            learning_rate, momentum=0.9, clipnorm=0.5, loss_scale_factor=2.0
        )

    def get_config(self):
        return {"learning_rate": float(self.learning_rate.numpy())}


class Terse(O.AdamW):
    """Accepts settings that are not in its config."""

    def get_config(self):
        return {"learning_rate": float(self.learning_rate.numpy())}


PLAIN = {"momentum": 0.9, "clipnorm": 0.5, "loss_scale_factor": 2.0}
DECAYS = {"weight_decay": 0.1, "beta_1": 0.5, "clipvalue": 0.2}


@pytest.mark.parametrize(
    ("make", "same"),
    [
        (Fixed, lambda: O.SGD(0.5, **PLAIN)),
        (lambda: Terse(0.1, **DECAYS), lambda: O.AdamW(0.1, **DECAYS)),
    ],
)
def test_a_setting_that_is_not_in_the_config_is_applied_once(strategies, make, same):
    trainers = [
        Trainer(
            strategies[2],
            lambda inner=inner: tf_dgc.DGCOptimizer(inner(), 0.9, min_compress_size=0),
            initial_weights("float32"),
        )
        for inner in (make, same)
    ]
    for gradients in make_gradients(2, 3, "float32"):
        for trainer in trainers:
            trainer.step(gradients)
    weights, expected = (trainer.weights() for trainer in trainers)
    np.testing.assert_equal(weights, expected)
