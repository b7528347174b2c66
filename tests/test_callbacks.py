"""`CompressionMonitor`: what it logs, of which optimizers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dgc


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


def falling_density():
    """Return an optimizer that sends ten times less in the second half of an epoch."""
    sparsity = tf_dgc.schedules.PiecewiseConstantSparsity([2], [0.9, 0.99])
    return tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1), sparsity)


@pytest.mark.parametrize("verbose", [1, 2])
def test_the_progress_line_shows_two_numbers(strategies, capsys, tmp_path, verbose):
    """The rest is for `History` and for callbacks further down the list."""
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(60)])
        model.compile(falling_density(), "mse")
    x, y = np.ones((32, 40), "float32"), np.ones((32, 60), "float32")
    sent = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: sent.append(
            model.optimizer.stats.bytes_per_step
        )
    )
    csv = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    monitors = [tf_dgc.callbacks.CompressionMonitor() for _ in range(2)]
    data = {"x": x, "y": y, "batch_size": 8, "epochs": 2, "verbose": verbose}
    history = model.fit(**data, callbacks=[*monitors, csv, count])
    lines = [part for part in capsys.readouterr().out.split("\n") if "_ratio" in part]
    assert len(lines) == 2
    for line, each in zip(lines, history.history["bytes_per_step"], strict=True):
        shown = line.split("\r")[-1].split(" - ")
        assert [each.split(":")[0] for each in shown if ":" in each] == [
            "loss",
            "compression_ratio",
            "bytes_per_step",
        ]
        assert f"bytes_per_step: {each:.4f}" in line
    means = [np.mean(sent[:4]), np.mean(sent[4:])]
    dense = model.optimizer.stats.dense_bytes_per_step
    assert sent[0] > 3 * sent[3]
    assert history.history["bytes_per_step"] == means
    # By bytes, not by steps.
    ratios = [dense / mean for mean in means]
    np.testing.assert_allclose(history.history["compression_ratio"], ratios)
    assert history.history["dense_bytes_per_step"] == [dense] * 2
    assert history.history["total_bytes"] == [sum(sent[:4]), sum(sent)]
    header = (tmp_path / "log.csv").read_text().splitlines()[0].split(",")
    assert set(header) > set(history.history)
    assert "on_epoch_end" not in vars(history)


def test_epoch_without_a_round():
    """Nothing is sent, so the epoch has no mean."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(tf_dgc.local_sgd(keras.optimizers.SGD(0.1), 3), "mse")
    x, y = np.ones((16, 4), "float32"), np.ones((16, 2), "float32")
    monitor = tf_dgc.callbacks.CompressionMonitor()
    fit = {"batch_size": 8, "epochs": 3, "verbose": 0, "callbacks": [monitor]}
    history = model.fit(x, y, **fit).history
    assert history["rounds"] == [0, 1, 2]
    np.testing.assert_array_equal(history["dense_bytes_per_step"], [np.nan, 40, 40])
    assert np.isnan(history["bytes_per_step"][0])
    assert np.isnan(history["compression_ratio"][0])


def test_monitor_without_fit():
    """A loop of one's own gets all logs, and means since the start."""
    optimizer = falling_density()
    variable = keras.Variable(np.ones((40, 60), "float32"))
    for _ in range(4):
        optimizer.apply([tf.ones((40, 60))], [variable])
    logs = {}
    monitor = tf_dgc.callbacks.CompressionMonitor(optimizer)
    monitor.set_model(keras.Sequential())
    with pytest.warns(UserWarning, match="there is one worker"):
        monitor.on_epoch_end(0, logs)
    assert logs["bytes_per_step"] == optimizer.stats.bytes / 4
    assert logs["compression_ratio"] == optimizer.stats.total_ratio
    assert logs["iterations"] == 4


def test_rounds_of_local_steps():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(tf_dgc.local_sgd(keras.optimizers.SGD(0.1), 3), "mse")
    x, y = np.ones((32, 4), "float32"), np.ones((32, 2), "float32")
    monitor = tf_dgc.callbacks.CompressionMonitor()
    fit = {"batch_size": 4, "epochs": 2, "verbose": 0, "callbacks": [monitor]}
    history = model.fit(x, y, **fit).history
    assert history["rounds"] == [2, 5]
    assert history["skipped_steps"] == [0, 0]
    assert history["dense_bytes_per_step"] == [40, 40]


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
