"""`exclude_from_compression`, which is like Keras's `exclude_from_weight_decay`."""

import keras
import numpy as np
import pytest

import tf_dgc

SGD = keras.optimizers.SGD


def make_model():
    inputs = keras.Input((40,))
    hidden = keras.layers.Dense(50, name="hidden")(inputs)
    return keras.Model(inputs, keras.layers.Dense(30, name="logits")(hidden))


OPTIMIZERS = {
    "dgc": lambda: tf_dgc.DGCOptimizer(SGD(1.0), 0.99),
    "compressed": lambda: tf_dgc.CompressedOptimizer(SGD(1.0), "qsgd"),
    "local": lambda: tf_dgc.LocalOptimizer(SGD(1.0), 1, compressor="top_k"),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("argument", ["var_list", "var_names"])
def test_excluded_tensors_are_sent_whole(kind, argument):
    model, optimizer = make_model(), OPTIMIZERS[kind]()
    layer = model.get_layer("hidden")
    if argument == "var_list":
        optimizer.exclude_from_compression(var_list=layer.trainable_variables)
    else:
        optimizer.exclude_from_compression(var_names=["^hidden/"])
    before = layer.kernel.numpy()
    optimizer.build(model.trainable_variables)
    assert optimizer.num_compressed == 1
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=v.shape) for v in model.trainable_variables]
    optimizer.apply(gradients)
    whole = before - gradients[0].astype("float32")
    np.testing.assert_array_equal(layer.kernel.numpy(), whole)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_exclusions_are_part_of_the_config(kind):
    model, optimizer = make_model(), OPTIMIZERS[kind]()
    optimizer.exclude_from_compression([model.get_layer("hidden").kernel], ["logits"])
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    again.build(model.trainable_variables)
    assert again.num_compressed == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"var_names": "hidden"}, "must be a list of regular expressions"),
        ({"var_names": [3]}, "must be a list of regular expressions"),
        ({"var_list": ["hidden"]}, "must be a list of a model's variables"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        OPTIMIZERS["dgc"]().exclude_from_compression(**arguments)


def test_exclusion_after_the_build_raises():
    model, optimizer = make_model(), OPTIMIZERS["dgc"]()
    optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match="before the optimizer is built"):
        optimizer.exclude_from_compression(var_names=["hidden"])


def test_a_name_that_is_no_regular_expression():
    optimizer = OPTIMIZERS["dgc"]()
    with pytest.raises(ValueError, match=r"no regular .* Received: '\*bias'"):
        optimizer.exclude_from_compression(var_names=["kernel", "*bias"])
    optimizer.exclude_from_compression(var_names=["bias$"])


def test_a_rejected_build_can_be_fixed():
    """The error does not leave the optimizer built."""
    variables = [
        keras.Variable(np.zeros((40, 50)), dtype=dtype, name=dtype)
        for dtype in ("float32", "float64")
    ]
    optimizer = tf_dgc.CompressedOptimizer(keras.optimizers.SGD(0.1), "lgc")
    with pytest.raises(ValueError, match="Exclude those of another dtype"):
        optimizer.build(variables)
    assert not optimizer.built
    optimizer.exclude_from_compression(var_list=variables[1:])
    optimizer.build(variables)
    optimizer.apply([np.ones((40, 50), v.dtype) for v in variables], variables)
    assert all(np.all(v.numpy() < 0) for v in variables)


def test_names_that_match_no_variable_cause_a_warning():
    model, optimizer = make_model(), OPTIMIZERS["dgc"]()
    other = keras.Variable(np.zeros((40, 50)), name="another")
    optimizer.exclude_from_compression([other], ["hiden", "logits"])
    with pytest.warns(UserWarning, match=r"Received: \['another', 'hiden'\];"):
        optimizer.build(model.trainable_variables)
    assert optimizer.num_compressed == 1


def test_loading_a_model_with_other_layer_names_causes_a_warning(tmp_path):
    @keras.saving.register_keras_serializable("test_exclusions")
    class Unnamed(keras.Model):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.one, self.other = keras.layers.Dense(40), keras.layers.Dense(40)

        def call(self, x):
            return self.other(self.one(x))

    x = np.ones((4, 40), "float32")
    model, optimizer = Unnamed(), OPTIMIZERS["dgc"]()
    model(x)
    optimizer.exclude_from_compression([model.other.kernel])
    model.compile(optimizer, "mse")
    model.fit(x, x, verbose=0)
    model.save(tmp_path / "m.keras")
    with pytest.warns(UserWarning, match="A model that is loaded may have other names"):
        keras.models.load_model(tmp_path / "m.keras")
