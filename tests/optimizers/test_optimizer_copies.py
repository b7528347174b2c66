"""User-defined inner optimizers train as in plain Keras, whatever they hold."""

import functools
import json
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer
from serving import ServerGroup, TracedTrainer

import tf_dgc
from tf_dgc.optimizers import state

O = keras.optimizers  # noqa: E741
register = keras.saving.register_keras_serializable("test_copying")
STEPS = 4
NAMES = ["body", "head"]
WEIGHTS = [np.full((20, 30), 1.0, "float32"), np.full((30,), -1.0, "float32")]


def gradients():
    rng = np.random.default_rng(3)
    return [
        [rng.normal(size=w.shape).astype("float32") for w in WEIGHTS]
        for _ in range(STEPS)
    ]


class Scaled(O.SGD):
    """SGD whose learning rate is multiplied by a factor per variable."""

    def __init__(self, learning_rate=0.5, **settings):
        super().__init__(learning_rate, **settings)

    def update_step(self, gradient, variable, learning_rate):
        factor = self.factor(self._get_variable_index(variable))
        super().update_step(gradient * factor, variable, learning_rate)


@register
class ByDict(Scaled):
    def __init__(self, rates=None, **settings):
        super().__init__(**settings)
        self.rates = rates or {"body": 1.0, "head": 1.0}

    def factor(self, index):
        return self.rates[NAMES[index]]


@register
class ByArray(Scaled):
    def __init__(self, rates=None, **settings):
        super().__init__(**settings)
        self.rates = np.ones(2) if rates is None else np.asarray(rates)

    def factor(self, index):
        return float(self.rates[index])


@register
class ByTuple(Scaled):
    def __init__(self, rates=(1.0, 1.0), **settings):
        super().__init__(**settings)
        self.rates = rates

    def factor(self, index):
        return self.rates[index]


@register
class ByCallable(Scaled):
    def __init__(self, rate_of=lambda index: 1.0, **settings):
        super().__init__(**settings)
        self.rate_of = rate_of

    def factor(self, index):
        return self.rate_of(index)


class ByOwnMethod(Scaled):
    """Holds a method, a partial and a function that are bound to the object."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.scale = 1.0
        self.bound = self.of_index
        self.partial = functools.partial(self.of_index, 1)
        self.closure = lambda index: self.scale * (index + 0.5)

    def of_index(self, index):
        return self.scale / (1.0 + index)

    def factor(self, index):
        return self.bound(index) + self.partial() + self.closure(index)


@register
class ByPrivateAttribute(Scaled):
    def __init__(self, frozen=False, **settings):
        super().__init__(**settings)
        self._frozen = frozen

    def factor(self, index):
        return 0.0 if self._frozen and index == 1 else 1.0


@register
class ByLaterAttribute(Scaled):
    """Has no `rates` until the user sets them."""

    def factor(self, index):
        return self.rates[index]


@register
class ByRequiredArgument(Scaled):
    """Accepts none of Keras's arguments, not even a name."""

    def __init__(self, rates):
        super().__init__(0.5)
        self.rates = rates

    def factor(self, index):
        return self.rates[index]


class ByVariable(Scaled):
    """Counts its steps in a variable that the constructor creates."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seen = self.add_variable((), dtype="float32", name="seen")
        self.seen.assign(1.0)

    def factor(self, index):
        if index == 0:
            self.seen.assign_add(1.0)
        return 1.0 / self.seen


class ByListOfSlots(Scaled):
    """Fills a list of the constructor in `build`."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.slots = []

    def build(self, variables):
        super().build(variables)
        self.slots.extend(self.add_optimizer_variables(variables, "slot"))

    def factor(self, index):
        self.slots[index].assign_add(keras.ops.ones_like(self.slots[index]))
        return self.slots[index] / len(self.slots)


@register
class BySlot(Scaled):
    __slots__ = ("rate_of_head",)

    def factor(self, index):
        return self.rate_of_head if index else 1.0


class ByVariables(Scaled):
    """Does not update certain variables of the model."""

    def __init__(self, frozen, **settings):
        super().__init__(**settings)
        self.frozen = frozen

    def update_step(self, gradient, variable, learning_rate):
        if all(variable is not v.value for v in self.frozen):
            super(Scaled, self).update_step(gradient, variable, learning_rate)


def with_attributes(optimizer, **attributes):
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    return optimizer


