"""Runs of `study/evidence.py`: interruption, resumption and errors."""

import json
import os
import signal
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from registered import registry, rows
from registered.run import Run
from registered.specs import INTERRUPTED, KEYS, Spec
from selection import rows as selected_rows
from tasks import penn, recipe_task, recipes

STEPS = 12
MACHINE_KEYS = ["processor", "onednn"]


class Largest(recipe_task.Task):
    """Which of 16 numbers is the largest? With noise and carried state."""

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
        actions.pop(step, lambda: None)()
        indices, _ = recipe_task.shuffled(seed, step, worker, workers, 8, 1000)
        return numbers(0)[indices], numbers(0)[indices].argmax(axis=-1)

    def outputs(self, model, inputs, carry, seed):
        carried = 0.9 * carry[0] + inputs
        noise = tf.random.stateless_normal(tf.shape(inputs), seed)
        return model(inputs + 0.1 * noise + 0.1 * carried, training=True), [carried]

    def evaluate(self, model):
        output = model(numbers(1))
        return float(np.mean(np.argmax(output, -1) == numbers(1).argmax(-1)))


def numbers(seed):
    return np.random.default_rng(seed).normal(size=(1000, 16)).astype(np.float32)


actions = {}  # functions to call before a step


@pytest.fixture(autouse=True)
def _largest(monkeypatch):
    actions.clear()
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
    return Run(spec, None, work, strategy, commit, **options)


def only_row(work):
    (row,) = rows.read(work / "runs")
    return row


def without_times(row):
    """Return a row without what depends on the clock."""
    curve = [{**point, "seconds": None} for point in row["curve"]]
    return {**row, "curve": curve, "seconds": None, "started": None}


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


def check_interrupted_run(tmp_path, strategy, method):
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    run(whole, strategy, method).finish()
    actions.update({4: stop, 9: stop})
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            run(pieces, strategy, method).finish()
        assert end.value.code == INTERRUPTED
        assert len(list((pieces / "running").iterdir())) == 1
    run(pieces, strategy, method).finish()
    assert list((pieces / "running").iterdir()) == []
    expected, row = only_row(whole), only_row(pieces)
    assert list(row) == [*KEYS, *MACHINE_KEYS]
    assert row["processor"] and isinstance(row["onednn"], bool)
    assert without_times(row) == without_times(expected)
    assert [point["step"] for point in row["curve"]] == list(range(1, STEPS + 1))
    assert row["value"] == row["curve"][-1]["value"] > 1 / 16
    assert 0 < row["bytes_per_worker"] == row["curve"][-1]["bytes"]
    assert np.isfinite(row["curve"][-1]["loss"])


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("method", selected_rows(["dgc", "dense"], ["dgc"]))
def test_interrupted_run_equals_a_whole_one(tmp_path, strategies, method):
    check_interrupted_run(tmp_path, strategies[2], method)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["dgc", "dense", "power_sgd", "adacomp", "qsgd"])
def test_interrupted_traced_run_equals_a_whole_one(tmp_path, strategies, method):
    check_interrupted_run(tmp_path, strategies[2], method)


@pytest.mark.usefixtures("_eager")
def test_checkpoint_survives_a_failed_save(tmp_path, strategies, monkeypatch):
    """A process may end at any time, also while it saves."""
    failing = run(tmp_path, strategies[2], save_every=0.0)
    actions[5] = lambda: monkeypatch.setattr(os, "replace", raise_error)

    def raise_error(*paths):
        raise OSError("no power")

    with pytest.raises(OSError, match="no power"):
        failing.finish()
    monkeypatch.undo()
    monkeypatch.setitem(recipes.RECIPES, "largest", failing._task.recipe)
    monkeypatch.setitem(registry.TASKS, "largest", Largest)
    resumed = run(tmp_path, strategies[2])
    assert resumed.row()["curve"][-1]["step"] == 5


