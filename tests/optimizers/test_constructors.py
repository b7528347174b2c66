"""Arguments of the optimizers: few, with the same names in constructor and config."""

import inspect

import keras
import pytest

import tf_dgc


def load_server_optimizer():
    """Return a `ServerOptimizer` outside of a cluster, as in a loaded model."""
    config = {"inner": keras.saving.serialize_keras_object(keras.optimizers.SGD())}
    return tf_dgc.ServerOptimizer.from_config(config)


MAKE = {
    tf_dgc.DGCOptimizer: lambda: tf_dgc.DGCOptimizer("sgd"),
    tf_dgc.CompressedOptimizer: lambda: tf_dgc.CompressedOptimizer("sgd"),
    tf_dgc.LocalOptimizer: lambda: tf_dgc.LocalOptimizer("sgd", 2),
    tf_dgc.ServerOptimizer: load_server_optimizer,
}
MAX_ARGUMENTS = 10
# Copies of what the user passed.
OTHER_ATTRIBUTES = {"inner": "inner_optimizer", "outer": "outer_optimizer"}
SETTINGS = [
    tf_dgc.Corrections(momentum=False, factor_masking=True, adam=False),
    tf_dgc.Diagnostics(5, "warn", track_staleness=True, track_consensus_distance=True),
    tf_dgc.StalenessCorrection("delay", 0.5),
]


def parameters(optimizer_class):
    return inspect.signature(optimizer_class).parameters


@pytest.mark.parametrize("optimizer_class", MAKE)
def test_an_argument_has_one_type(optimizer_class):
    for parameter in parameters(optimizer_class).values():
        parts = {part.strip() for part in str(parameter.annotation).split("|")}
        assert not {"bool", "float"} <= parts


def test_dgc_has_few_arguments():
    assert len(parameters(tf_dgc.DGCOptimizer)) <= MAX_ARGUMENTS


@pytest.mark.parametrize("optimizer_class", MAKE)
def test_an_argument_has_one_name(optimizer_class):
    optimizer = MAKE[optimizer_class]()
    config = optimizer.get_config()
    for name in parameters(optimizer_class):
        assert hasattr(optimizer, OTHER_ATTRIBUTES.get(name, name))
        assert name in config
    assert set(config) - set(parameters(optimizer_class)) <= {
        "excluded_from_compression"
    }


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: type(s).__name__)
def test_settings_are_values(settings):
    config = keras.saving.serialize_keras_object(settings)
    again = keras.saving.deserialize_keras_object(config)
    assert again == settings
    assert hash(again) == hash(settings)
    assert repr(again) == repr(settings)
    with pytest.raises(AttributeError):
        settings.rule = settings.adam = settings.check_every = 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: tf_dgc.DGCOptimizer(
                "sgd", diagnostics=tf_dgc.Diagnostics(track_consensus_distance=True)
            ),
            "`DGCOptimizer` has no `track_consensus_distance`",
        ),
        (
            lambda: tf_dgc.LocalOptimizer(
                "sgd", 2, diagnostics=tf_dgc.Diagnostics(track_staleness=True)
            ),
            "`LocalOptimizer` has no `track_staleness`",
        ),
        (
            lambda: tf_dgc.DGCOptimizer("sgd", diagnostics="warn"),
            "`diagnostics` must be a `tf_dgc.Diagnostics`",
        ),
        (
            lambda: tf_dgc.DGCOptimizer("sgd", corrections=True),
            "`corrections` must be a `tf_dgc.Corrections`",
        ),
        (lambda: tf_dgc.Corrections(adam=None), "`adam` must be True or False"),
        (lambda: tf_dgc.Corrections(momentum="yes"), "`momentum` must be True, False"),
    ],
)
def test_bad_settings_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("masks", [None, True])
def test_only_an_unset_masking_is_replaced(masks):
    corrections = tf_dgc.Corrections(factor_masking=masks, momentum=False)
    optimizer = tf_dgc.dgc_for_steps("sgd", 1000, corrections=corrections)
    assert optimizer.corrections.factor_masking is bool(masks)
    assert optimizer.corrections.momentum is False
    assert tf_dgc.dgc_for_steps("sgd", 9).corrections.factor_masking is False
