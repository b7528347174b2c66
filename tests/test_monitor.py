"""What was saved, in numbers."""

import dataclasses
import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import SHAPES, Trainer, initial_weights, make_gradients, record_collectives

import tf_dgc
from tf_dgc.choice import add_up
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.collectives import packs
from tf_dgc.compressors.common import capacity
from tf_dgc.metrics import counting
from tf_dgc.optimizers import hints
from tf_dgc.steps.plan import plan

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
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    monitor = tf_dgc.callbacks.CompressionMonitor()
    with pytest.warns(UserWarning, match="there is one worker.*--workers 2") as caught:
        history = model.fit(x, y, epochs=2, verbose=0, callbacks=[monitor, board])
    assert len([w for w in caught if "tf_dgc" in str(w.message)]) == 1
    history = history.history
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


# --- numbers beyond int32 -------------------------------------------------------------

HUGE = [Tensor("", (2**30,), tf.float32, False, "float32")] * 3


@pytest.mark.parametrize("shape", [[2**29], [2**15, None], [None]])
def test_bytes_of_large_vectors(shape):
    """Nothing of this size is made: it is known while tracing, or not at all."""

    @tf.function(input_signature=[tf.TensorSpec(shape)])
    def count(vector):
        found = packs.num_bytes(vector)
        assert isinstance(found, int) == (None not in shape)
        return tf.cast(found, tf.int64)

    graph = count.get_concrete_function().graph
    products = [op for op in graph.get_operations() if op.type in {"Mul", "Size"}]
    assert all(op.outputs[0].dtype == tf.int64 for op in products)
    assert products or tf.get_static_value(graph.outputs[0]) == 2**31


@pytest.mark.parametrize("sparsity", [0.0, 0.25])
@pytest.mark.parametrize("scheduled", [False, True])
def test_entries_of_a_large_model(sparsity, scheduled):
    given = tf.constant(sparsity, tf.float64) if scheduled else sparsity
    entries = plan(HUGE, given, num_workers=1).entries
    assert int(entries) == 3 * 2**30 * (1 - sparsity)


def test_counting_large_steps():
    counters = counting.make_counters()
    entries = add_up([2**31, tf.constant(5), tf.constant(2**31 - 1)])
    for _ in range(2):
        counting.count_step(counters, entries, 2**33, 2**34, tf.constant(0))
    stats = counting.read(counters)
    assert stats.entries_per_step == 2**32 + 4
    assert stats.entries == 2 * stats.entries_per_step
    assert stats.bytes == 2**34
    assert stats.dense_bytes == 2**35


def test_positions_of_free_places_fit_into_int32():
    assert capacity.num_words(2**30, 2**20, "float32") > 2**20
    with pytest.raises(ValueError, match="smaller capacity"):
        capacity.num_words(2**31 - 5, 5, "float32")


class Gan(keras.Model):
    """Two models with an optimizer each, and none in `optimizer`."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((40,)), keras.layers.Dense(40)])
        self.critic = keras.Sequential([keras.Input((40,)), keras.layers.Dense(60)])
        self.g_optimizer, self.c_optimizer = (
            tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.01), sparsity, name=name)
            for sparsity, name in ((0.99, "g"), (0.9, "c"))
        )
        self.compile(loss="mse")

    def call(self, inputs):
        return self.critic(self.generator(inputs))

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(self(data[0]))
        for part, optimizer in [
            (self.generator, self.g_optimizer),
            (self.critic, self.c_optimizer),
        ]:
            gradients = tape.gradient(loss, part.trainable_variables)
            optimizer.apply(gradients, part.trainable_variables)
        return {"loss": loss}


def test_two_optimizers(strategies):
    with strategies[2].scope():
        gan = Gan()
    both = {"generator": gan.g_optimizer, "critic": gan.c_optimizer}
    x, y = np.ones((8, 40), "float32"), np.ones((8, 60), "float32")
    monitors = map(
        tf_dgc.callbacks.CompressionMonitor, (gan.g_optimizer, both, both.values())
    )
    history = gan.fit(x, y, batch_size=8, verbose=0, callbacks=list(monitors)).history
    for prefixes, optimizer in (
        (["", "generator_", "g_"], gan.g_optimizer),
        (["critic_", "c_"], gan.c_optimizer),
    ):
        for prefix in prefixes:
            found = history[f"{prefix}bytes_per_step"]
            assert found == [optimizer.stats.bytes_per_step]
    assert history["g_compression_ratio"] > history["c_compression_ratio"]
    with pytest.raises(ValueError, match=r"pass `CompressionMonitor\(optimizer=...\)`"):
        gan.fit(x, y, verbose=0, callbacks=[tf_dgc.callbacks.CompressionMonitor()])


@pytest.mark.parametrize("make", [list, tuple])
def test_optimizers_of_one_name(make):
    two = make(tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1)) for _ in range(2))
    with pytest.raises(ValueError, match=r"of one name.*`name=`.*Received"):
        tf_dgc.callbacks.CompressionMonitor(optimizer=two)


WARMUP = tf_dgc.schedules.PiecewiseConstantSparsity([1], [0.0, 0.9])


def dgc(sparsity=0.999):
    return lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1), sparsity)


class Composed(tf_dgc.compressors.TopK):
    """Never goes dense, unlike the fused step of `TopK` itself."""


def top_k(sparsity):
    method = Composed(sparsity)
    return lambda: tf_dgc.CompressedOptimizer(keras.optimizers.SGD(0.1), method)


@pytest.mark.parametrize(
    ("units", "make_optimizer", "said"),
    [
        (4, dgc(), "all variables are exempt.*`min_compress_size=1024`.*`tf_dgc.prepa"),
        (40, top_k(0.01), "Send fewer entries, or train"),
        (40, dgc(), None),
        (40, dgc(WARMUP), None),  # a dense step is none that was chosen badly
        (4, dgc(0.0), None),
    ],
    ids=["exempt", "more", "less", "dense step", "dense"],
)
def test_hint_where_more_is_sent_than_without(strategies, units, make_optimizer, said):
    shapes = [(40, units)]
    weights = initial_weights("float32", shapes)
    trainer = Trainer(strategies[2], make_optimizer, weights)
    assert hints.hint(trainer.optimizer) is None
    (gradients,) = make_gradients(2, 1, "float32", shapes)
    trainer.step(gradients)
    found = hints.hint(trainer.optimizer)
    assert (found is None) == (said is None)
    assert not said or re.search(said, found)
