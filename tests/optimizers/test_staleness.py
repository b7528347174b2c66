"""Staleness compared with a count in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import SHAPES, Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc.steps import native

SGD = keras.optimizers.SGD
WARMUP = tf_dgc.schedules.PiecewiseConstantSparsity([3, 5], [0.9, 0.0, 0.97])
COMPRESSED = [i for i, s in enumerate(SHAPES) if np.prod(s) >= 1024]
STEPS = 9


def dgc(sparsity, **settings):
    return tf_dgc.DGCOptimizer(
        SGD(0.1, momentum=0.9),
        sparsity,
        diagnostics=tf_dgc.Diagnostics(track_staleness=True),
        **settings,
    )


class ReferenceCount:
    """Counts steps since entries were last sent, from residuals and velocities.

    With factor masking, the velocity of a sent entry is 0; after a dense step, the
    whole residual is 0.
    """

    def __init__(self, num_workers):
        self.ages = [
            [np.zeros(SHAPES[i]) for i in COMPRESSED] for _ in range(num_workers)
        ]

    def step(self, trainer):
        optimizer = trainer.optimizer
        velocity = trainer.local(optimizer.velocity)
        residual = trainer.local(optimizer.residual)
        stale_ages = []
        for worker, ages in enumerate(self.ages):
            for j, i in enumerate(COMPRESSED):
                sent = velocity[worker][i] == 0
                if not residual[worker][i].any():
                    sent[...] = True
                ages[j] = np.where(sent, 0, ages[j] + 1)
                stale_ages.append(
                    np.where(residual[worker][i] != 0, ages[j], 0).ravel()
                )
        return np.concatenate(stale_ages)


@pytest.mark.parametrize(("path", "num_workers"), [("native", 2), ("tensorflow", 1)])
@pytest.mark.parametrize(
    ("sparsity", "settings"),
    [(0.97, {}), (0.97, {"value_dtype": "bfloat16"}), (WARMUP, {})],
    ids=["lossless", "bfloat16", "schedule"],
)
def test_staleness_equals_the_count(
    strategies, monkeypatch, path, num_workers, sparsity, settings
):
    if path == "tensorflow":
        monkeypatch.setattr(native, "is_available", lambda variables: False)
    trainer = Trainer(
        strategies[num_workers],
        lambda: dgc(
            sparsity, corrections=tf_dgc.Corrections(factor_masking=True), **settings
        ),
        initial_weights("float32"),
    )
    count = ReferenceCount(num_workers)
    for gradients in make_gradients(num_workers, STEPS, "float32"):
        trainer.step(gradients)
        expected = count.step(trainer)
        staleness = trainer.optimizer.staleness
        assert staleness.max == expected.max()
        assert staleness.mean == pytest.approx(expected.mean())
        assert staleness.p99 == pytest.approx(np.percentile(expected, 99))
    assert staleness.max > 1


def test_any_method(strategies):
    """Also for methods without positions, by the sent value of each entry."""
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.CompressedOptimizer(
            SGD(0.1),
            tf_dgc.compressors.TopK(0.9),
            diagnostics=tf_dgc.Diagnostics(track_staleness=True),
        ),
        initial_weights("float32"),
    )
    ages = None
    for gradients in make_gradients(2, 4, "float32"):
        trainer.step(gradients)
        residuals = [
            w[i].ravel()
            for w in trainer.local(trainer.optimizer.residual)
            for i in COMPRESSED
        ]
        is_delayed = np.concatenate(residuals) != 0
        ages = np.where(is_delayed, (0 if ages is None else ages) + 1, 0)
        assert trainer.optimizer.staleness.mean == pytest.approx(ages.mean())
        assert trainer.optimizer.staleness.max == ages.max()


def test_zero_residuals_are_not_stale(strategies):
    trainer = Trainer(strategies[1], lambda: dgc(0.97), initial_weights("float32"))
    zeros = [[np.zeros(s, "float32") for s in SHAPES]]
    for _ in range(3):
        trainer.step(zeros)
    assert trainer.optimizer.staleness.max == 0


def test_is_not_tracked_by_default_and_never_saved(tmp_path):
    weights = [keras.Variable(w) for w in initial_weights("float32")]
    plain = tf_dgc.DGCOptimizer(SGD(0.1, momentum=0.9), 0.99)
    tracking = dgc(0.99)
    saved = []
    for i, optimizer in enumerate((plain, tracking)):
        optimizer.build(weights)
        path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / f"{i}"))
        saved.append(tf.train.list_variables(path))
    assert saved[0] == saved[1]
    assert len(plain.variables) == len(tracking.variables)
    assert plain.staleness is None
    assert tracking.staleness.max == 0
    again = tf_dgc.DGCOptimizer.from_config(tracking.get_config())
    assert again.diagnostics.track_staleness
    assert not plain.diagnostics.track_staleness


@pytest.mark.filterwarnings("ignore:XLA compiles this step")
@pytest.mark.filterwarnings("ignore:tf_dgc. there is one worker")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="graph"),
        pytest.param({"run_eagerly": True}, id="eager", marks=pytest.mark.slow),
        pytest.param({"jit_compile": True}, id="xla", marks=pytest.mark.slow),
    ],
)
def test_monitor_logs_it(settings):
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(60)])
    model.compile(dgc(0.99), "mse", **settings)
    x = np.random.default_rng(0).normal(size=(32, 40)).astype("float32")
    history = model.fit(
        x,
        np.ones((32, 60), "float32"),
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[tf_dgc.callbacks.CompressionMonitor()],
    ).history
    staleness = model.optimizer.staleness
    assert history["staleness_mean"][-1] == staleness.mean > 0
    assert history["staleness_p99"][-1] == staleness.p99
    assert history["staleness_max"][-1] == staleness.max == 8
