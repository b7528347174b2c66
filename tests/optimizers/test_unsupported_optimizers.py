"""Warnings of inner optimizers that train badly with delayed entries."""

import keras
import numpy as np
import pytest

import tf_dgc
from tf_dgc.optimizers import unsupported

O = keras.optimizers  # noqa: E741
UNSUITED = [
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adafactor",
    "Ftrl",
    "Lamb",
    "Lion",
    "Muon",
    pytest.param(
        "ScheduleFreeAdamW",
        marks=pytest.mark.skipif(
            not hasattr(O, "ScheduleFreeAdamW"), reason="This Keras has none"
        ),
    ),
    "NovoGrad",
]
SUITED = ["SGD", "Adam", "AdamW", "Adamax", "Nadam"]


@pytest.mark.parametrize("name", UNSUITED)
def test_names_optimizer_method_and_what_to_use(name):
    kind = tf_dgc.NovoGrad if name == "NovoGrad" else getattr(O, name)
    settings = {"epsilon_1": 1e-15} if name == "Adafactor" else {}
    with pytest.warns(UserWarning) as found:
        tf_dgc.DGCOptimizer(kind(0.01, **settings), 0.99)
    (text,) = [str(warning.message) for warning in found]
    for part in (
        f"`{name}`",
        "TopK(",
        "Use `Adam`",
        "uniform_8bit",
        "Corrections(adam=False)",
    ):
        assert part in text
    at_another_rate = name in ("Adagrad", "Adafactor", "Ftrl")
    assert ("needs a learning rate of its own" in text) == at_another_rate
    assert ("trains badly" in text) != at_another_rate


def test_warns_by_what_a_method_leaves_out():
    with pytest.warns(UserWarning, match="`Lion` trains badly with"):
        tf_dgc.CompressedOptimizer(O.Lion(1e-3), "random_k")
    with pytest.warns(UserWarning, match="`Lion` needs a learning rate of its own"):
        tf_dgc.CompressedOptimizer(O.Lion(1e-3), "ef_sign_sgd")
    with pytest.warns(UserWarning, match="`Lamb` trains badly with"):
        tf_dgc.CompressedOptimizer(O.Lamb(1e-3), "ef_sign_sgd")
    tf_dgc.CompressedOptimizer(O.Lion(1e-3), "power_sgd")


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Lion"])
def test_warns_of_an_outer_optimizer_that_nothing_corrects(name):
    outer = getattr(O, name)(1e-3)
    with pytest.warns(UserWarning, match=f"`{name}` as `outer` trains badly with"):
        tf_dgc.LocalOptimizer("sgd", 2, outer=outer, compressor="top_k")
    for settings in ({}, {"compressor": "uniform_8bit"}):
        tf_dgc.LocalOptimizer("sgd", 2, outer=outer, **settings)
    tf_dgc.LocalOptimizer("sgd", 2, outer=O.SGD(0.7), compressor="top_k")


def test_config_that_is_loaded_warns_again():
    optimizer = tf_dgc.DGCOptimizer(
        O.RMSprop(), 0.9, corrections=tf_dgc.Corrections(adam=False)
    )
    config = {
        **optimizer.get_config(),
        "corrections": keras.saving.serialize_keras_object(tf_dgc.Corrections()),
    }
    with pytest.warns(UserWarning, match="`RMSprop` trains badly"):
        tf_dgc.DGCOptimizer.from_config(config)


class InStep(O.RMSprop):
    """A rule of which nothing is known."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * learning_rate)


class InAdam(O.AdamW):
    """A rule of which nothing is known but what it began as."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(2 * gradient, variable, learning_rate)


class Defaults(O.AdamW):
    """An AdamW with other defaults."""

    def __init__(self, learning_rate=0.1, **settings):
        super().__init__(learning_rate, **settings)


def test_says_what_an_adam_overrides():
    with pytest.warns(UserWarning, match="overrides `update_step`, so its rule is"):
        optimizer = tf_dgc.DGCOptimizer(InAdam(0.01), 0.99)
    optimizer.build([keras.Variable([[0.0] * 40] * 40)])
    assert optimizer.second_moment == []


@pytest.mark.parametrize(("sparsity", "too_little"), [(0.0, 1.0), (0.9, 10**0.5)])
def test_a_sparse_sum_has_a_norm_that_is_too_large(sparsity, too_little):
    """An entry of `NovoGrad` that comes every T steps moves T**0.5 times too little."""
    variable = keras.Variable(np.zeros((100, 100), "float32"))
    inner = tf_dgc.NovoGrad(0.01, beta_1=0.0, beta_2=0.0)
    optimizer = tf_dgc.DGCOptimizer(
        inner, sparsity, corrections=tf_dgc.Corrections(adam=False)
    )
    gradient = np.random.default_rng(0).normal(size=variable.shape).astype("float32")
    for _ in range(300):
        optimizer.apply([gradient], [variable])
    along = np.vdot(-variable.numpy(), gradient) / np.linalg.norm(gradient)
    np.testing.assert_allclose(along, 3.0 / too_little, rtol=0.35)


