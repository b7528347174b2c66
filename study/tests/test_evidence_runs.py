"""A run of `study/evidence.py` in pieces ends as one that was not interrupted."""

import json
import os
import signal
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from registered import registry, single
from registered import rows as kept
from registered.specs import KEYS, Spec
from selection import rows as some_rows
from tasks import penn, recipe_task, recipes

STEPS = 12
RUN_ON = ["processor", "onednn"]


class Largest(recipe_task.Task):
    """Which of 16 numbers is the largest? With noise, and something to carry."""

    name, metric, higher_is_better = "largest", "accuracy", True
    num_examples = 1000

    @staticmethod
    def model():
        layers = keras.Input((16,)), keras.layers.Dense(64, "relu")
        normalized = keras.layers.BatchNormalization()
        return keras.Sequential([*layers, normalized, keras.layers.Dense(16)])

    def carry(self):
        return [np.zeros([8, 16], np.float32)]

    def batch(self, seed, step, worker, workers):
        events.pop(step, lambda: None)()
        chosen, _ = recipe_task.shuffled(seed, step, worker, workers, 8, 1000)
        return numbers(0)[chosen], numbers(0)[chosen].argmax(axis=-1)

    def outputs(self, model, inputs, carry, seed):
        carried = 0.9 * carry[0] + inputs
        noise = tf.random.stateless_normal(tf.shape(inputs), seed)
        return model(inputs + 0.1 * noise + 0.1 * carried, training=True), [carried]

    def evaluate(self, model):
        output = model(numbers(1))
        return float(np.mean(np.argmax(output, -1) == numbers(1).argmax(-1)))


def numbers(seed):
    return np.random.default_rng(seed).normal(size=(1000, 16)).astype(np.float32)


events = {}  # what happens before a step


@pytest.fixture(autouse=True)
def _largest(monkeypatch):
    events.clear()
    recipe = recipes.Recipe(batch_size=8, rate=0.5, warmup_epochs=0.1)
    monkeypatch.setitem(recipes.RECIPES, "largest", recipe)
    monkeypatch.setitem(registry.TASKS, "largest", Largest)


@pytest.fixture
def _eager():
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def run(work, strategy, method="dgc", settings=None, commit="abc", **options):
    workers = strategy.num_replicas_in_sync
    spec = Spec("largest", method, settings or {}, workers, 3, STEPS)
    return single.Run(spec, None, work, strategy, commit, **options)


def only_row(work):
    (row,) = kept.read(work / "runs")
    return row


def same_always(row):
    """Return what does not depend on the clock."""
    curve = [{**point, "seconds": None} for point in row["curve"]]
    return {**row, "curve": curve, "seconds": None, "started": None}


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


def in_pieces(tmp_path, strategy, method):
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    run(whole, strategy, method).finish()
    events.update({4: stop, 9: stop})
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            run(pieces, strategy, method).finish()
        assert end.value.code == single.INTERRUPTED
        assert len(list((pieces / "running").iterdir())) == 1
    run(pieces, strategy, method).finish()
    assert list((pieces / "running").iterdir()) == []
    expected, found = only_row(whole), only_row(pieces)
    assert list(found) == [*KEYS, *RUN_ON]
    assert found["processor"] and isinstance(found["onednn"], bool)
    assert same_always(found) == same_always(expected)
    assert [point["step"] for point in found["curve"]] == list(range(1, STEPS + 1))
    assert found["value"] == found["curve"][-1]["value"] > 1 / 16
    assert 0 < found["bytes_per_worker"] == found["curve"][-1]["bytes"]
    assert np.isfinite(found["curve"][-1]["loss"])


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("method", some_rows(["dgc", "dense"], ["dgc"]))
def test_a_run_in_pieces(tmp_path, strategies, method):
    in_pieces(tmp_path, strategies[2], method)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["dgc", "dense", "power_sgd", "adacomp", "qsgd"])
def test_a_run_in_pieces_traced(tmp_path, strategies, method):
    in_pieces(tmp_path, strategies[2], method)


@pytest.mark.usefixtures("_eager")
def test_what_is_saved_survives_the_next_save(tmp_path, strategies, monkeypatch):
    """A process may end anywhere, also while it saves."""
    half = run(tmp_path, strategies[2], save_every=0.0)
    events[5] = lambda: monkeypatch.setattr(os, "replace", fails)

    def fails(*paths):
        raise OSError("no power")

    with pytest.raises(OSError, match="no power"):
        half.finish()
    monkeypatch.undo()
    monkeypatch.setitem(recipes.RECIPES, "largest", half._task.recipe)
    monkeypatch.setitem(registry.TASKS, "largest", Largest)
    again = run(tmp_path, strategies[2])
    assert again.row()["curve"][-1]["step"] == 5


