"""Variables that gradients overwrite, as in Keras's float8 layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer

import tf_dgc

O = keras.optimizers  # noqa: E741
SHAPE = (40, 50)


def marked(variable):
    variable.overwrite_with_gradient = True
    return variable


class WithScale(Trainer):
    """Trains a matrix, after a variable that is overwritten."""

    def __init__(self, strategy, make_optimizer, aggregation="none", dtype="float32"):
        def make():
            with strategy.scope():
                scale = keras.Variable(
                    np.array([7.0, 7.0]), dtype=dtype, aggregation=aggregation
                )
            self.variables.insert(0, marked(scale))
            return make_optimizer()

        super().__init__(strategy, make, [np.zeros(SHAPE, "float32")])

    def scales(self):
        return [copy.tolist() for copy in self.replica_weights()[0]]


def matrix(seed):
    return np.random.default_rng(seed).normal(size=SHAPE).astype("float32")


def dgc():
    inner = O.SGD(0.1, momentum=0.9, clipnorm=0.1, loss_scale_factor=8.0)
    return tf_dgc.DGCOptimizer(inner, 0.9)


def composed():
    return tf_dgc.CompressedOptimizer(O.Adam(0.1, use_ema=True), "qsgd")


@pytest.mark.parametrize("make", [dgc, composed])
def test_workers_agree_and_other_variables_train_as_without(strategies, make):
    plain = Trainer(strategies[2], make, [np.zeros(SHAPE, "float32")])
    trainer = WithScale(strategies[2], make)
    for step in range(2):
        values = [np.array([1.0, 5.0], "float32"), np.array([3.0, np.nan], "float32")]
        gradients = [[v, matrix(step + 10 * i)] for i, v in enumerate(values)]
        trainer.step(gradients)
        plain.step([g[1:] for g in gradients])
    assert trainer.scales() == [[3.0, 7.0]] * 2
    np.testing.assert_array_equal(trainer.weights()[1], plain.weights()[0])
    stats, expected = trainer.optimizer.stats, plain.optimizer.stats
    assert stats.bytes_per_step == expected.bytes_per_step + 8
    assert stats.dense_bytes_per_step == expected.dense_bytes_per_step + 8


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("none", [3.0, 5.0]),
        ("mean", [2.0, 3.5]),
        ("sum", [4.0, 7.0]),
        ("only_first_replica", [1.0, 5.0]),
    ],
)
def test_the_variables_aggregation_is_used(strategies, aggregation, expected):
    trainer = WithScale(strategies[2], dgc, aggregation, "float64")
    values = [[1.0, 5.0], [3.0, 2.0]]
    trainer.step([[np.array(v), matrix(0)] for v in values])
    assert trainer.scales() == [expected] * 2


def float8_model(optimizer):
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(48, dtype="float8_from_float32")
    model = keras.Sequential([keras.Input((32,)), dense])
    model.compile(optimizer, "mse")
    return model


def test_float8_trains_as_with_the_inner_optimizer(tmp_path):
    x, y = np.ones((16, 32), "float32"), np.ones((16, 48), "float32")
    weights = []
    inner = O.SGD(0.1, momentum=0.9)
    wrapped = tf_dgc.DGCOptimizer(O.SGD(0.1, momentum=0.9), 0)
    for optimizer in (inner, wrapped):
        model = float8_model(optimizer)
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for inner_weight, wrapped_weight in zip(*weights, strict=True):
        np.testing.assert_allclose(inner_weight, wrapped_weight, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    again.fit(x, y, verbose=0)
    assert np.isfinite(again.get_weights()[0]).all()


def test_a_model_of_only_overwritten_variables_raises():
    with pytest.raises(ValueError, match="no trainable variables"):
        dgc().build([marked(keras.Variable(tf.ones(2)))])


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_a_step_of_only_overwritten_variables(strategies):
    """A loop may apply them separately; the step counts, as in Keras."""
    trainer = WithScale(strategies[2], dgc)
    trainer.step([[np.array([1.0, 5.0], "float32"), None]] * 2)
    assert trainer.scales() == [[1.0, 5.0]] * 2
    assert int(trainer.optimizer.iterations) == 1
    stats = trainer.optimizer.stats
    assert stats.bytes_per_step == stats.dense_bytes_per_step == 8
    trainer.step([[np.array([1.0, 5.0], "float32"), matrix(0)]] * 2)
    assert np.any(trainer.weights()[1])
