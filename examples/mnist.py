"""Dense and compressed training of a small convolutional network on MNIST.

    tf-dgc run --workers 4 examples/mnist.py --data_dir ~/tensorflow_datasets

Reads MNIST with TensorFlow Datasets.
"""

import keras
import reporting
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import app, flags

import tf_dgc

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_DOWNLOAD = flags.DEFINE_bool("download", False, "Download MNIST to data_dir first.")
_EPOCHS = flags.DEFINE_integer("epochs", 5, "Passes over the training set.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Examples per step, all workers.")
_SPARSITY = flags.DEFINE_float("sparsity", 0.999, "Share of entries not sent.")
_WARMUP_EPOCHS = flags.DEFINE_float("warmup_epochs", 1.0, "Epochs of lower sparsity.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.05, "For both methods.")
_METHODS = flags.DEFINE_list("methods", ["dense", "dgc"], "Which methods to run.")
_TRAIN_EXAMPLES = 60_000


def load(split):
    try:
        dataset = tfds.load(
            "mnist",
            split=split,
            data_dir=_DATA_DIR.value,
            as_supervised=True,
            download=_DOWNLOAD.value,
        )
    except Exception as error:
        raise app.UsageError(
            f"MNIST is not in --data_dir={_DATA_DIR.value}. With a network, run once "
            "`python examples/mnist.py --download` (it downloads 12 MB); without one, "
            "copy a prepared `mnist/3.0.1` folder there from another machine. "
            f"TensorFlow Datasets says: {error}"
        ) from error
    # MNIST is one file: shard by example, not by file.
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return dataset.with_options(options)


def prepare(image, label):
    return tf.cast(image, tf.float32) / 255.0, label


def build_model():
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 5, strides=2, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def make_optimizer(method, steps_per_epoch):
    schedule = keras.optimizers.schedules.CosineDecay(
        _LEARNING_RATE.value, _EPOCHS.value * steps_per_epoch
    )
    sgd = keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True)
    if method == "dense":
        return sgd
    warmup_steps = int(_WARMUP_EPOCHS.value * steps_per_epoch)
    sparsity = _SPARSITY.value
    if warmup_steps:
        sparsity = tf_dgc.schedules.WarmupSparsity(warmup_steps, sparsity)
    return tf_dgc.DGCOptimizer(sgd, sparsity)


def train(method, strategy):
    steps_per_epoch = _TRAIN_EXAMPLES // _BATCH_SIZE.value
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=make_optimizer(method, steps_per_epoch),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    examples = load("train").map(prepare).cache()
    examples = examples.shuffle(_TRAIN_EXAMPLES, seed=0).repeat()
    timer = reporting.StepTimer(int(_WARMUP_EPOCHS.value * steps_per_epoch))
    monitor = [tf_dgc.callbacks.CompressionMonitor()] if method == "dgc" else []
    model.fit(
        examples.batch(_BATCH_SIZE.value),
        epochs=_EPOCHS.value,
        steps_per_epoch=steps_per_epoch,
        validation_data=load("test").map(prepare).batch(1000),
        callbacks=[*monitor, timer],
        shuffle=False,
        verbose=reporting.verbose(),
    )
    return reporting.row(
        method=method,
        model=model,
        sparsity=_SPARSITY.value if method == "dgc" else 0.0,
        val_accuracy=model.history.history["val_accuracy"][-1],
        step_ms=timer.median_ms,
        workers=strategy.num_replicas_in_sync,
    )


def main(_):
    reporting.silence_tensorflow()
    if _DOWNLOAD.value:
        load("train")
        return
    strategy = tf_dgc.multi_worker_strategy()
    rows = [train(method, strategy) for method in _METHODS.value]
    reporting.report(rows, "MNIST")


if __name__ == "__main__":
    app.run(main)
