"""A density that follows the learning rate."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc.compressors import TopK
from tf_dgc.schedules import FollowLearningRate, PiecewiseConstantSparsity

rates = keras.optimizers.schedules
SGD = keras.optimizers.SGD


def sparsities(schedule, steps):
    return [float(schedule(tf.constant(i, tf.int64))) for i in range(steps)]


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_density_is_a_power_of_the_rate(exponent):
    rate = rates.CosineDecay(0.1, 50, warmup_target=0.4, warmup_steps=10)
    schedule = FollowLearningRate(rate, None, 0.8, 0.98, exponent)
    values = np.array([float(rate(i)) for i in range(70)])
    density = np.clip(0.2 * (values / 0.4) ** exponent, 0.02, 0.2)
    np.testing.assert_allclose(sparsities(schedule, 70), 1 - density, rtol=1e-6)
    assert schedule.smallest == min(sparsities(schedule, 70)) == 0.8
    assert schedule.final == max(sparsities(schedule, 70)) == 0.98


@pytest.mark.parametrize(
    ("rate", "peak"),
    [
        (rates.PiecewiseConstantDecay([3, 6], [0.1, 0.5, 0.2]), 0.5),
        (rates.PolynomialDecay(0.3, 10, 0.01), 0.3),
        (rates.CosineDecay(0.3, 10), 0.3),
        (rates.CosineDecay(0.0, 10, warmup_target=0.3, warmup_steps=5), 0.3),
        (rates.CosineDecayRestarts(0.3, 10), 0.3),
        (rates.ExponentialDecay(0.3, 10, 0.5), 0.3),
        (rates.InverseTimeDecay(0.3, 10, 0.5), 0.3),
    ],
)
def test_peak_of_keras_schedules(rate, peak):
    schedule = FollowLearningRate(rate)
    assert schedule.peak == peak
    assert max(float(rate(i)) for i in range(40)) == pytest.approx(peak)
    assert tf_dgc.DGCOptimizer(SGD(rate), FollowLearningRate()).sparsity.peak == peak


def train(strategy, optimizer, workers, before_step=lambda trainer, step: None):
    trainer = Trainer(strategy, optimizer, initial_weights("float32"), traced=True)
    for step, gradients in enumerate(make_gradients(workers, 8, "float32")):
        before_step(trainer, step)
        trainer.step(gradients)
    return trainer


@pytest.mark.parametrize("workers", [1, 2])
def test_steps_are_those_of_the_same_sparsities(strategies, workers):
    rate = rates.PiecewiseConstantDecay([2, 5], [0.125, 0.0625, 0.001])
    same = PiecewiseConstantSparsity([3, 6], [0.75, 0.875, 0.99])
    schedules = [FollowLearningRate(final_sparsity=0.99), same]
    followed, expected = (
        train(
            strategies[workers], lambda s=s: tf_dgc.DGCOptimizer(SGD(rate), s), workers
        )
        for s in schedules
    )
    for weights, other in zip(followed.weights(), expected.weights(), strict=True):
        np.testing.assert_array_equal(weights, other)
    assert followed.optimizer.stats.entries == expected.optimizer.stats.entries


def test_a_rate_that_a_callback_changes_is_followed(strategies):
    """From the next step on, also in a traced step."""
    sent = []

    def change(trainer, step):
        sent.append(int(trainer.optimizer.stats.entries))
        if step == 4:
            trainer.optimizer.learning_rate = 0.05

    def make():
        return tf_dgc.DGCOptimizer(SGD(0.1), FollowLearningRate(), min_compress_size=0)

    trainer = train(strategies[1], make, 1, change)
    per_step = np.diff([*sent, int(trainer.optimizer.stats.entries)])
    sizes = [w.size for w in initial_weights("float32")]
    at_peak = sum(-(-n // 4) for n in sizes if n >= 100)
    assert per_step[0] == per_step[3]
    assert at_peak <= per_step[3] and per_step[4] < 0.6 * per_step[3]
    assert per_step[4] == per_step[7]


def test_config_keeps_the_peak():
    optimizer = tf_dgc.DGCOptimizer(SGD(0.1), FollowLearningRate(exponent=2.0))
    optimizer.learning_rate = 0.01
    again = tf_dgc.DGCOptimizer.from_config(optimizer.get_config())
    assert again.sparsity.peak == pytest.approx(0.1)
    assert again.sparsity.exponent == 2.0
    at_start = float(again.sparsity(tf.constant(0, tf.int64)))
    assert at_start == pytest.approx(1 - 0.25 / 100, rel=1e-5)
    own = TopK(FollowLearningRate(rates.CosineDecay(0.3, 10)))
    assert sparsities(TopK.from_config(own.get_config()).sparsity, 12) == sparsities(
        own.sparsity, 12
    )


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_mean_density(exponent):
    rate = rates.CosineDecay(0.1, 200)
    schedule = FollowLearningRate.with_mean_density(rate, 200, 0.05, exponent=exponent)
    assert np.mean(sparsities(schedule, 200)) == pytest.approx(0.95, abs=1e-4)
    assert schedule.final_sparsity == 0.999
    with pytest.raises(ValueError, match=r"from 0\.001 to .*Received: density=0\.9"):
        FollowLearningRate.with_mean_density(rate, 200, 0.9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 0.1}, "must be a schedule of Keras"),
        ({"peak": 0.0}, "`peak` must be a finite number above 0"),
        ({"exponent": -1}, "`exponent` must be a finite number above 0"),
        ({"sparsity_at_peak": 1.0}, "sparsity_at_peak"),
        ({"final_sparsity": 0.5}, "must not be below"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        FollowLearningRate(**arguments)


def test_without_a_learning_rate():
    with pytest.raises(ValueError, match="no learning rate to follow"):
        TopK(FollowLearningRate())

    class Own(rates.LearningRateSchedule):
        def __call__(self, step):
            return 0.1

        def get_config(self):
            return {}

    with pytest.raises(ValueError, match="`peak`, the largest learning rate"):
        tf_dgc.DGCOptimizer(SGD(Own()), FollowLearningRate())
    tf_dgc.DGCOptimizer(SGD(Own()), FollowLearningRate(peak=0.1))
