"""A warning of rules that train badly behind what waits, and of no others."""

import keras
import pytest

import tf_dgc

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
]
SUITED = ["SGD", "Adam", "AdamW", "Adamax", "Nadam"]


@pytest.mark.parametrize("name", UNSUITED)
def test_names_optimizer_method_and_what_to_use(name):
    with pytest.warns(UserWarning) as found:
        tf_dgc.DGCOptimizer(getattr(O, name)(0.01), 0.99)
    (text,) = [str(warning.message) for warning in found]
    for part in (f"`{name}`", "TopK(", "Use `Adam`", "uniform_8bit", "adam_correction"):
        assert part in text


@pytest.mark.parametrize("method", ["power_sgd", "ef_sign_sgd", "random_k"])
def test_warns_of_every_method_with_much_that_waits(method):
    with pytest.warns(UserWarning, match="`Lion` trains badly behind"):
        tf_dgc.CompressedOptimizer(O.Lion(1e-3), method)


def test_config_that_is_loaded_warns_again():
    optimizer = tf_dgc.DGCOptimizer(O.RMSprop(), 0.9, adam_correction=False)
    config = {**optimizer.get_config(), "adam_correction": True}
    with pytest.warns(UserWarning, match="`RMSprop` trains badly"):
        tf_dgc.DGCOptimizer.from_config(config)


class InStep(O.RMSprop):
    """A rule of which nothing is known."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * learning_rate)


# Warnings are errors.


@pytest.mark.parametrize("name", SUITED)
def test_does_not_warn_of_what_is_linear_or_corrected(name):
    tf_dgc.DGCOptimizer(getattr(O, name)(0.01), 0.99)


def test_does_not_warn_of_layers_norms():
    tf_dgc.DGCOptimizer(tf_dgc.NovoGrad(0.01), 0.99)


@pytest.mark.parametrize("method", ["uniform_8bit", "bfloat16", "qsgd", "none"])
def test_does_not_warn_where_nothing_waits(method):
    tf_dgc.CompressedOptimizer(O.RMSprop(), method)


def test_does_not_warn_of_small_errors():
    tf_dgc.CompressedOptimizer(O.RMSprop(), "float16", error_feedback=True)


def test_does_not_warn_of_dense_steps():
    tf_dgc.DGCOptimizer(O.RMSprop(), sparsity=0)


def test_does_not_warn_of_what_was_asked_for():
    tf_dgc.DGCOptimizer(O.RMSprop(), 0.99, adam_correction=False)


def test_does_not_warn_of_rules_it_does_not_know():
    tf_dgc.DGCOptimizer(InStep(0.01), 0.99)
