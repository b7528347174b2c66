"""Native updates compared with Keras's, and rules that are left to Keras."""

import dataclasses
import itertools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc import native_library
from tf_dgc.multiworker import consensus
from tf_dgc.optimizers import update
from tf_dgc.steps import native as steps_native
from tf_dgc.steps.base import StepOutcome
from tf_dgc.steps.native import apply_sums

O = keras.optimizers  # noqa: E741
BUILT = native_library.load_library().library is not None
needs_operations = pytest.mark.skipif(not BUILT, reason="no native operations")
SHAPES = [(70, 1000), (13,), ()]
STEPS = 5


def excluding(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["w1"])
    return optimizer


FROM_DENSE = tf_dgc.schedules.PiecewiseConstantSparsity([2, 3], [0.0, 0.9, 0.97])
COSINE = O.schedules.CosineDecay(0.1, 4)
RULES = {
    "sgd": lambda: O.SGD(0.1),
    "sgd, decay": lambda: O.SGD(0.1, weight_decay=0.07),
    "momentum": lambda: O.SGD(COSINE, momentum=0.9),
    "momentum, decay": lambda: excluding(O.SGD(0.1, momentum=0.9, weight_decay=0.01)),
    "nesterov": lambda: O.SGD(0.1, momentum=0.9, nesterov=True),
    "nesterov, decay": lambda: O.SGD(COSINE, 0.9, True, weight_decay=0.01),
    "adam": lambda: O.Adam(lambda: 0.01),
    "adam, schedule": lambda: O.Adam(COSINE, beta_1=0.8, beta_2=0.99, epsilon=1e-3),
    "amsgrad": lambda: O.Adam(0.01, amsgrad=True),
    "adamw": lambda: excluding(O.AdamW(COSINE)),
    "adamw, amsgrad": lambda: O.AdamW(0.01, weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda: O.RMSprop(0.01),
    "rmsprop, momentum": lambda: O.RMSprop(COSINE, momentum=0.9, weight_decay=0.01),
    "centered": lambda: O.RMSprop(0.01, rho=0.8, centered=True),
    "centered, momentum": lambda: O.RMSprop(0.01, momentum=0.5, centered=True),
}


def some_sums():
    """Return sums of several steps, of various magnitudes, with zeros."""
    rng = np.random.default_rng(3)
    return [
        [
            rng.choice([0.0, 1.0], s) * rng.normal(size=s) * 10 ** rng.uniform(-9, 3)
            for s in SHAPES
        ]
        for _ in range(STEPS)
    ]


def outcome_of(sums):
    return StepOutcome(lambda: (sums, tf.constant(0)), 0, 0)


def states(make, use_native, traced):
    """Return the variables of model and optimizer after some steps."""
    weights = initial_weights("float32", SHAPES)
    variables = [keras.Variable(w, name=f"w{i}") for i, w in enumerate(weights)]
    optimizer = make()
    optimizer.build(variables)

    def step(sums):
        update.apply_update(optimizer, outcome_of(sums), variables, use_native)

    step = tf.function(step) if traced else step
    with mock.patch.object(steps_native, "apply_sums", wraps=apply_sums) as native:
        for sums in some_sums():
            step([tf.constant(s, tf.float32) for s in sums])
    assert bool(native.call_count) == use_native
    return [v.numpy() for v in [*variables, *optimizer.variables]]


@needs_operations
@pytest.mark.parametrize("name", RULES)
def test_native_updates_equal_keras(name):
    native = states(RULES[name], True, traced=False)
    stock = states(RULES[name], False, traced=False)
    for a, b in zip(native, stock, strict=True):
        np.testing.assert_array_equal(a, b)


@needs_operations
@pytest.mark.parametrize("name", ["momentum, decay", "adamw", "centered, momentum"])
def test_native_updates_are_close_to_traced_steps_of_keras(name):
    native = states(RULES[name], True, traced=True)
    stock = states(RULES[name], False, traced=True)
    for a, b in zip(native, stock, strict=True):
        np.testing.assert_allclose(
            a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max(initial=0)
        )


@needs_operations
@pytest.mark.parametrize(
    ("workers", "name", "sparsity"),
    [
        (2, "adamw", FROM_DENSE),
        (2, "adam, schedule", 0.97),
        (1, "adamw, amsgrad", 0.97),
        (1, "sgd, decay", 0.97),
        (1, "momentum, decay", 0.0),
        (2, "nesterov, decay", 0.97),
        (2, "adamw", 0.97),
        (3, "adamw", 0.0),
        (3, "adamw, amsgrad", 0.0),
        (1, "rmsprop, momentum", 0.97),
        (2, "centered", 0.97),
    ],
)
def test_operations_that_decode_and_update(strategies, workers, name, sparsity):
    """Sparse steps, and dense steps of one vector."""
    results = []
    corrects = "adam" in name  # other rules are applied to the sum
    for use_native in (True, False):
        trainer = Trainer(
            strategies[workers],
            lambda: tf_dgc.DGCOptimizer(
                RULES[name](), sparsity, corrections=tf_dgc.Corrections(adam=corrects)
            ),
            initial_weights("float32"),
            traced=False,  # where Keras's own step may round otherwise
        )
        state = trainer.optimizer.state
        assert state.use_native
        trainer.optimizer._state = dataclasses.replace(state, use_native=use_native)
        for gradients in make_gradients(workers, 4, "float32"):
            trainer.step(gradients)
        inner = trainer.local(trainer.optimizer.inner_optimizer.variables[2:])
        results.append([*trainer.weights(), *itertools.chain(*inner)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


# --- rules that are left to Keras -----------------------------------------------------


class InUpdateStep(O.Adam):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(2 * gradient, variable, learning_rate)


class InWeightDecay(O.AdamW):
    def _apply_weight_decay(self, variables):
        pass


class Defaults(O.AdamW):
    """An AdamW with another default."""

    def __init__(self, learning_rate=0.1, **kwargs):
        super().__init__(learning_rate, **kwargs)


def find_rule(make, dtype="float32", **settings):
    """Return the native rule of an optimizer of one variable."""
    constraint = settings.pop("constraint", None)
    variable = keras.Variable(np.ones((2, 3), dtype), dtype=dtype)
    variable.constraint = constraint
    optimizer = make()
    optimizer.build([variable])
    for name, value in settings.items():
        setattr(optimizer, name, value)
    return update.find_native_rule(optimizer, [variable])


def test_a_subclass_that_changes_no_step_is_native():
    rule = find_rule(Defaults)
    assert rule.names == ["adam"]
    assert rule.decays == [True]
    assert not rule.is_plain_sgd


@pytest.mark.parametrize(
    "make",
    [
        lambda: O.Lion(0.1),
        lambda: O.Nadam(0.1),
        lambda: InUpdateStep(0.1),
        lambda: InWeightDecay(0.1),
        lambda: O.Adam(0.1, beta_1=tf.constant(0.9)),
        lambda: O.SGD(0.1, use_ema=True),
        lambda: O.SGD(0.1, gradient_accumulation_steps=2),
        lambda: O.SGD(0.1, clipnorm=1.0),
    ],
)
def test_other_steps_are_left_to_keras(make):
    assert find_rule(make) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_are_left_to_keras(dtype):
    assert find_rule(lambda: O.Adam(0.1), dtype) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"clipvalue": 1.0},
        {"global_clipnorm": 1.0},
        {"use_ema": True},
        {"loss_scale_factor": 2.0},
        {"weight_decay": tf.constant(0.1)},
        {"constraint": keras.constraints.NonNeg()},
    ],
    ids=lambda settings: next(iter(settings)),  # the same in all processes
)
def test_settings_assigned_later_are_left_to_keras(settings):
    assert find_rule(lambda: O.Adam(0.1)) is not None
    assert find_rule(lambda: O.Adam(0.1), **settings) is None


def test_only_sgd_without_momentum_and_decay_is_plain():
    assert find_rule(lambda: O.SGD(0.1)).is_plain_sgd
    assert find_rule(lambda: O.SGD(0.1), "float64").is_plain_sgd
    assert not find_rule(lambda: O.SGD(0.1, momentum=0.5)).is_plain_sgd
    assert not find_rule(lambda: O.SGD(0.1), weight_decay=0.1).is_plain_sgd
    assert find_rule(lambda: O.SGD(0.1), "float64", weight_decay=0.1) is None


@needs_operations
@pytest.mark.parametrize(("other", "all_have"), [("True", True), ("False", False)])
def test_native_on_all_workers_or_on_none(monkeypatch, other, all_have):
    monkeypatch.setattr(
        consensus,
        "exchange_texts",
        lambda strategy, note, purpose: {"": note, "b": other},
    )
    strategy = tf.distribute.get_strategy()
    assert (
        update.all_workers_have_native_rules(strategy, [keras.Variable([1.0])])
        == all_have
    )
