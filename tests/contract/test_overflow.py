"""Values that overflow are skipped, stay in the residual, or raise an error."""

import dataclasses
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc.codecs import value_types
from tf_dgc.steps import native

PATHS = ["native", "tensorflow", "generic"]


def make_trainer(path, monkeypatch, strategy, dtype="float32", rule=None, **settings):
    """Return a trainer with momentum correction and top-k along one path.

    Gradients are not scaled before accumulation, unless `corrections` says so.
    """
    sgd = rule or (lambda: keras.optimizers.SGD(0.125, momentum=0.5))
    unscaled = tf_dgc.Corrections(scale_before_accumulation=False)
    corrections = settings.pop("corrections", unscaled)
    settings = {"sparsity": 0.9, **settings}
    if path == "tensorflow":
        monkeypatch.setattr(native, "is_available", lambda variables: False)

    def generic():
        return tf_dgc.CompressedOptimizer(
            sgd(),
            tf_dgc.compressors.TopK(**settings),
            corrections=dataclasses.replace(corrections, momentum=True),
        )

    def fused():
        return tf_dgc.DGCOptimizer(sgd(), **settings, corrections=corrections)

    dgc = generic if path == "generic" else fused
    dtype = tf.as_dtype(dtype).as_numpy_dtype
    return Trainer(strategy, dgc, initial_weights(dtype))


def fill(trainer, velocity, residual):
    """Set the state of every worker to one number."""
    numbers = {"velocity": velocity, "residual": residual}
    for name, number in numbers.items():
        for variable in getattr(trainer.optimizer, name):
            for copy in trainer.strategy.experimental_local_results(variable.value):
                copy.assign(tf.fill(copy.shape, tf.cast(number, copy.dtype)))


def state(trainer):
    optimizer = trainer.optimizer
    return trainer.local([*optimizer.velocity, *optimizer.residual])


