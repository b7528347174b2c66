"""`sparsity=0` equals the inner optimizer in every step."""

import keras
import numpy as np
import pytest
from harness import Trainer, initial_weights, make_gradients
from selection import in_turn, rows

import tf_dgc

O = keras.optimizers  # noqa: E741
SCHEDULE = O.schedules.ExponentialDecay(0.1, 3, 0.5)
INNER = {
    "sgd": lambda: O.SGD(0.1),
    "momentum": lambda: O.SGD(0.1, momentum=0.9),
    "nesterov": lambda: O.SGD(0.1, momentum=0.9, nesterov=True),
    "scheduled nesterov": lambda: O.SGD(SCHEDULE, momentum=0.9, nesterov=True),
    "adam": lambda: O.Adam(O.schedules.ExponentialDecay(0.01, 3, 0.5)),
    "adam amsgrad": lambda: O.Adam(0.01, amsgrad=True),
    "nadam": lambda: O.Nadam(0.01),
    "nadam without momentum": lambda: O.Nadam(0.01, beta_1=0.0),
    "adamax": lambda: O.Adamax(0.01),
    "adamw": lambda: O.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: O.RMSprop(0.01, momentum=0.5, centered=True),
    "weight decay": lambda: O.SGD(SCHEDULE, momentum=0.9, weight_decay=0.05),
    "ema": lambda: O.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "clipnorm": lambda: O.SGD(0.1, momentum=0.9, clipnorm=2.0),
    "global_clipnorm": lambda: O.Adam(0.01, global_clipnorm=2.0),
    "clipvalue": lambda: O.SGD(0.1, momentum=0.9, clipvalue=0.3),
    "loss scale": lambda: O.SGD(0.1, momentum=0.9, loss_scale_factor=8.0),
}
ADAM_VARIANTS = ["nadam", "nadam without momentum", "adam amsgrad", "adamax"]


def compare(strategy, num_workers, make_inner, sparsity, rtol, steps=6, **settings):
    weights = initial_weights("float32")
    alone = Trainer(strategy, make_inner, weights)
    wrapped = Trainer(
        strategy,
        lambda: tf_dgc.DGCOptimizer(make_inner(), sparsity, **settings),
        weights,
    )
    for gradients in make_gradients(num_workers, steps, "float32"):
        alone.step(gradients)
        wrapped.step(gradients)
        for value, reference in zip(wrapped.weights(), alone.weights(), strict=True):
            np.testing.assert_allclose(value, reference, rtol=rtol, atol=rtol)
    if alone.optimizer.use_ema:
        for trainer in (alone, wrapped):
            trainer.optimizer.finalize_variable_values(trainer.variables)
        for value, reference in zip(wrapped.weights(), alone.weights(), strict=True):
            np.testing.assert_allclose(value, reference, rtol=rtol, atol=rtol)
    assert wrapped.optimizer.iterations.numpy() == alone.optimizer.iterations.numpy()
    return wrapped.optimizer


@pytest.mark.parametrize(("inner", "num_workers"), in_turn(INNER, [2, 1]))
def test_sparsity_0_equals_inner(strategies, inner, num_workers):
    optimizer = compare(strategies[num_workers], num_workers, INNER[inner], 0.0, 2e-6)
    assert optimizer.velocity == optimizer.residual == []


def test_overwriting_with_the_moving_average(strategies):
    # One worker: under a strategy, Keras does not support it.
    def make_inner():
        return O.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)

    compare(strategies[1], 1, make_inner, 0.0, 2e-6)


@pytest.mark.parametrize(
    ("inner", "num_workers"), in_turn(["nesterov", "adamw"], [3, 4])
)
def test_sparsity_0_equals_inner_with_more_workers(strategies, inner, num_workers):
    # A ring's order of summation depends on its chunks, and the packed buffer has other
    # chunks than stock TensorFlow: results are equal to rounding only.
    compare(strategies[num_workers], num_workers, INNER[inner], 0.0, 1e-5)


@pytest.mark.parametrize(
    "inner",
    rows(
        ["momentum", "scheduled nesterov", "adam", "weight decay", *ADAM_VARIANTS],
        ["momentum", "scheduled nesterov", "adam", "weight decay"],
    ),
)
def test_dense_steps_of_a_schedule_keep_momentum(strategies, inner):
    dense = tf_dgc.schedules.PiecewiseConstantSparsity([100], [0.0, 0.999])
    optimizer = compare(strategies[2], 2, INNER[inner], dense, 1e-5)
    assert len(optimizer.residual) == 4


@pytest.mark.parametrize(
    "inner",
    rows(
        ["momentum", "scheduled nesterov", "adam", *ADAM_VARIANTS],
        ["momentum", "scheduled nesterov", "adam"],
    ),
)
def test_uncompressed_tensors_follow_the_inner_optimizer(strategies, inner):
    """With every tensor uncompressed, the result is that of the inner optimizer."""
    compare(strategies[2], 2, INNER[inner], 0.999, 1e-5, min_compress_size=10**6)


def test_momentum_stays_with_inner_if_correction_is_off(strategies):
    optimizer = compare(
        strategies[1],
        1,
        INNER["scheduled nesterov"],
        0.999,
        1e-6,
        min_compress_size=10**6,
        corrections=tf_dgc.Corrections(momentum=False),
    )
    assert optimizer.velocity == []
    assert optimizer.inner_optimizer.momentum == 0.9
