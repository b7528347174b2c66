"""Stock `fit` with a server: mixed precision, callbacks and checkpoints."""

import keras
import numpy as np
import pytest
from selection import slow
from serving import ServerGroup

import tf_dgc
from tf_dgc.reports import record


@pytest.fixture
def mixed_precision():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.slow
def test_monitor_logs_and_records_pushes(monkeypatch, tmp_path):
    x = np.ones((8, 40), "float32")
    path = tmp_path / "run.json"
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(30)])
    with ServerGroup(1) as served:
        sgd = keras.optimizers.SGD(0.05)
        optimizer = served.optimizer(monkeypatch, 0, sgd)
        model.compile(optimizer, "mse")
        monitor = tf_dgc.callbacks.CompressionMonitor(path=path)
        logs = model.fit(
            x, np.ones((8, 30)), 4, epochs=2, verbose=0, callbacks=[monitor]
        ).history
        stats, bytes_per_pull = optimizer.stats, optimizer.bytes_per_pull
        optimizer.leave()
    assert logs["total_bytes"][-1] == stats.bytes > 0
    assert logs["iterations"] == [2, 4]
    assert logs["bytes_per_pull"][-1] == bytes_per_pull
    run_record = record.read_record(path)
    assert [epoch.sent_bytes for epoch in run_record.epochs] == logs["total_bytes"]
    assert run_record.methods[""]["collective"] == "server"


@pytest.mark.slow
@pytest.mark.parametrize("pull", [slow("whole"), "sparse"])
def test_mixed_precision_and_checkpoints(monkeypatch, tmp_path, mixed_precision, pull):
    """Overflowing gradients update nothing; checkpoints hold the model's weights."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 40)).astype("float32")
    y = x.mean(axis=1, keepdims=True)
    best_path, weights_path = tmp_path / "best.keras", tmp_path / "whole.weights.h5"
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((40,)), *layers])
    callbacks = [
        keras.callbacks.ModelCheckpoint(best_path, save_best_only=True),
        keras.callbacks.ModelCheckpoint(weights_path, save_weights_only=True),
    ]
    with ServerGroup(1) as served:
        sgd = keras.optimizers.SGD(0.05, momentum=0.9)
        method = tf_dgc.compressors.TopK(0.9)
        settings = {"compressor": method, "pull": pull}
        optimizer = served.optimizer(monkeypatch, 0, sgd, **settings)
        # The first steps overflow float16 and halve the scale.
        scaled = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**22)
        model.compile(scaled, "mse")
        history = model.fit(
            x, y, 16, epochs=8, validation_data=(x, y), verbose=0, callbacks=callbacks
        ).history
        optimizer.leave()
        variables = {v.path: v.numpy() for v in served.model.variables}
    assert history["val_loss"][-1] < 0.5 * history["val_loss"][0]
    assert float(scaled.dynamic_scale) < 2.0**22
    for actual in model.trainable_variables:
        (expected,) = (v for path, v in variables.items() if v.shape == actual.shape)
        np.testing.assert_array_equal(actual.numpy(), expected)
    outputs = model.predict(x, verbose=0)
    model.load_weights(weights_path)
    np.testing.assert_array_equal(model.predict(x, verbose=0), outputs)
    best_model = keras.saving.load_model(best_path, compile=False)
    loss = np.mean((best_model.predict(x, verbose=0).astype("float64") - y) ** 2)
    assert loss == pytest.approx(min(history["val_loss"]), rel=0.02)


@pytest.mark.slow
def test_each_worker_resumes_from_its_own_backup(monkeypatch, tmp_path):
    """All workers are given the same directory, as in scripts that all run alike."""
    x = np.ones((8, 4), "float32")
    with ServerGroup(3) as served:  # the third never leaves, so that the server stays
        for worker, epochs, trained_epochs in [
            (0, 2, [0, 1]),
            (1, 1, [0]),
            (0, 3, [2]),
        ]:
            sgd = keras.optimizers.SGD(0.05, momentum=0.9)
            optimizer = served.optimizer(monkeypatch, worker, sgd, "async")
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(optimizer, "mse")
            backup = tf_dgc.callbacks.BackupAndRestore(
                tmp_path / "backup", delete_checkpoint=epochs == 3
            )
            history = model.fit(
                x, x[:, :1], epochs=epochs, verbose=0, callbacks=[backup]
            )
            assert history.epoch == trained_epochs
            optimizer.leave()
    assert [path.name for path in (tmp_path / "backup").iterdir()] == ["worker-1"]
