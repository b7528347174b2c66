"""A variable that is passed several times, as with two models that share a layer."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from serving import ServerGroup

import tf_dgc
from tf_dgc.steps import native

O = keras.optimizers  # noqa: E741
SHAPE = (40, 50)
STEPS = 3


def plain_steps(make, num_workers=1, strategy=None, sparse=False):
    """Return the weights after steps with two gradients of `a` and one of `b`."""
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        a, b = (keras.Variable(np.ones(SHAPE, "float32"), name=n) for n in "ab")
        optimizer = make()
    variables = [a, b, a]
    rng = np.random.default_rng(5)
    values = rng.normal(size=(STEPS, 3, *SHAPE)).astype("float32") / num_workers

    def step(i):
        grads = list(tf.unstack(tf.constant(values[i])))
        if sparse:
            rows = [tf.constant([3, 5]), tf.constant([5, 7])]
            grads[0], grads[2] = (
                tf.IndexedSlices(tf.gather(g, r), r, SHAPE)
                for g, r in zip((grads[0], grads[2]), rows, strict=True)
            )
        optimizer.apply(grads, variables)

    for i in range(STEPS):
        strategy.run(lambda i=i: step(i))
    return a.numpy(), b.numpy()


def assert_equal(weights, expected):
    for weight, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)


@pytest.fixture(params=["native", "tensorflow"])
def path(request):
    if request.param == "native":
        yield
        return
    with (
        mock.patch.object(native, "is_available", return_value=False),
        mock.patch.object(native, "rules_available", return_value=False),
    ):
        yield


INNER = {
    "sgd": lambda: O.SGD(0.1),
    "momentum": lambda: O.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda: O.Adam(0.1, clipnorm=1.0),
}
DENSE = {
    "dgc": lambda inner: tf_dgc.DGCOptimizer(inner, 0.0),
    "float16": lambda inner: tf_dgc.CompressedOptimizer(
        inner, "none", collective=tf_dgc.collectives.Overlapped()
    ),
    "local": lambda inner: tf_dgc.LocalOptimizer(inner, 1),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("wrapper", DENSE)
@pytest.mark.usefixtures("path")
def test_without_compression_it_is_updated_as_often_as_in_keras(wrapper, inner):
    make = INNER[inner]
    assert_equal(plain_steps(lambda: DENSE[wrapper](make())), plain_steps(make))


@pytest.mark.parametrize("wrapper", DENSE)
def test_two_workers_update_it_as_keras_does(strategies, wrapper):
    weights = plain_steps(lambda: DENSE[wrapper](INNER["momentum"]()), 2, strategies[2])
    assert_equal(weights, plain_steps(INNER["momentum"]))


def zero_sparsity(iteration):
    """A schedule of sparsity 0, which still has a residual."""
    return tf.zeros([], tf.float64)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.usefixtures("path")
def test_with_a_residual_its_gradients_are_added_up(sparse):
    """With plain SGD, Keras does the same."""
    sgd = INNER["sgd"]
    wrappers = {
        "dgc": lambda: tf_dgc.DGCOptimizer(sgd(), zero_sparsity, min_compress_size=0),
        "accumulating": lambda: tf_dgc.CompressedOptimizer(sgd(), "ef_sign_sgd"),
    }
    expected = plain_steps(sgd, sparse=sparse)
    assert_equal(plain_steps(wrappers["dgc"], sparse=sparse), expected)
    a, b = plain_steps(wrappers["accumulating"], sparse=sparse)
    assert np.isfinite(a).all() and np.isfinite(b).all()


def test_a_residual_has_each_entry_once():
    a = keras.Variable(np.zeros(SHAPE, "float32"))
    optimizer = tf_dgc.DGCOptimizer(
        O.SGD(1.0),
        0.9,
        min_compress_size=0,
        corrections=tf_dgc.Corrections(scale_before_accumulation=False),
    )
    ones = tf.ones(SHAPE)
    optimizer.apply([ones, 2.0 * ones], [a, a])
    assert len(optimizer.residual) == 1
    total = optimizer.residual[0].numpy() - a.numpy()
    np.testing.assert_array_equal(total, np.full(SHAPE, 3.0))


def test_a_server_adds_its_gradients_up(monkeypatch):
    sgd = INNER["sgd"]
    with ServerGroup(1) as server:
        weights = plain_steps(
            lambda: server.optimizer(monkeypatch, 0, sgd(), compressor="none")
        )
    assert_equal(weights, plain_steps(sgd))


def test_two_models_that_share_a_layer_train_together():
    def train(make):
        shared = keras.layers.Dense(40, kernel_initializer="ones")
        models = [
            keras.Sequential(
                [
                    keras.Input((50,)),
                    shared,
                    keras.layers.Dense(1, "tanh", kernel_initializer="ones"),
                ]
            )
            for _ in range(2)
        ]
        variables = [v for model in models for v in model.trainable_variables]
        optimizer = make()

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_mean(model(x) ** 2) for model in models])
            optimizer.apply(tape.gradient(loss, variables), variables)

        for _ in range(STEPS):
            step(tf.ones((4, 50)) / 100)
        return [v.numpy() for v in variables]

    wrapped = train(lambda: tf_dgc.DGCOptimizer(O.Adam(0.01), 0.0))
    assert_equal(wrapped, train(lambda: O.Adam(0.01)))
