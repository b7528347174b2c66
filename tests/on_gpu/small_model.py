"""A model and its data, for tests and their worker."""

import keras
import numpy as np

import tf_dgc


def examples():
    """Return 64 examples, whose labels are the sign of the first number."""
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    return x, (x[:, :1] > 0).astype("float32")


def create_model(policy="float32"):
    """Return a compiled model; call it in the scope of a strategy."""
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(32, activation="relu", dtype=policy),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    optimizer = tf_dgc.DGCOptimizer(
        keras.optimizers.SGD(0.1, 0.9), sparsity=0.9, min_compress_size=16
    )
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 256.0)
    model.compile(
        optimizer, keras.losses.BinaryCrossentropy(from_logits=True), jit_compile=False
    )
    return model


def fit(model):
    """Train for twelve steps; return the loss of every epoch."""
    x, y = examples()
    history = model.fit(x, y, 16, 3, shuffle=False, verbose=0)
    return history.history["loss"]
