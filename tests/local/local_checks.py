"""Helpers that the tests of local steps and of delayed averaging share."""

import keras
import numpy as np
from contract import round_trip


def save(trainer):
    """Return what Keras would save, including the outer optimizer."""
    outer = {}
    trainer.optimizer.outer_optimizer.save_own_variables(outer)
    return *trainer.save(), outer


def load(trainer, saved):
    *trainer_state, outer = saved
    trainer.optimizer.outer_optimizer.load_own_variables(outer)
    trainer.load(trainer_state)


def check_equal_states(trainer, other):
    pairs = zip(trainer.state().items(), other.state().values(), strict=True)
    for (path, copies), other_copies in pairs:
        for copy, other_copy in zip(copies, other_copies, strict=True):
            np.testing.assert_array_equal(copy, other_copy, path)


def check_resumes(trainer, resumed, steps):
    """Load one trainer's state into another; check that both take the same steps."""
    load(resumed, save(trainer))
    for gradients in steps:
        trainer.step(gradients)
        resumed.step(gradients)
    for each in (trainer, resumed):
        if each.optimizer.background:
            each.optimizer.background.finish()
    check_equal_states(trainer, resumed)


def check_loads_the_mean(one, several, rtol):
    """Load several workers' state into a single worker, which gets their mean."""
    load(one, save(several))
    for weights, copies in zip(one.weights(), several.replica_weights(), strict=True):
        np.testing.assert_allclose(weights, np.mean(copies, axis=0), rtol=rtol)


def make_model(optimizer, **settings):
    """Return a compiled model with two layers."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
    model.add(keras.layers.Dense(1))
    model.compile(optimizer, "mse", **settings)
    return model


def fit(model):
    """Train a model of `make_model` for an epoch of five steps."""
    x = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
    model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)


def check_config_round_trip(optimizer):
    restored = round_trip(optimizer)
    assert restored.get_config() == optimizer.get_config()
    assert repr(restored) == repr(optimizer)