def reading_its_iterations():
    """Return an SGD whose learning rate is a function of its own iterations."""
    sgd = O.SGD(lambda: 0.5 / (1.0 + tf.cast(sgd.iterations.value, tf.float32)))
    return sgd


def late_in_a_run():
    sgd = O.SGD(O.schedules.PiecewiseConstantDecay([101], [0.5, 0.125]))
    sgd.iterations.assign(100)
    return sgd


MAKERS = {
    "dict": lambda: ByDict({"body": 0.5, "head": 0.0}),
    "array": lambda: ByArray([0.5, 0.0]),
    "tuple": lambda: ByTuple((0.25, 3.0)),
    "callable": lambda: ByCallable(lambda index: 3.0 * index),
    "bound": ByOwnMethod,
    "bound_and_changed": lambda: with_attributes(ByOwnMethod(), scale=0.25),
    "private": lambda: ByPrivateAttribute(frozen=True),
    "later": lambda: with_attributes(ByLaterAttribute(), rates=[0.25, 3.0]),
    "required": lambda: ByRequiredArgument([0.25, 3.0]),
    "variable": ByVariable,
    "list_of_slots": ByListOfSlots,
    "slot": lambda: with_attributes(BySlot(), rate_of_head=0.25),
    "rate_of_iterations": reading_its_iterations,
    "late": late_in_a_run,
    "momentum_later": lambda: with_attributes(O.SGD(0.5), momentum=0.9),
}
WRAPPERS = {
    "dgc": lambda inner: tf_dgc.DGCOptimizer(inner, 0.0),
    "compressed": lambda inner: tf_dgc.CompressedOptimizer(inner, "none"),
    "local": lambda inner: tf_dgc.LocalOptimizer(inner, 1),
}


def train(make, strategy=None):
    """Return the weights after steps with the same gradient on all workers."""
    strategy = strategy or tf.distribute.get_strategy()
    trainer = Trainer(strategy, make, WEIGHTS)
    number = strategy.num_replicas_in_sync
    for step in gradients():
        trainer.step([[g / number for g in step]] * number)
    return trainer.weights()


def assert_equal(weights, expected, **tolerance):
    for a, b in zip(weights, expected, strict=True):
        np.testing.assert_allclose(a, b, **{"rtol": 1e-5, "atol": 1e-6, **tolerance})


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("maker", MAKERS)
def test_an_inner_optimizer_of_the_user_trains_as_in_keras(maker, wrapper):
    make = MAKERS[maker]
    assert_equal(train(lambda: WRAPPERS[wrapper](make())), train(make))


@pytest.mark.parametrize("maker", ["dict", "variable", "bound", "rate_of_iterations"])
def test_several_workers_train_as_in_keras(strategies, maker):
    make = MAKERS[maker]
    weights = train(lambda: WRAPPERS["dgc"](make()), strategies[2])
    assert_equal(weights, train(make))


def test_an_optimizer_created_outside_of_the_scope(strategies):
    inner = ByVariable()
    weights = train(lambda: WRAPPERS["dgc"](inner), strategies[2])
    assert_equal(weights, train(ByVariable))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_attribute_set_later_on_the_inner_optimizer_acts(wrapper):
    def make():
        optimizer = WRAPPERS[wrapper](ByLaterAttribute())
        optimizer.inner_optimizer.rates = [0.25, 3.0]
        return optimizer

    assert_equal(train(make), train(MAKERS["later"]))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_attribute_of_the_inner_optimizer_is_not_set_on_the_wrapper(wrapper):
    optimizer = WRAPPERS[wrapper](ByOwnMethod())
    with pytest.raises(AttributeError, match=r"inner_optimizer\.scale = .*Received"):
        optimizer.scale = 2.0
    optimizer.inner_optimizer.scale = 2.0
    optimizer.something_else = 3


@pytest.mark.parametrize("maker", ["list_of_slots", "variable", "dict"])
def test_one_object_may_be_wrapped_twice_and_used_itself(maker):
    inner, expected = MAKERS[maker](), train(MAKERS[maker])
    for _ in range(2):
        assert_equal(train(lambda: WRAPPERS["dgc"](inner)), expected)
    assert_equal(train(lambda: inner), expected)