@pytest.mark.parametrize("scales_by_learning_rate", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_skipped_large_gradient_equals_a_zero_gradient(
    strategies, monkeypatch, path, scales_by_learning_rate
):
    """Adding and subtracting 1e8 would round the state away."""
    corrections = tf_dgc.Corrections(scale_before_accumulation=scales_by_learning_rate)
    nonfinite, zero = (
        make_trainer(path, monkeypatch, strategies[1], corrections=corrections)
        for _ in range(2)
    )
    (gradients,) = make_gradients(1, 1, "float32")
    for trainer in (nonfinite, zero):
        fill(trainer, 1e-3, 3e-3)
        factor = 1e8 if trainer is nonfinite else 0
        scaled = [g * np.float32(factor) for g in gradients[0]]
        if trainer is nonfinite:
            scaled[2][0, 1] = np.nan
        trainer.step([scaled])
    for value, expected in zip(state(nonfinite)[0], state(zero)[0], strict=True):
        assert value.tobytes() == expected.tobytes()
    assert np.any(state(nonfinite)[0][0])
    assert nonfinite.optimizer.stats.nonfinite == 1


@pytest.mark.parametrize("scales_by_learning_rate", [True, False])
@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_state_and_weights_stay_finite_if_momentum_overflows(
    strategies, monkeypatch, path, poisoned, scales_by_learning_rate
):
    """An entry that overflows by momentum alone keeps its residual."""
    corrections = tf_dgc.Corrections(scale_before_accumulation=scales_by_learning_rate)
    trainer = make_trainer(path, monkeypatch, strategies[1], corrections=corrections)
    fill(trainer, 3e38, 3e38)
    (gradients,) = make_gradients(1, 1, "float32")
    if poisoned:
        gradients[0][1][7] = np.inf
    before = state(trainer)[0]
    trainer.step(gradients)
    assert trainer.optimizer.stats.nonfinite == 1
    for value in (*state(trainer)[0], *trainer.weights()):
        assert np.all(np.isfinite(value))
    half = len(before) // 2
    sent = [old - new for old, new in zip(before, state(trainer)[0], strict=True)]
    assert all(np.any(s) for s in sent[half:])


@pytest.mark.parametrize("path", PATHS)
def test_entry_that_overflows_the_residual_is_skipped(strategies, monkeypatch, path):
    trainer = make_trainer(path, monkeypatch, strategies[1])
    fill(trainer, 0, 3e38)
    (gradients,) = make_gradients(1, 1, "float32")
    gradients[0][0][0, 0] = 3e38
    trainer.step(gradients)
    velocity = trainer.optimizer.velocity[0].numpy()
    assert velocity[0, 0] == 0
    assert velocity[0, 1] in (gradients[0][0][0, 1], 0)
    assert np.count_nonzero(velocity) > velocity.size // 2
    assert trainer.optimizer.stats.nonfinite == 1


@pytest.mark.parametrize("path", PATHS)
def test_entry_that_overflows_by_the_learning_rate_is_skipped(
    strategies, monkeypatch, path
):
    trainer = make_trainer(
        path,
        monkeypatch,
        strategies[1],
        rule=lambda: keras.optimizers.SGD(4.0, momentum=0.5),
        corrections=tf_dgc.Corrections(scale_before_accumulation=True),
    )
    (gradients,) = make_gradients(1, 1, "float32")
    gradients[0][0][0, 0] = 3e38
    trainer.step(gradients)
    velocity = trainer.optimizer.velocity[0].numpy()
    assert velocity[0, 0] == 0
    assert velocity[0, 1] in (4 * gradients[0][0][0, 1], 0)
    assert np.count_nonzero(velocity) > velocity.size // 2
    assert trainer.optimizer.stats.nonfinite == 1


# --- variables with a smaller range than the residual ---------------------------------

DENSE = tf_dgc.schedules.PiecewiseConstantSparsity([1], [0.0, 0.9])
# By dtype: a number whose double overflows, and a learning rate for it.
LARGE = {
    "float16": (6e4, 2.0**-12),
    "bfloat16": (3.3e38, 2.0**-126),
    "float32": (3.3e38, 2.0**-126),
}


def large_trainer(path, monkeypatch, strategy, dtype, **settings):
    large, rate = LARGE[dtype]
    trainer = make_trainer(
        path,
        monkeypatch,
        strategy,
        dtype,
        rule=lambda: keras.optimizers.SGD(rate, momentum=0.5),
        **settings,
    )
    fill(trainer, 0, large)
    return trainer


@pytest.mark.parametrize(
    ("path", "sparsity", "dtype"),
    [
        *itertools.product(["native"], [0.9, DENSE], LARGE),
        *itertools.product(["tensorflow"], [0.9, DENSE], ["float16"]),
        ("generic", 0.9, "float16"),
        ("generic", 0.9, "bfloat16"),
    ],
)
def test_sums_fit_into_the_variable(strategies, monkeypatch, path, sparsity, dtype):
    """Each of two workers sends at most half of the range and keeps the rest."""
    trainer = large_trainer(path, monkeypatch, strategies[2], dtype, sparsity=sparsity)
    large, rate = LARGE[dtype]
    share = value_types.largest_contribution(tf.as_dtype(dtype), 2)
    assert share < large < 4 * share
    before = trainer.weights()
    trainer.step([[np.zeros_like(w) for w in before]] * 2)
    for i, (old, new) in enumerate(zip(before, trainer.weights(), strict=True)):
        update = old.astype("float64") - new.astype("float64")
        sent = np.abs(update) > 2 * rate * share * 0.9
        assert np.all(np.isfinite(new))
        np.testing.assert_allclose(update[sent], 2 * rate * share, rtol=0.02)
        count = sent.size if sparsity is DENSE or old.ndim < 2 else None
        assert np.count_nonzero(sent) == (count or max(sent.size // 10, 21))
        for worker in trainer.local(trainer.optimizer.residual):
            np.testing.assert_array_equal(
                worker[i], np.where(sent, np.float32(large) - np.float32(share), large)
            )
    assert trainer.optimizer.stats.nonfinite == 0


@pytest.mark.parametrize("method", ["sparsity 0", "none", "qsgd"])
def test_overflowing_sum_without_a_residual_raises(strategies, method):
    """No residual can keep the rest, so no worker changes its weights."""

    def make_optimizer():
        sgd = keras.optimizers.SGD(2.0**-12)
        if method == "sparsity 0":
            return tf_dgc.DGCOptimizer(sgd, 0.0)
        return tf_dgc.CompressedOptimizer(sgd, method, error_feedback=False)

    trainer = Trainer(strategies[2], make_optimizer, initial_weights("float16"))
    before = trainer.weights()
    gradients = [np.full(w.shape, 4e4, "float16") for w in before]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"dtype \(float16\)"):
        trainer.step([gradients] * 2)
    for new, old in zip(trainer.weights(), before, strict=True):
        np.testing.assert_array_equal(new, old)


def test_residual_of_float16_variables_may_exceed_float16(strategies):
    trainer = Trainer(
        strategies[1],
        lambda: tf_dgc.DGCOptimizer(
            keras.optimizers.SGD(2.0**-17, momentum=0.9),
            0.999,
            corrections=tf_dgc.Corrections(scale_before_accumulation=False),
        ),
        [np.zeros([64, 64], "float16")],
    )
    fill(trainer, 100, 65_400)
    for _ in range(6):
        trainer.step([[np.full([64, 64], 10, "float16")]])
    (weights,) = trainer.weights()
    (residual,) = trainer.local(trainer.optimizer.residual)[0]
    assert np.all(np.isfinite(weights))
    accumulated = weights.size * (65_400 + 6 * 100)
    sent = -np.sum(weights, dtype="float64") * 2**17
    total = np.sum(residual, dtype="float64") + sent
    assert accumulated == pytest.approx(total, rel=1e-4)
    assert trainer.optimizer.stats.nonfinite == 0


@pytest.mark.parametrize(
    "method",
    [
        tf_dgc.compressors.ScaleCom(0.9, low_pass=0.1),
        tf_dgc.compressors.AdaComp(),
        tf_dgc.compressors.VarianceBased(),
    ],
)
def test_residual_above_the_largest_contribution_does_not_grow(strategies, method):
    """Each of two workers sends 16,384 at most in float16; its residual is larger."""
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.CompressedOptimizer(
            keras.optimizers.SGD(0.0),
            method,
            min_compress_size=0,
            corrections=tf_dgc.Corrections(scale_before_accumulation=False),
        ),
        [np.zeros((40, 50), "float16")],
    )
    fill(trainer, 0, 20_000.0)
    before = np.abs(residuals(trainer)).max()
    for _ in range(5):
        trainer.step([[np.zeros((40, 50), "float16")]] * 2)
        assert np.abs(residuals(trainer)).max() <= before
    assert np.abs(residuals(trainer)).min() < before


def residuals(trainer):
    return np.stack([worker[0] for worker in trainer.local(trainer.optimizer.residual)])
