"""Trains with and without process-wide settings of TensorFlow, and compares.

Runs as a separate process.
"""

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

SGD = keras.optimizers.SGD
WARMUP = tf_dgc.schedules.PiecewiseConstantSparsity([2], [0.0, 0.9])  # dense, sparse


def train(strategy, make_optimizer, target=1.0):
    """Return the weights after four steps."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(60)])
        model.compile(make_optimizer(), "mse")
    x = np.random.default_rng(0).normal(size=(64, 20)).astype("float32")
    y = np.full((64, 60), target)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    return np.concatenate([w.ravel() for w in model.get_weights()])


def dgc(sparsity=0.9, **settings):
    inner = SGD(0.01, momentum=0.9, **settings)
    return lambda: tf_dgc.DGCOptimizer(inner, sparsity)


def check_numerics(strategy):
    """Only NaN and Inf in the model's own numbers are reported."""
    expected = train(strategy, dgc(clipnorm=0.1))
    tf.debugging.enable_check_numerics()
    weights = train(strategy, dgc(clipnorm=0.1))
    np.testing.assert_array_equal(weights, expected)
    train(strategy, dgc(clipvalue=0.01))
    train(strategy, lambda: tf_dgc.CompressedOptimizer(SGD(0.01), "laq"))
    try:
        train(strategy, dgc(clipnorm=0.1), np.nan)
    except tf.errors.InvalidArgumentError as error:
        assert "NaN" in error.message
    else:
        raise AssertionError("NaN was not reported")
    tf.debugging.disable_check_numerics()


def run_functions_eagerly(strategy):
    """Collectives of the replicas do not block each other."""
    expected = train(strategy, dgc(WARMUP))
    tf.config.run_functions_eagerly(True)
    weights = train(strategy, dgc(WARMUP))
    tf.config.run_functions_eagerly(False)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)


def enable_op_determinism(strategy):
    """Runs last: this setting cannot be undone."""
    expected = train(strategy, dgc(WARMUP))
    tf.config.experimental.enable_op_determinism()
    np.testing.assert_array_equal(train(strategy, dgc(WARMUP)), expected)


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    alone = tf.distribute.get_strategy()
    both = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for check, strategy in [
        (check_numerics, alone),
        (run_functions_eagerly, both),
        (enable_op_determinism, both),
    ]:
        print(check.__name__, flush=True)
        check(strategy)


if __name__ == "__main__":
    main()