@pytest.mark.usefixtures("_eager")
def test_a_run_at_several_commits_says_so(tmp_path, strategies):
    """And goes on at another one only where that is asked for."""
    events[4] = stop
    with pytest.raises(SystemExit):
        run(tmp_path, strategies[2]).finish()
    with pytest.raises(ValueError, match=r"begun at, abc, unless.*commit='def'"):
        run(tmp_path, strategies[2], commit="def")
    forget_later_notes(tmp_path)
    events[9] = stop
    with pytest.raises(SystemExit):
        run(tmp_path, strategies[2], commit="def", other_commit=True).finish()
    with pytest.raises(ValueError, match="begun at, def"):
        run(tmp_path, strategies[2], commit="abc")
    run(tmp_path, strategies[2], commit="def").finish()
    row = only_row(tmp_path)
    assert list(row) == [*KEYS, *RUN_ON, "resumed_at"]
    assert row["commit"] == "abc"
    assert row["resumed_at"] == ["def"]


def forget_later_notes(work):
    """Write a saved run as it was before it kept all of its commits."""
    (file,) = (work / "running").iterdir()
    with np.load(file) as state:
        arrays = dict(state)
    notes = json.loads(str(arrays.pop("notes")))
    assert notes.pop("resumed_at") == []
    np.savez(file, notes=json.dumps(notes), **arrays)


@pytest.mark.usefixtures("_eager")
def test_a_loss_that_is_not_finite_is_a_row(tmp_path, strategies):
    settings = {"recipe": {"rate": float("1e30"), "clipnorm": None}}
    run(tmp_path, strategies[2], "dense", settings).finish()
    row = only_row(tmp_path)
    assert list(row) == [*KEYS, *RUN_ON, "error"]
    assert row["value"] is None
    assert row["error"] == "the loss is not finite"
    assert 1 <= row["curve"][-1]["step"] < STEPS


@pytest.mark.usefixtures("_eager")
def test_a_metric_that_is_not_finite_is_a_row(tmp_path, strategies, monkeypatch):
    """The loss of a step may be finite all the same."""
    found = iter([0.5] * (STEPS - 1) + [penn.perplexity(1000.0)])
    monkeypatch.setattr(Largest, "evaluate", lambda self, model: next(found))
    run(tmp_path, strategies[2], "dense").finish()
    row = only_row(tmp_path)
    assert list(row) == [*KEYS, *RUN_ON, "error"]
    assert row["value"] is row["curve"][-1]["value"] is None
    assert row["error"] == "the accuracy is not finite"
    assert np.isfinite(row["curve"][-1]["loss"])
    assert row["curve"][-2]["value"] == 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("_eager")
def test_a_pause(tmp_path, strategies):
    pause = tmp_path / "PAUSE"
    seen = []

    def later():
        time.sleep(1.5)
        seen.append((single_run.row()["curve"][-1]["step"], pause.exists()))
        pause.unlink()

    resumer = threading.Thread(target=later)

    def begin():
        pause.touch()
        resumer.start()

    events[3] = begin
    single_run = run(tmp_path, strategies[2])
    single_run.finish()
    resumer.join()
    assert seen == [(4, True)]  # the step in progress was finished, and no other begun
    assert only_row(tmp_path)["curve"][-1]["step"] == STEPS


def test_optimizers():
    """A run's settings reach the recipe, the method and the optimizer around it."""

    def made(method, settings):
        spec = Spec("largest", method, settings, 4, 0, 100)
        return registry.make_optimizer(spec, registry.make_task(spec, None))

    dense = made("dense", {"recipe": {"momentum": 0.5, "clipnorm": 2.0}})
    assert type(dense) is keras.optimizers.SGD
    assert (dense.momentum, dense.global_clipnorm) == (0.5, 2.0)
    dgc = made("dgc", {"method": {"factor_masking": False}})
    assert dgc.sparsity.warmup_steps == round(0.1 * 1000 / (4 * 8))
    assert not dgc.corrections.factor_masking
    assert made("dgc", {"method": {"warmup_epochs": 0}}).sparsity == 0.999
    settings = {"method": {"sparsity": 0.9}, "optimizer": {"momentum_correction": True}}
    other = made("global_top_k", settings)
    assert other.compressor.sparsity == 0.9
    assert other.corrections.momentum
