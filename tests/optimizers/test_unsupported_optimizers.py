"""Warnings about inner optimizers that train badly with delayed entries."""

import keras
import numpy as np
import pytest

import tf_dgc
from tf_dgc.optimizers import unsupported

O = keras.optimizers  # noqa: E741
UNSUPPORTED = [
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
SUPPORTED = ["SGD", "Adam", "AdamW", "Adamax", "Nadam"]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_warning_names_optimizer_method_and_alternatives(name):
    inner_class = tf_dgc.NovoGrad if name == "NovoGrad" else getattr(O, name)
    settings = {"epsilon_1": 1e-15} if name == "Adafactor" else {}
    with pytest.warns(UserWarning) as caught:
        tf_dgc.DGCOptimizer(inner_class(0.01, **settings), 0.99)
    (text,) = [str(warning.message) for warning in caught]
    for part in (
        f"`{name}`",
        "TopK(",
        "Use `Adam`",
        "uniform_8bit",
        "Corrections(adam=False)",
    ):
        assert part in text
    needs_another_rate = name in ("Adagrad", "Adafactor", "Ftrl")
    assert ("needs a learning rate of its own" in text) == needs_another_rate
    assert ("trains badly" in text) != needs_another_rate


def test_warning_depends_on_the_methods_error():
    with pytest.warns(UserWarning, match="`Lion` trains badly with"):
        tf_dgc.CompressedOptimizer(O.Lion(1e-3), "random_k")
    with pytest.warns(UserWarning, match="`Lion` needs a learning rate of its own"):
        tf_dgc.CompressedOptimizer(O.Lion(1e-3), "ef_sign_sgd")
    with pytest.warns(UserWarning, match="`Lamb` trains badly with"):
        tf_dgc.CompressedOptimizer(O.Lamb(1e-3), "ef_sign_sgd")
    tf_dgc.CompressedOptimizer(O.Lion(1e-3), "power_sgd")


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Lion"])
def test_warns_about_an_uncorrected_outer_optimizer(name):
    outer = getattr(O, name)(1e-3)
    with pytest.warns(UserWarning, match=f"`{name}` as `outer` trains badly with"):
        tf_dgc.LocalOptimizer("sgd", 2, outer=outer, compressor="top_k")
    for settings in ({}, {"compressor": "uniform_8bit"}):
        tf_dgc.LocalOptimizer("sgd", 2, outer=outer, **settings)
    tf_dgc.LocalOptimizer("sgd", 2, outer=O.SGD(0.7), compressor="top_k")


def test_loading_a_config_warns_again():
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
    """An unknown rule."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * learning_rate)


class InAdam(O.AdamW):
    """An unknown rule that is derived from AdamW."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(2 * gradient, variable, learning_rate)


class Defaults(O.AdamW):
    """An AdamW with other defaults."""

    def __init__(self, learning_rate=0.1, **settings):
        super().__init__(learning_rate, **settings)


def test_warning_names_the_method_that_an_adam_overrides():
    with pytest.warns(UserWarning, match="overrides `update_step`, so its rule is"):
        optimizer = tf_dgc.DGCOptimizer(InAdam(0.01), 0.99)
    optimizer.build([keras.Variable([[0.0] * 40] * 40)])
    assert optimizer.second_moment == []


@pytest.mark.parametrize(("sparsity", "too_little"), [(0.0, 1.0), (0.9, 10**0.5)])
@pytest.mark.slow
def test_a_sparse_sum_has_a_norm_that_is_too_large(sparsity, too_little):
    """With `NovoGrad`, an entry sent every T steps moves T**0.5 times too little."""
    variable = keras.Variable(np.zeros((100, 100), "float32"))
    inner = tf_dgc.NovoGrad(0.01, beta_1=0.0, beta_2=0.0)
    optimizer = tf_dgc.DGCOptimizer(
        inner, sparsity, corrections=tf_dgc.Corrections(adam=False)
    )
    gradient = np.random.default_rng(0).normal(size=variable.shape).astype("float32")
    for _ in range(300):
        optimizer.apply([gradient], [variable])
    step_length = np.vdot(-variable.numpy(), gradient) / np.linalg.norm(gradient)
    np.testing.assert_allclose(step_length, 3.0 / too_little, rtol=0.35)


@pytest.mark.parametrize(("sparsity", "too_little"), [(0.0, 1.0), (0.9, 10**0.5)])
@pytest.mark.slow
def test_a_sparse_sum_has_mean_squares_that_are_too_large(sparsity, too_little):
    """`Adafactor` divides by the root of the mean squares of rows and columns."""
    variable = keras.Variable(np.ones((100, 100), "float32"))
    inner = O.Adafactor(1e-3, epsilon_1=1e-15, relative_step=False)
    optimizer = tf_dgc.DGCOptimizer(
        inner, sparsity, corrections=tf_dgc.Corrections(adam=False)
    )
    gradient = np.random.default_rng(0).choice([-1.0, 1.0], (100, 100))
    for _ in range(100):
        optimizer.apply([gradient.astype("float32")], [variable])
    step_length = np.mean((1 - variable.numpy()) * gradient)
    np.testing.assert_allclose(step_length, 0.1 / too_little, rtol=0.15)


NAN_WARNING = r"epsilon_1=1e-30\)` makes NaN .* `Adafactor\(epsilon_1=1e-15\)`"


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
def test_an_adafactor_that_would_make_nan_is_refused(make):
    """With delayed entries it would do so in the first step."""
    with pytest.raises(ValueError, match=f"{NAN_WARNING}. Received"):
        make(O.Adafactor(0.01))


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: tf_dgc.DGCOptimizer(inner, 0.0),
        lambda inner: tf_dgc.CompressedOptimizer(inner, "float16"),
        lambda inner: tf_dgc.LocalOptimizer(inner, 2),
    ],
)
def test_warns_about_an_adafactor_that_may_make_nan(make):
    with pytest.warns(UserWarning, match=NAN_WARNING):
        make(O.Adafactor(0.01))
    make(O.Adafactor(0.01, epsilon_1=1e-15))


