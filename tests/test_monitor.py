"""What was saved, in numbers."""

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf
from harness import SHAPES, Trainer, initial_weights, make_gradients, record_collectives

import tf_dgc

SIZES = [math.prod(s) for s in SHAPES]
DENSE_BYTES = 4 * sum(SIZES)


def make_trainer(strategy, sparsity):
    return Trainer(
        strategy,
        lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), sparsity),
        initial_weights("float32"),
    )


def test_counts_what_is_handed_to_the_collective(strategies, monkeypatch):
    """The bytes counted are those of the tensors that the collectives get."""
    handed_over = record_collectives(monkeypatch)
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([2, 4], [0.0, 0.9, 0.99])
    trainer = make_trainer(strategies[2], schedule)
    assert trainer.optimizer.stats.steps == 0
    total, per_step = 0, []
    for gradients in make_gradients(2, 6, "float32"):
        handed_over.clear()
        trainer.step(gradients)
        stats = trainer.optimizer.stats
        assert handed_over == [stats.bytes_per_step] * 2  # both workers
        total += stats.bytes_per_step
        per_step.append(stats.bytes_per_step)
    assert per_step[0] == per_step[1] == DENSE_BYTES + 4
    assert per_step[1] > per_step[2] > per_step[4]
    assert stats.steps == 6
    assert stats.bytes == total
    assert stats.dense_bytes_per_step == DENSE_BYTES
    assert stats.dense_bytes == 6 * DENSE_BYTES
    assert stats.ratio == DENSE_BYTES / per_step[-1]
    assert stats.total_ratio == 6 * DENSE_BYTES / total


def test_entries(strategies):
    trainer = make_trainer(strategies[2], 0.99)
    for gradients in make_gradients(2, 3, "float32"):
        trainer.step(gradients)
    expected = 20 + 50 + 15 + 21  # 1 % of the large ones, all of the exempt ones
    stats = trainer.optimizer.stats
    assert stats.entries_per_step == expected
    assert stats.entries == 3 * expected


def test_stats_before_the_first_step():
    stats = tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1)).stats
    assert set(dataclasses.asdict(stats).values()) == {0}
    assert math.isnan(stats.ratio)


def test_callback_writes_logs_and_tensorboard(tmp_path):
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(60)])
    model.compile(tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1), 0.99), "mse")
    x, y = np.ones((32, 40), "float32"), np.ones((32, 60), "float32")
    history = model.fit(
        x,
        y,
        epochs=2,
        verbose=0,
        callbacks=[
            tf_dgc.callbacks.CompressionMonitor(),
            keras.callbacks.TensorBoard(tmp_path, write_graph=False),
        ],
    ).history
    stats = model.optimizer.stats
    assert history["bytes_per_step"] == [stats.bytes_per_step] * 2
    assert history["compression_ratio"][-1] == stats.ratio
    written = {
        value.tag: float(tf.make_ndarray(value.tensor))
        for file in (tmp_path / "train").iterdir()
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
        if value.tag.startswith("epoch_")
    }
    assert written["epoch_bytes_per_step"] == stats.bytes_per_step
    assert written["epoch_entries_per_step"] == stats.entries_per_step
