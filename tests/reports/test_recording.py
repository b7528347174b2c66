"""`CompressionMonitor(path=...)`: the records that it writes and continues."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc.reports import record, recorder

X, Y = np.ones((32, 40), "float32"), np.ones((32, 60), "float32")


def make_model(optimizer=None):
    layers = [keras.Input((40,)), keras.layers.Dense(60, name="dense")]
    model = keras.Sequential(layers, name="small")
    if optimizer is None:
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer = tf_dgc.DGCOptimizer(
            sgd,
            0.99,
            diagnostics=tf_dgc.Diagnostics(track_staleness=True, check_every=None),
        )
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fit(model, path, **settings):
    monitor = tf_dgc.callbacks.CompressionMonitor(path=path)
    return model.fit(X, Y, batch_size=16, verbose=0, callbacks=[monitor], **settings)


@pytest.fixture(autouse=True)
def _one_worker_on_purpose(strategies):
    with strategies[2].scope():
        yield


def test_record_of_a_run(tmp_path):
    path, model = tmp_path / "runs" / "run.json", make_model()
    fit(model, path, epochs=2, validation_data=(X, Y))
    run = record.read_record(path)
    assert (run.model, run.workers) == ("small", 2)
    assert run.versions["tf_dgc"] == tf_dgc.__version__
    assert run.methods[""]["name"] == "DGCOptimizer, top_k"
    assert run.methods[""]["collective"] == "ring"
    settings = run.methods[""]["settings"]
    assert settings["inner"]["config"]["learning_rate"] == pytest.approx(0.1)
    stats = model.optimizer.stats
    last = run.epochs[-1]
    assert [e.epoch for e in run.epochs] == [0, 1]
    assert [e.steps for e in run.epochs] == [2, 4]
    assert (last.sent_bytes, last.dense_bytes) == (stats.bytes, stats.dense_bytes)
    assert 0 < run.epochs[0].seconds < last.seconds
    assert last.logs.keys() >= {"loss", "val_mae", "staleness_mean", "total_bytes"}
    assert [v.name for v in run.variables] == [
        f"small/dense/{k}" for k in ("kernel", "bias")
    ]
    assert [v.layer for v in run.variables] == ["small/dense"] * 2
    assert [v.dense_bytes for v in run.variables] == [4 * 40 * 60, 4 * 60]
    header = 4 * 5
    sent = sum(v.sent_bytes for v in run.variables)
    assert sent + header == stats.bytes_per_step
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    "restored", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_record_is_continued(tmp_path, restored):
    path, weights = tmp_path / "run.json", tmp_path / "small.keras"
    model = make_model()
    fit(model, path, epochs=2)
    model.save(weights)
    before = record.read_record(path).epochs
    second = keras.models.load_model(weights) if restored else make_model()
    fit(second, path, epochs=4, initial_epoch=1)
    run = record.read_record(path)
    assert [e.epoch for e in run.epochs] == [0, 1, 2, 3]
    assert run.epochs[0] == before[0]
    assert [e.steps for e in run.epochs] == (
        [2, 6, 8, 10] if restored else [2, 4, 6, 8]
    )
    step_bytes = run.epochs[0].sent_bytes // 2
    for epoch in run.epochs:
        assert epoch.sent_bytes == step_bytes * epoch.steps
    seconds = [e.seconds for e in run.epochs]
    assert seconds == sorted(seconds)
    fit(make_model(), path, epochs=1)  # the first epoch starts a new record
    assert [e.steps for e in record.read_record(path).epochs] == [2]


def test_record_of_local_steps(tmp_path):
    path = tmp_path / "run.json"
    local = tf_dgc.local_sgd(keras.optimizers.SGD(0.1), 2)
    fit(make_model(local), path, epochs=1)
    run = record.read_record(path)
    assert run.methods[""]["name"] == "LocalOptimizer, none, every 2 steps"
    assert run.epochs[0].steps == 2
    assert [v.sent_bytes for v in run.variables] == [9600, 240]


@pytest.mark.parametrize(
    ("value", "recorded"),
    [
        (np.float32(0.5), 0.5),
        (np.asarray([1, 2]), [1, 2]),
        (tf.constant(0.5, tf.bfloat16), 0.5),
        (tf.Variable(3), 3),
        (tf.float32, "<dtype: 'float32'>"),
    ],
)
def test_settings_that_json_does_not_support(tmp_path, value, recorded):
    run = record.RunRecord("m", 1, {}, {"": {"settings": {"config": [value]}}}, [], [])
    record.write_record(run, tmp_path / "run.json")
    copy = record.read_record(tmp_path / "run.json")
    assert copy.methods[""]["settings"]["config"] == [recorded]


def test_optimizer_with_numpy_numbers(tmp_path):
    clipped = keras.optimizers.SGD(0.1, clipnorm=np.float32(1))
    model = make_model(tf_dgc.DGCOptimizer(clipped))
    fit(model, tmp_path / "run.json", epochs=1)
    settings = record.read_record(tmp_path / "run.json").methods[""]["settings"]
    assert settings["inner"]["config"]["clipnorm"] == 1


def test_failed_write_keeps_the_last_record(tmp_path, monkeypatch):
    path, model = tmp_path / "run.json", make_model()
    fit(model, path, epochs=1)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.warns(UserWarning, match="no record was written: no space left"):
        fit(model, path, epochs=3, initial_epoch=1)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("path", ["", 3, True, ["run.json"]])
def test_wrong_path_raises(path):
    with pytest.raises(ValueError, match=r"`path` must be .*Received: path="):
        tf_dgc.callbacks.CompressionMonitor(path=path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": 2}',
        '{"format": 1, "variables": [], "epochs": []}',
        json.dumps(
            {
                "format": 1,
                "model": "m",
                "workers": 1,
                "versions": {},
                "methods": {},
                "variables": [],
                "epochs": [{"epoch": 0, "logs": {"loss": "<b>"}}],
            }
        ),
    ],
)
def test_malformed_record_raises(tmp_path, text):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"A record must be a .*Received: '.*json'"):
        record.read_record(path)


SLOW = ("qsgd", "float16", "none", "power_sgd", "count_sketch")
METHODS = [
    "top_k",
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    tf_dgc.compressors.GlobalTopK(tf_dgc.schedules.WarmupSparsity(10)),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: getattr(m, "name", m))
def test_sizes_add_up(method):
    """Bytes of all variables and headers add up to the bytes of a step."""
    sgd = keras.optimizers.SGD(0.1)
    optimizer = tf_dgc.CompressedOptimizer(
        sgd, method, diagnostics=tf_dgc.Diagnostics(check_every=None)
    )
    assert recorder.sizes_per_variable(optimizer) == []
    model = make_model(optimizer)
    model.fit(X, Y, batch_size=32, verbose=0)
    sizes = recorder.sizes_per_variable(optimizer)
    stats = optimizer.stats
    assert sum(s.dense_bytes for s in sizes) == stats.dense_bytes_per_step
    if isinstance(method, str):
        overhead = stats.bytes_per_step - sum(s.sent_bytes for s in sizes)
        assert 0 <= overhead <= 64
    else:
        assert [s.sent_bytes for s in sizes] == [None, 240]
