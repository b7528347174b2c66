"""Workers of `study/time_to_accuracy.py`: warm-up and evaluation."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from experiments import time_to_accuracy
from tasks import recipes
from training import snapshots, timed_worker

import tf_dgc


def test_snapshots_are_at_equal_numbers_of_updates():
    update_snapshots = snapshots.UpdateSnapshots(4, 10)
    for update in range(11):
        update_snapshots.take_if_due(lambda u=update: [u], 0.5 * update, update)
    assert update_snapshots.snapshots == [(u / 2, u, [u]) for u in (0, 2, 5, 8, 10)]


class Largest:
    """Which of 8 numbers is the largest? With batch normalization."""

    recipe = recipes.Recipe(batch_size=16, rate=0.5)

    @staticmethod
    def model():
        layers = keras.Input((8,)), keras.layers.Dense(32)
        normalized = keras.layers.BatchNormalization(momentum=0.9)
        return keras.Sequential([*layers, normalized, keras.layers.Dense(8)])

    @staticmethod
    def draws(seed, batch_size):
        random = np.random.default_rng(seed)

        def draw():
            inputs = random.normal(size=(batch_size, 8)).astype(np.float32)
            return inputs, inputs.argmax(axis=-1)

        return draw

    @staticmethod
    def evaluate(predict):
        inputs = np.eye(8, dtype=np.float32)
        return float(np.mean(predict(inputs).argmax(axis=-1) == np.arange(8)))


def make_optimizer(settings):
    sgd = Largest.recipe.sgd(settings["updates"])
    if settings["mode"] == "dense":
        return sgd
    if settings["mode"] == "dgc":
        return tf_dgc.dgc_for_steps(sgd, settings["updates"])
    return tf_dgc.CompressedOptimizer(sgd, settings["mode"])


@pytest.fixture
def _single_worker(monkeypatch):
    """Give workers a strategy of one process."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    monkeypatch.setattr(tf_dgc, "multi_worker_strategy", lambda: strategy)


def make_worker(method, steps=6):
    settings = {
        **{"mode": method, "seed": 3, "looks": 2, "updates": steps, "step_ms": 0.0},
        **{"speeds": [1.0], "rank": 0},
    }
    return timed_worker.Worker(settings, Largest(), make_optimizer)


@pytest.mark.usefixtures("_single_worker")
@pytest.mark.parametrize("method", [*time_to_accuracy.METHODS, "qsgd"])
def test_warm_up_does_not_change_the_run(method):
    """A run gives the same bits as without a warm-up."""
    warm, cold = make_worker(method), make_worker(method)
    assert warm.answer({"do": "warm"})["parameters"] > 0
    assert warm.optimizer.iterations.numpy() == 0
    for worker in (warm, cold):
        assert len(worker.answer({"do": "run"})["times"]) == 6
    curves = [w.answer({"do": "curve", "seconds": 1.0}) for w in (warm, cold)]
    assert [u for _, u, _ in curves[0]["curve"]] == [0, 3, 6]
    assert len(set(curves[0]["sums"])) == 3
    assert curves[0]["sums"] == curves[1]["sums"]
    assert curves[0]["push"] == curves[1]["push"]
    for variable, expected in zip(warm._variables(), cold._variables(), strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected.numpy())


@pytest.mark.usefixtures("_single_worker")
def test_statistics_are_averaged_before_an_evaluation(monkeypatch):
    worker = make_worker("dense")
    worker.answer({"do": "run"})

    def average(model):
        for variable in model.non_trainable_variables:
            variable.assign(np.full(variable.shape, 7.0))

    monkeypatch.setattr(tf_dgc, "average_statistics", average)
    evaluated = []
    monkeypatch.setattr(
        snapshots,
        "evaluate_snapshots",
        lambda _, snapshots: evaluated.extend(snapshots),
    )
    worker.answer({"do": "curve", "seconds": 1.0})
    assert [updates for _, updates, _ in evaluated] == [0, 3, 6]
    statistics = [weights[4:6] for *_, weights in evaluated]
    np.testing.assert_array_equal(statistics, np.full([3, 2, 32], 7.0))
