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