def test_the_outer_optimizer_of_local_steps_keeps_its_attributes():
    outer = ByDict({"body": 1.0, "head": 0.0}, learning_rate=1.0)
    weights = train(lambda: tf_dgc.LocalOptimizer(O.SGD(0.5), 2, outer=outer))
    expected = train(lambda: O.SGD(0.5))
    assert_equal(weights, [expected[0], WEIGHTS[1]])


def test_tensorflow_variables_of_the_user_are_not_copied():
    rate = tf.Variable(1.0)
    optimizer = WRAPPERS["dgc"](ByCallable(rate_of=None))
    optimizer.inner_optimizer.rate_of = lambda index: rate
    optimizer = WRAPPERS["dgc"](with_attributes(ByTuple(), rates=(rate, rate)))
    assert optimizer.inner_optimizer.rates[0] is rate


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_variables_of_the_model_are_not_copied(wrapper):
    body, head = map(keras.Variable, [WEIGHTS[0], np.arange(30.0)])
    optimizer = WRAPPERS[wrapper](ByVariables([head]))
    assert optimizer.inner_optimizer.frozen[0] is head
    optimizer.build([body, head])
    optimizer.apply([np.ones_like(w) for w in WEIGHTS], [body, head])
    np.testing.assert_array_equal(head.numpy(), np.arange(30.0))
    assert (body.numpy() != WEIGHTS[0]).all()


# --- limits of copies ---------------------------------------------------------------


def test_a_function_that_reads_the_optimizer_by_a_global_name():
    """The name must refer to the wrapper by the first step."""
    code = "lambda: 0.5 / (1.0 + float(optimizer.iterations))"
    names = {"optimizer": None}
    names["optimizer"] = inner = O.SGD(eval(code, names))
    wrapper = tf_dgc.DGCOptimizer(inner, 0.0)
    variable = keras.Variable(WEIGHTS[0])
    with pytest.raises(ValueError, match=r"`learning_rate`.*global name 'optimizer'"):
        wrapper.build([variable])
    names["optimizer"] = wrapper
    wrapper.build([variable])
    for expected in (0.5, 0.25, 0.5 / 3):
        before = variable.numpy()
        wrapper.apply([np.ones_like(before)], [variable])
        np.testing.assert_allclose(before - variable.numpy(), expected, rtol=1e-5)


def test_an_attribute_that_holds_the_optimizer_is_named():
    inner = Scaled()
    inner.helper = types.SimpleNamespace(of=[inner])
    with pytest.raises(ValueError, match=r"`helper`.*Received: inner=Scaled"):
        tf_dgc.DGCOptimizer(inner)


# --- objects without a config -------------------------------------------------------


class Warmup(O.schedules.LearningRateSchedule):
    """The schedule of a tutorial, without `get_config`."""

    def __init__(self, width=64, warmup_steps=3):
        self.width = tf.cast(width, tf.float32)
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32) + 1.0
        rising = step * (self.warmup_steps**-1.5)
        return tf.math.rsqrt(self.width) * tf.math.minimum(tf.math.rsqrt(step), rising)


class Rate:
    """A learning rate that is a callable object."""

    def __call__(self):
        return 0.25


RATES = {"schedule": Warmup, "callable": Rate, "lambda": lambda: lambda: 0.25}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("rate", RATES)
def test_a_learning_rate_without_a_config_trains_as_in_keras(rate, wrapper):
    make = RATES[rate]
    weights = train(lambda: WRAPPERS[wrapper](O.Adam(make())))
    assert_equal(weights, train(lambda: O.Adam(make())), rtol=1e-4)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("rate", ["schedule", "callable"])
def test_without_a_config_only_saving_fails(rate, wrapper):
    optimizer = WRAPPERS[wrapper](O.SGD(RATES[rate](), momentum=0.9))
    assert f"SGD(learning_rate={type(RATES[rate]()).__name__}(...)" in repr(optimizer)
    plain = O.SGD(RATES[rate]())
    errors = []
    for instance in (optimizer, plain):
        with pytest.raises((NotImplementedError, TypeError)) as error:
            keras.saving.serialize_keras_object(instance)
        errors.append(error.type)
    assert errors[0] is errors[1]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_workers_compare_schedules_without_a_config(wrapper):
    def compared_text(steps):
        optimizer = WRAPPERS[wrapper](O.SGD(Warmup(warmup_steps=steps)))
        return json.dumps(state.consensus_texts(optimizer.consensus_config(), {}, []))

    assert compared_text(3) == compared_text(3)
    assert compared_text(3) != compared_text(4)