@pytest.mark.parametrize(("sparsity", "too_little"), [(0.0, 1.0), (0.9, 10**0.5)])
def test_a_sparse_sum_has_mean_squares_that_are_too_large(sparsity, too_little):
    """Of rows and columns, by the root of which an `Adafactor` divides."""
    variable = keras.Variable(np.ones((100, 100), "float32"))
    inner = O.Adafactor(1e-3, epsilon_1=1e-15, relative_step=False)
    optimizer = tf_dgc.DGCOptimizer(
        inner, sparsity, corrections=tf_dgc.Corrections(adam=False)
    )
    gradient = np.random.default_rng(0).choice([-1.0, 1.0], (100, 100))
    for _ in range(100):
        optimizer.apply([gradient.astype("float32")], [variable])
    along = np.mean((1 - variable.numpy()) * gradient)
    np.testing.assert_allclose(along, 0.1 / too_little, rtol=0.15)


WITHOUT_NUMBERS = r"epsilon_1=1e-30\)` makes NaN .* `Adafactor\(epsilon_1=1e-15\)`"


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: tf_dgc.DGCOptimizer(inner, 0.9),
        lambda inner: tf_dgc.DGCOptimizer(
            inner, 0.9, corrections=tf_dgc.Corrections(adam=False)
        ),
        lambda inner: tf_dgc.CompressedOptimizer(inner, "adacomp"),
        lambda inner: tf_dgc.LocalOptimizer("sgd", 2, outer=inner, compressor="top_k"),
        lambda inner: tf_dgc.ServerOptimizer(inner),
    ],
)
def test_what_makes_no_numbers_is_refused(make):
    """An `Adafactor` behind what leaves entries out, in its first step."""
    with pytest.raises(ValueError, match=f"{WITHOUT_NUMBERS}. Received"):
        make(O.Adafactor(0.01))


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: tf_dgc.DGCOptimizer(inner, 0.0),
        lambda inner: tf_dgc.CompressedOptimizer(inner, "float16"),
        lambda inner: tf_dgc.LocalOptimizer(inner, 2),
    ],
)
def test_warns_of_what_makes_no_numbers_where_data_have_no_gradient(make):
    with pytest.warns(UserWarning, match=WITHOUT_NUMBERS):
        make(O.Adafactor(0.01))
    make(O.Adafactor(0.01, epsilon_1=1e-15))


@pytest.mark.parametrize("epsilon", [1e-30, 1e-19, 1e-15])
def test_keras_makes_numbers_from_an_epsilon_on(epsilon):
    variable = keras.Variable(np.ones((40, 40), "float32"))
    gradient = np.zeros((40, 40), "float32")
    gradient[[3, 7], [4, 8]] = 1.0
    inner = O.Adafactor(0.01, epsilon_1=epsilon)
    inner.apply([gradient], [variable])
    assert np.isnan(variable.numpy()).any() == (epsilon < unsupported._MIN_EPSILON)


# Warnings are errors.


@pytest.mark.parametrize("name", SUITED)
def test_does_not_warn_of_what_is_linear_or_corrected(name):
    tf_dgc.DGCOptimizer(getattr(O, name)(0.01), 0.99)


def test_does_not_warn_of_an_adam_that_is_made_otherwise():
    tf_dgc.DGCOptimizer(Defaults(0.01), 0.99)


@pytest.mark.parametrize("method", ["uniform_8bit", "bfloat16", "qsgd", "none"])
def test_does_not_warn_where_nothing_waits(method):
    tf_dgc.CompressedOptimizer(O.RMSprop(), method)


def test_does_not_warn_of_small_errors():
    tf_dgc.CompressedOptimizer(O.RMSprop(), "float16", error_feedback=True)


def test_does_not_warn_of_dense_steps():
    tf_dgc.DGCOptimizer(O.RMSprop(), sparsity=0)


def test_does_not_warn_of_what_was_asked_for():
    tf_dgc.DGCOptimizer(O.RMSprop(), 0.99, corrections=tf_dgc.Corrections(adam=False))


def test_does_not_warn_of_rules_it_does_not_know():
    tf_dgc.DGCOptimizer(InStep(0.01), 0.99)
