"""Workers of `study/time_to_accuracy.py`: where they begin, and how they look."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from experiments import time_to_accuracy
from tasks import recipes
from training import snapshots, timed_worker

import tf_dgc


def test_looks_are_at_equal_numbers_of_updates():
    looks = snapshots.Looks(4, 10)
    for update in range(11):
        looks.take_if_due(lambda u=update: [u], 0.5 * update, update)
    assert looks.taken == [(u / 2, u, [u]) for u in (0, 2, 5, 8, 10)]


class Blobs:
    """What of 8 numbers is the largest? With normalization."""

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


def optimizer(settings):
    sgd = Blobs.recipe.sgd(settings["updates"])
    if settings["mode"] == "dense":
        return sgd
    if settings["mode"] == "dgc":
        return tf_dgc.dgc_for_steps(sgd, settings["updates"])
    return tf_dgc.CompressedOptimizer(sgd, settings["mode"])


@pytest.fixture
def _alone(monkeypatch):
    """Let workers have a strategy that needs no others, nor leaves anything behind."""
    alone = tf.distribute.MirroredStrategy(["CPU:0"])
    monkeypatch.setattr(tf_dgc, "multi_worker_strategy", lambda: alone)


def a_worker(method, steps=6):
    settings = {
        **{"mode": method, "seed": 3, "looks": 2, "updates": steps, "step_ms": 0.0},
        **{"speeds": [1.0], "rank": 0},
    }
    return timed_worker.Worker(settings, Blobs(), optimizer)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("method", [*time_to_accuracy.METHODS, "qsgd"])
def test_warming_up_leaves_nothing_behind(method):
    """A run is, bit for bit, the same as without, and has all of its steps."""
    warm, cold = a_worker(method), a_worker(method)
    assert warm.answer({"do": "warm"})["parameters"] > 0
    assert warm.optimizer.iterations.numpy() == 0
    for worker in (warm, cold):
        assert len(worker.answer({"do": "run"})["times"]) == 6
    curves = [w.answer({"do": "curve", "seconds": 1.0}) for w in (warm, cold)]
    assert [u for _, u, _ in curves[0]["curve"]] == [0, 3, 6]
    assert len(set(curves[0]["sums"])) == 3
    assert curves[0]["sums"] == curves[1]["sums"]
    assert curves[0]["push"] == curves[1]["push"]
    for mine, other in zip(warm._variables(), cold._variables(), strict=True):
        np.testing.assert_array_equal(mine.numpy(), other.numpy())


@pytest.mark.usefixtures("_alone")
def test_statistics_are_averaged_before_looking(monkeypatch):
    worker = a_worker("dense")
    worker.answer({"do": "run"})

    def average(model):
        for variable in model.non_trainable_variables:
            variable.assign(np.full(variable.shape, 7.0))

    monkeypatch.setattr(tf_dgc, "average_statistics", average)
    found = []
    monkeypatch.setattr(snapshots, "evaluated", lambda _, taken: found.extend(taken))
    worker.answer({"do": "curve", "seconds": 1.0})
    assert [updates for _, updates, _ in found] == [0, 3, 6]
    statistics = [weights[4:6] for *_, weights in found]
    np.testing.assert_array_equal(statistics, np.full([3, 2, 32], 7.0))
