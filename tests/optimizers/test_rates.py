"""`scale_before_accumulation`: which learning rate multiplies a delayed entry."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc import compressors

SGD = keras.optimizers.SGD
SHAPE = (40, 50)
CASES = {
    "sparsity": (lambda: tf_dgc.DGCOptimizer(SGD(0.5), 0.9), True),
    "low rank": (lambda: tf_dgc.CompressedOptimizer(SGD(0.5), "power_sgd"), True),
    "when sent": (
        lambda: tf_dgc.DGCOptimizer(
            SGD(0.5),
            0.9,
            corrections=tf_dgc.Corrections(scale_before_accumulation=False),
        ),
        False,
    ),
    "threshold": (
        lambda: tf_dgc.CompressedOptimizer(SGD(0.5), compressors.Threshold(1e3)),
        False,
    ),
    "two bits": (
        lambda: tf_dgc.CompressedOptimizer(SGD(0.5), compressors.TwoBit(1e3)),
        False,
    ),
    "another rule": (
        lambda: tf_dgc.DGCOptimizer(
            keras.optimizers.RMSprop(0.5),
            0.9,
            corrections=tf_dgc.Corrections(adam=False),
        ),
        False,
    ),
}


def make_trainer(make_optimizer, strategy=None):
    weights = initial_weights("float32", [SHAPE])
    return Trainer(strategy or tf.distribute.get_strategy(), make_optimizer, weights)


@pytest.mark.parametrize("name", CASES)
def test_which_methods_scale_before_accumulation(name):
    """Methods with a threshold and other rules accumulate unscaled gradients."""
    make_optimizer, scales_by_learning_rate = CASES[name]
    trainer = make_trainer(make_optimizer)
    ((gradient,),) = make_gradients(1, 1, "float32", [SHAPE])[0][:1]
    trainer.step([[gradient]])
    (residual,) = trainer.local(trainer.optimizer.residual)[0]
    is_delayed = residual != 0
    assert np.any(is_delayed)
    if name != "low rank":
        expected = gradient * np.float32(0.5 if scales_by_learning_rate else 1)
        np.testing.assert_allclose(
            residual[is_delayed], expected[is_delayed], rtol=1e-6
        )
    assert np.linalg.norm(residual) <= (
        0.5 if scales_by_learning_rate else 1
    ) * np.linalg.norm(gradient)


def test_a_rate_of_0_only_sends_residuals(strategies):
    trainer = make_trainer(lambda: tf_dgc.DGCOptimizer(SGD(0.5), 0.5), strategies[2])
    first, second = make_gradients(2, 2, "float32", [SHAPE])
    trainer.step(first)
    residuals = sum(r for (r,) in trainer.local(trainer.optimizer.residual))
    before = trainer.weights()[0]
    trainer.optimizer.learning_rate = 0.0
    for gradients in (second, second):
        trainer.step(gradients)
    np.testing.assert_allclose(before - trainer.weights()[0], residuals, atol=1e-5)
    for (residual,) in trainer.local(trainer.optimizer.residual):
        assert not np.any(residual)


@pytest.mark.parametrize("inner", ["sgd", "adam"])
@pytest.mark.parametrize("saved", [True, False])
def test_a_file_of_other_units_is_refused(tmp_path, inner, saved):
    def make_model(corrects, build=True):
        model = keras.Sequential([keras.Input([40]), keras.layers.Dense(50)])
        optimizer = tf_dgc.DGCOptimizer(
            inner,
            0.9,
            corrections=tf_dgc.Corrections(scale_before_accumulation=corrects),
        )
        model.compile(optimizer=optimizer, loss="mse")
        if build:
            model.optimizer.build(model.trainable_variables)
        return model

    path = tmp_path / "model.weights.h5"
    if inner == "sgd":  # with an Adam, Keras itself refuses a file without its state
        make_model(saved, build=False).save_weights(path)
        make_model(not saved).load_weights(path)  # no residual yet
    model = make_model(saved)
    model.fit(np.ones([8, 40]), np.ones([8, 50]), verbose=0)
    model.save_weights(path)
    make_model(saved).load_weights(path)
    with pytest.raises(ValueError, match=r"in units of .*: `Corrections"):
        make_model(not saved).load_weights(path)
    checkpoint = tf.train.Checkpoint(optimizer=model.optimizer)
    checkpoint_path = checkpoint.write(str(tmp_path / "checkpoint"))
    same, other = make_model(saved), make_model(not saved)
    tf.train.Checkpoint(optimizer=same.optimizer).read(
        checkpoint_path
    ).assert_consumed()
    for value, expected in zip(
        same.optimizer.residual, model.optimizer.residual, strict=True
    ):
        np.testing.assert_array_equal(value.numpy(), expected.numpy())
    with pytest.raises(ValueError, match=r"in units of .*: `Corrections"):
        tf.train.Checkpoint(optimizer=other.optimizer).read(checkpoint_path)