@pytest.mark.parametrize("epsilon", [1e-30, 1e-19, 1e-15])
def test_keras_makes_nan_below_the_smallest_epsilon(epsilon):
    variable = keras.Variable(np.ones((40, 40), "float32"))
    gradient = np.zeros((40, 40), "float32")
    gradient[[3, 7], [4, 8]] = 1.0
    inner = O.Adafactor(0.01, epsilon_1=epsilon)
    inner.apply([gradient], [variable])
    assert np.isnan(variable.numpy()).any() == (epsilon < unsupported._MIN_EPSILON)


# --- no warning, which pytest would turn into an error --------------------------------


@pytest.mark.parametrize("name", SUPPORTED)
def test_does_not_warn_about_linear_or_corrected_rules(name):
    tf_dgc.DGCOptimizer(getattr(O, name)(0.01), 0.99)


def test_does_not_warn_about_an_adam_with_another_constructor():
    tf_dgc.DGCOptimizer(Defaults(0.01), 0.99)


@pytest.mark.parametrize("method", ["uniform_8bit", "bfloat16", "qsgd", "none"])
def test_does_not_warn_without_delayed_entries(method):
    tf_dgc.CompressedOptimizer(O.RMSprop(), method)


def test_does_not_warn_about_small_errors():
    tf_dgc.CompressedOptimizer(O.RMSprop(), "float16", error_feedback=True)


def test_does_not_warn_about_dense_steps():
    tf_dgc.DGCOptimizer(O.RMSprop(), sparsity=0)


def test_does_not_warn_if_the_correction_is_disabled():
    tf_dgc.DGCOptimizer(O.RMSprop(), 0.99, corrections=tf_dgc.Corrections(adam=False))


def test_does_not_warn_about_unknown_rules():
    tf_dgc.DGCOptimizer(InStep(0.01), 0.99)
