"""A worker's NaN or Inf gradient is skipped and counted, with one warning."""

import keras
import numpy as np
import pytest
from harness import Trainer, initial_weights, make_gradients
from selection import in_turn

import tf_dgc
from tf_dgc.steps import native

SPARSITY = {
    "sparse": 0.97,
    "dense": 0.0,
    "both": tf_dgc.schedules.PiecewiseConstantSparsity([4], [0.0, 0.97]),
}


@pytest.mark.parametrize(("steps", "value"), in_turn(SPARSITY, [np.nan, np.inf]))
def test_nonfinite_gradient_is_skipped(strategies, capfd, steps, value):
    """The others train on as if this worker's gradient had been zero."""

    def make_optimizer():
        sgd = keras.optimizers.SGD(0.125, momentum=0.9)
        return tf_dgc.DGCOptimizer(sgd, SPARSITY[steps])

    weights = initial_weights()
    poisoned = Trainer(strategies[2], make_optimizer, weights)
    reference = Trainer(strategies[2], make_optimizer, weights)
    bad_steps = {2: 1, 5: 0, 6: 1}
    for step, gradients in enumerate(make_gradients(2, 8)):
        zeroed = [list(local) for local in gradients]
        if step in bad_steps:
            worker = bad_steps[step]
            zeroed[worker] = [np.zeros_like(g) for g in gradients[worker]]
            gradients[worker][0][3, 4] = value
        poisoned.step(gradients)
        reference.step(zeroed)
    for weights, expected in zip(poisoned.weights(), reference.weights(), strict=True):
        assert np.all(np.isfinite(weights))
        np.testing.assert_array_equal(weights, expected)
    for state in (*poisoned.optimizer.residual, *poisoned.optimizer.velocity):
        assert np.all(np.isfinite(state.numpy()))
    assert poisoned.optimizer.stats.nonfinite == 3
    assert reference.optimizer.stats.nonfinite == 0
    warnings = [line for line in capfd.readouterr().err.splitlines() if "NaN" in line]
    assert len(warnings) == 1
    assert "replica 1 at iteration 2" in warnings[0]


def test_all_workers_nonfinite(strategies):
    weights = initial_weights("float32")
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 0.97),
        weights,
    )
    (gradients,) = make_gradients(2, 1, "float32")
    for local in gradients:
        local[1][0] = np.nan
    trainer.step(gradients)
    for value, before in zip(trainer.weights(), weights, strict=True):
        np.testing.assert_array_equal(value, before)
    assert trainer.optimizer.stats.nonfinite == 2


@pytest.mark.parametrize("clipping", ["clipnorm", "global_clipnorm"])
@pytest.mark.parametrize("path", ["native", "tensorflow"])
def test_overflow_of_the_norm(strategies, monkeypatch, path, clipping):
    """The gradient is finite, but its clipping factor is not."""
    if path == "tensorflow":
        monkeypatch.setattr(native, "is_available", lambda variables: False)
    weights = initial_weights("float32")
    sgd = {"momentum": 0.9, clipping: 1.0}
    trainer = Trainer(
        strategies[1],
        lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1, **sgd), 0.97),
        weights,
    )
    trainer.step([[np.full(w.shape, 1e30, "float32") for w in weights]])
    for value, before in zip(trainer.weights(), weights, strict=True):
        np.testing.assert_array_equal(value, before)
    for state in (*trainer.optimizer.residual, *trainer.optimizer.velocity):
        assert not np.any(state.numpy())
    assert trainer.optimizer.stats.nonfinite == 1
