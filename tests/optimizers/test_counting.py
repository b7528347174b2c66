"""Counters of sent bytes and entries."""

import dataclasses
import math

import keras
import pytest
import tensorflow as tf
from harness import SHAPES, Trainer, initial_weights, make_gradients, record_collectives

import tf_dgc
from tf_dgc import metrics
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.conditions import add_counts
from tf_dgc.schedules import ScheduledSparsity
from tf_dgc.steps.base import plan_step

SIZES = [math.prod(s) for s in SHAPES]
DENSE_BYTES = 4 * sum(SIZES)


def make_trainer(strategy, sparsity):
    return Trainer(
        strategy,
        lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), sparsity),
        initial_weights("float32"),
    )


def test_counted_bytes_are_those_of_the_collectives(strategies, monkeypatch):
    sent_bytes = record_collectives(monkeypatch)
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([2, 4], [0.0, 0.9, 0.99])
    trainer = make_trainer(strategies[2], schedule)
    assert trainer.optimizer.stats.steps == 0
    total, per_step = 0, []
    for gradients in make_gradients(2, 6, "float32"):
        sent_bytes.clear()
        trainer.step(gradients)
        stats = trainer.optimizer.stats
        assert sent_bytes == [stats.bytes_per_step] * 2  # both workers
        total += stats.bytes_per_step
        per_step.append(stats.bytes_per_step)
    assert per_step[1] == DENSE_BYTES + 4
    assert per_step[0] == per_step[1] + 4 * 4 * 2 * 4  # float32s: 4 per tensor, worker
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
    expected = 20 + 50 + 15 + 21  # 1 % of the large ones, all of the uncompressed ones
    stats = trainer.optimizer.stats
    assert stats.entries_per_step == expected
    assert stats.entries == 3 * expected


def test_stats_before_the_first_step():
    stats = tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1)).stats
    assert set(dataclasses.astuple(stats)[:-1]) == {0}
    assert stats.collective == "ring"
    assert math.isnan(stats.ratio)


# --- numbers beyond int32 -------------------------------------------------------------

HUGE = [TensorSpec("", (2**30,), tf.float32, False, "float32")] * 3


@pytest.mark.parametrize("sparsity", [0.0, 0.25])
@pytest.mark.parametrize("scheduled", [False, True])
def test_entries_of_a_large_model(sparsity, scheduled):
    argument = sparsity
    if scheduled:
        argument = ScheduledSparsity(tf.constant(sparsity, tf.float64), minimum=0.0)
    entries = plan_step(HUGE, argument, num_workers=1).entries
    assert int(entries) == 3 * 2**30 * (1 - sparsity)


def test_counting_large_steps():
    counters = metrics.create_counters()
    entries = add_counts([2**31, tf.constant(5), tf.constant(2**31 - 1)])
    for _ in range(2):
        metrics.count_step(counters, entries, 2**33, 2**34, tf.constant(0))
    stats = metrics.read_stats(counters, "ring")
    assert stats.entries_per_step == 2**32 + 4
    assert stats.entries == 2 * stats.entries_per_step
    assert stats.bytes == 2**34
    assert stats.dense_bytes == 2**35