class Half:
    """A schedule of sparsity that is a callable object."""

    def __call__(self, iteration):
        return tf.constant(0.5, tf.float64)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf_dgc.DGCOptimizer(O.SGD(0.1), Half()),
        lambda: tf_dgc.CompressedOptimizer(O.SGD(0.1), tf_dgc.compressors.TopK(Half())),
    ],
)
def test_a_schedule_of_sparsity_needs_no_config(make):
    optimizer = make()
    assert "sparsity=Half(...)" in repr(optimizer)
    json.dumps(state.consensus_texts(optimizer.consensus_config(), {}, []))
    json.dumps(optimizer.describe_config())
    variable = keras.Variable(WEIGHTS[0])
    optimizer.apply([gradients()[0][0]], [variable])
    assert (variable.numpy() != WEIGHTS[0]).any()


def test_an_unwrapped_optimizer_equals_the_passed_one():
    inner = ByDict({"body": 0.5, "head": 0.0}, momentum=0.9, clipnorm=1.0)
    again = tf_dgc.DGCOptimizer(inner).unwrap()
    assert again.get_config() == inner.get_config()
    assert again.rates == inner.rates and again.rates is not inner.rates


# --- on a server --------------------------------------------------------------------


@register
class WithConfig(ByDict):
    def get_config(self):
        return {**super().get_config(), "rates": dict(self.rates)}


class Node:
    def __init__(self, value):
        self.value, self.cycle = value, self


@register
class HoldingObjects(ByDict):
    """Holds objects and functions that its constructor creates."""

    def __init__(self, value=1.0, **settings):
        super().__init__(**settings)
        self.node = Node(value)
        self.rate_of = lambda index: self.node.value * index
        self.bound = functools.partial(self.factor, 1)


def test_a_server_compares_objects_by_their_attributes(monkeypatch):
    with ServerGroup(1) as server:
        server.optimizer(monkeypatch, 0, HoldingObjects(), compressor="none")
        with pytest.raises(ValueError, match=r"`node` is .*Node"):
            server.optimizer(monkeypatch, 0, HoldingObjects(2.0), compressor="none")


def weights_on_server(monkeypatch, make):
    with ServerGroup(1) as server:
        optimizer = server.optimizer(
            monkeypatch,
            0,
            make(),
            compressor="none",
            corrections=tf_dgc.Corrections(momentum=False),
        )
        worker = TracedTrainer(optimizer, WEIGHTS)
        for step in gradients():
            worker.step(step)
        return server.weights()


@pytest.mark.slow
def test_a_server_trains_an_optimizer_with_a_complete_config(monkeypatch):
    def make():
        return WithConfig({"body": 0.5, "head": 0.0})

    assert_equal(weights_on_server(monkeypatch, make), train(make))


ERRORS = {
    "dict": r"`rates` is \{'body': 0\.5, 'head': 0\.0\}",
    "array": "`rates`",
    "tuple": "`rates`",
    "callable": "`rate_of`",
    "private": "`_frozen`",
    "later": "`rates`",
    "required": "cannot be built from its config",
    "slot": "`rate_of_head`",
    "late": "`iterations` is 100",
}


@pytest.mark.parametrize("maker", ERRORS)
def test_a_server_names_attributes_that_the_config_lacks(monkeypatch, maker):
    make = MAKERS[maker]
    with ServerGroup(1) as server, pytest.raises(ValueError, match=ERRORS[maker]):
        server.optimizer(monkeypatch, 0, make(), compressor="none")


def test_a_server_names_attributes_that_were_set_later(monkeypatch):
    with ServerGroup(1) as server:
        inner = WithConfig({"body": 0.5, "head": 0.0})
        optimizer = server.optimizer(monkeypatch, 0, inner, compressor="none")
        optimizer.build([keras.Variable(w) for w in WEIGHTS])
        optimizer.inner_optimizer.frozen = [1, 2]
        with pytest.raises(ValueError, match=r"`frozen` is \[1, 2\]"):
            optimizer.join()


@pytest.mark.parametrize("rate", ["schedule", "callable"])
def test_a_server_needs_the_config_of_a_learning_rate(monkeypatch, rate):
    match = (
        "get_config" if rate == "schedule" else "cannot run a function of the script"
    )
    with ServerGroup(1) as server, pytest.raises(ValueError, match=match):
        server.optimizer(monkeypatch, 0, O.SGD(RATES[rate]()))