@pytest.mark.usefixtures("_eager")
def test_resuming_at_another_commit_is_recorded(tmp_path, strategies):
    """Without `other_commit` it raises."""
    actions[4] = stop
    with pytest.raises(SystemExit):
        run(tmp_path, strategies[2]).finish()
    with pytest.raises(ValueError, match=r"begun at, abc, unless.*commit='def'"):
        run(tmp_path, strategies[2], commit="def")
    remove_resumed_at(tmp_path)
    actions[9] = stop
    with pytest.raises(SystemExit):
        run(tmp_path, strategies[2], commit="def", other_commit=True).finish()
    with pytest.raises(ValueError, match="begun at, def"):
        run(tmp_path, strategies[2], commit="abc")
    run(tmp_path, strategies[2], commit="def").finish()
    row = only_row(tmp_path)
    assert list(row) == [*KEYS, *MACHINE_KEYS, "resumed_at"]
    assert row["commit"] == "abc"
    assert row["resumed_at"] == ["def"]


def remove_resumed_at(work):
    """Convert a checkpoint to the first format, which had one commit only."""
    (checkpoint,) = (work / "running").iterdir()
    with np.load(checkpoint) as state:
        arrays = dict(state)
    notes = json.loads(str(arrays.pop("notes")))
    assert notes.pop("resumed_at") == []
    np.savez(checkpoint, notes=json.dumps(notes), **arrays)


@pytest.mark.usefixtures("_eager")
def test_infinite_loss_ends_the_run_with_an_error(tmp_path, strategies):
    settings = {"recipe": {"rate": float("1e30"), "clipnorm": None}}
    run(tmp_path, strategies[2], "dense", settings).finish()
    row = only_row(tmp_path)
    assert list(row) == [*KEYS, *MACHINE_KEYS, "error"]
    assert row["value"] is None
    assert row["error"] == "the loss is not finite"
    assert 1 <= row["curve"][-1]["step"] < STEPS


@pytest.mark.usefixtures("_eager")
def test_infinite_metric_is_recorded_as_an_error(tmp_path, strategies, monkeypatch):
    """The loss may be finite at the same time."""
    values = iter([0.5] * (STEPS - 1) + [penn.perplexity(1000.0)])
    monkeypatch.setattr(Largest, "evaluate", lambda self, model: next(values))
    run(tmp_path, strategies[2], "dense").finish()
    row = only_row(tmp_path)
    assert list(row) == [*KEYS, *MACHINE_KEYS, "error"]
    assert row["value"] is row["curve"][-1]["value"] is None
    assert row["error"] == "the accuracy is not finite"
    assert np.isfinite(row["curve"][-1]["loss"])
    assert row["curve"][-2]["value"] == 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("_eager")
def test_pause_waits_between_steps(tmp_path, strategies):
    pause = tmp_path / "PAUSE"
    steps = []

    def end_pause():
        time.sleep(1.5)
        steps.append((single_run.row()["curve"][-1]["step"], pause.exists()))
        pause.unlink()

    resumer = threading.Thread(target=end_pause)

    def begin_pause():
        pause.touch()
        resumer.start()

    actions[3] = begin_pause
    single_run = run(tmp_path, strategies[2])
    single_run.finish()
    resumer.join()
    assert steps == [(4, True)]  # the step in progress ended, and no other began
    assert only_row(tmp_path)["curve"][-1]["step"] == STEPS


def test_settings_reach_recipe_method_and_optimizer():
    def create_optimizer(method, settings):
        spec = Spec("largest", method, settings, 4, 0, 100)
        return registry.make_optimizer(spec, registry.make_task(spec, None))

    dense = create_optimizer("dense", {"recipe": {"momentum": 0.5, "clipnorm": 2.0}})
    assert type(dense) is keras.optimizers.SGD
    assert (dense.momentum, dense.global_clipnorm) == (0.5, 2.0)
    dgc = create_optimizer("dgc", {"method": {"factor_masking": False}})
    assert dgc.sparsity.warmup_steps == round(0.1 * 1000 / (4 * 8))
    assert not dgc.corrections.factor_masking
    without_warmup = create_optimizer("dgc", {"method": {"warmup_epochs": 0}})
    assert without_warmup.sparsity == 0.999
    settings = {"method": {"sparsity": 0.9}, "optimizer": {"momentum_correction": True}}
    global_top_k = create_optimizer("global_top_k", settings)
    assert global_top_k.compressor.sparsity == 0.9
    assert global_top_k.corrections.momentum
