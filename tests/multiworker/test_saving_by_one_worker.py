"""Saving or reading on one worker alone ends in an error, for each API.

The other workers are simulated by a barrier that times out.
tests/end_to_end/test_multiworker.py has real ones.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer

import tf_dgc
from tf_dgc.multiworker import consensus, coordination, saving


@pytest.fixture
def model(strategies, tmp_path, monkeypatch):
    """Return a model with saved files, on a worker whose peer never responds."""
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(60)])
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer = tf_dgc.DGCOptimizer(
            inner, 0.9, diagnostics=tf_dgc.Diagnostics(track_staleness=True)
        )
        model.compile(optimizer, "mse", run_eagerly=not Trainer.always_traced)
        model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    checkpoint_of(model).write(str(tmp_path / "checkpoint"))

    def time_out(name, seconds):
        raise tf.errors.DeadlineExceededError(None, None, "nobody came")

    hosts = tf.train.ClusterSpec({"worker": ["here:1", "there:2"]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        hosts, task_type="worker", task_id=0
    )
    monkeypatch.setattr(type(strategies[2]), "cluster_resolver", resolver)
    monkeypatch.setattr(consensus, "is_multi_worker", lambda strategy: True)
    monkeypatch.setattr(coordination, "publish", lambda key, value, seconds: None)
    monkeypatch.setattr(coordination, "lookup", time_out)
    monkeypatch.setattr(coordination, "report_error", lambda message, seconds: None)
    monkeypatch.setattr(coordination, "wait_at_barrier", time_out)
    return model


def checkpoint_of(model):
    return tf.train.Checkpoint(optimizer=model.optimizer)


def fit(model, callback):
    x = np.zeros((8, 20), "float32")
    model.fit(x, np.zeros((8, 60)), batch_size=8, verbose=0, callbacks=[callback])


def load_model(model, path):
    with model.distribute_strategy.scope():
        keras.models.load_model(path / "model.keras")


ACTIONS = {
    "model.save": lambda m, p: m.save(p / "new.keras"),
    "model.save_weights": lambda m, p: m.save_weights(p / "new.weights.h5"),
    "saving.save_model": lambda m, p: saving.save_model(m, p / "new.keras"),
    "saving.save_weights": lambda m, p: saving.save_weights(m, p / "new.weights.h5"),
    "ModelCheckpoint": lambda m, p: fit(
        m, keras.callbacks.ModelCheckpoint(p / "new.keras")
    ),
    "BackupAndRestore": lambda m, p: fit(m, keras.callbacks.BackupAndRestore(p / "b")),
    "our ModelCheckpoint": lambda m, p: fit(
        m, tf_dgc.callbacks.ModelCheckpoint(p / "new.keras")
    ),
    "our BackupAndRestore": lambda m, p: fit(
        m, tf_dgc.callbacks.BackupAndRestore(p / "b")
    ),
    "Checkpoint.write": lambda m, p: checkpoint_of(m).write(str(p / "new")),
    "Checkpoint.read": lambda m, p: checkpoint_of(m).read(str(p / "checkpoint")),
    "model.load_weights": lambda m, p: m.load_weights(p / "model.weights.h5"),
    "load_model": load_model,
    "numpy": lambda m, p: m.optimizer.residual[0].numpy(),
    "np.asarray": lambda m, p: np.asarray(m.optimizer.velocity[0]),
    "ops.convert_to_numpy": lambda m, p: keras.ops.convert_to_numpy(
        m.optimizer.residual[0]
    ),
    "tf.convert_to_tensor": lambda m, p: tf.convert_to_tensor(m.optimizer.residual[0]),
    "arithmetic": lambda m, p: m.optimizer.residual[0] + 1,
    "value": lambda m, p: m.optimizer.residual[0].value.numpy(),
    "gather": lambda m, p: m.optimizer.residual[0].gather(),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.filterwarnings("ignore:.*waited:UserWarning")
def test_one_worker_alone_raises(model, tmp_path, action):
    with pytest.raises((RuntimeError, ValueError), match="not on the chief alone"):
        ACTIONS[action](model, tmp_path)


def test_local_values_need_no_other_worker(model):
    """Values of this worker, and values that are equal on all workers."""
    fit(model, tf_dgc.callbacks.CompressionMonitor())
    assert model.optimizer.staleness.max == 0
    assert model.optimizer.stats.steps == 1
    assert model.optimizer.iterations.numpy() == 1
    assert "residual" in repr(model.optimizer.residual[0])
    for variable in model.variables + model.optimizer.inner_optimizer.variables:
        assert np.all(np.isfinite(variable.numpy()))
