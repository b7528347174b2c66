"""TensorFlow's tutorial "Multi-worker training with Keras", compressed.

    tf-dgc run --workers 2 examples/multi_worker_with_keras.py

Trains with `fit`, saves and loads the model, checkpoints and restores it, and writes
backups. Only the optimizer differs from the tutorial: it is wrapped.
"""

import os
import tempfile

import keras
import reporting
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_dgc

_DIRECTORY = flags.DEFINE_string("directory", None, "Folder on each worker's disk.")
_EPOCHS = flags.DEFINE_integer("epochs", 3, "Passes of `steps` steps.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps per epoch.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Examples per step and worker.")
_SPARSITY = flags.DEFINE_float("sparsity", 0.99, "Share of entries not sent.")


def load_data():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8)
    return train_test_split(images, labels, test_size=0.2, random_state=0)


def batches(images, labels, batch_size):
    examples = tf.data.Dataset.from_tensor_slices((images, labels))
    return examples.shuffle(len(images), seed=0).repeat().batch(batch_size)


def build_and_compile_model():
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf_dgc.DGCOptimizer(  # the one line
            keras.optimizers.SGD(0.05), _SPARSITY.value
        ),
        metrics=["accuracy"],
    )
    return model


def path_to_write(path, resolver):
    """Return the path for the chief, and one in a temporary folder for the others."""
    if resolver.task_type == "chief" or resolver.task_id == 0:
        return path
    folder = os.path.join(os.path.dirname(path), f"temporary_{resolver.task_id}")
    tf.io.gfile.makedirs(folder)
    return os.path.join(folder, os.path.basename(path))


def remove_unless_chief(worker_path, path):
    if worker_path != path:
        tf.io.gfile.rmtree(os.path.dirname(worker_path))


def save_and_load(model, path, resolver):
    worker_path = path_to_write(path, resolver)
    model.save(worker_path)
    remove_unless_chief(worker_path, path)
    return keras.models.load_model(path)


def checkpoint_and_restore(model, directory, resolver):
    checkpoint = tf.train.Checkpoint(model=model)
    worker_path = path_to_write(directory, resolver)
    tf.train.CheckpointManager(checkpoint, worker_path, max_to_keep=1).save()
    remove_unless_chief(worker_path, directory)
    checkpoint.restore(tf.train.latest_checkpoint(directory))


def main(_):
    reporting.silence_tensorflow()
    directory = _DIRECTORY.value or os.path.join(tempfile.gettempdir(), "tf_dgc_keras")
    os.makedirs(directory, exist_ok=True)
    strategy = tf_dgc.multi_worker_strategy()
    resolver = strategy.cluster_resolver
    x_train, x_val, y_train, y_val = load_data()
    data = batches(x_train, y_train, _BATCH_SIZE.value * strategy.num_replicas_in_sync)
    settings = {"steps_per_epoch": _STEPS.value, "verbose": reporting.verbose()}

    def evaluate(label, model):
        accuracy = model.evaluate(x_val, y_val, batch_size=len(x_val), verbose=0)[1]
        reporting.log(f"{label}: {accuracy:.4f} of the validation set are right")
        return accuracy

    with strategy.scope():
        model = build_and_compile_model()
    model.fit(data, epochs=_EPOCHS.value, **settings)
    evaluate("trained", model)

    with strategy.scope():
        loaded = save_and_load(model, os.path.join(directory, "model.keras"), resolver)
    evaluate("loaded", loaded)
    loaded.fit(data, epochs=1, **settings)

    checkpoint_and_restore(model, os.path.join(directory, "checkpoints"), resolver)
    evaluate("restored", model)
    model.fit(data, epochs=1, **settings)

    with strategy.scope():
        model = build_and_compile_model()
    callbacks = [
        keras.callbacks.BackupAndRestore(os.path.join(directory, "backup")),
        keras.callbacks.ModelCheckpoint(os.path.join(directory, "epoch-{epoch}.keras")),
        timer := reporting.StepTimer(_STEPS.value // 2),
    ]
    model.fit(data, epochs=_EPOCHS.value, callbacks=callbacks, **settings)
    row = reporting.row(
        method="dgc",
        model=model,
        sparsity=_SPARSITY.value,
        val_accuracy=evaluate("trained with backups", model),
        step_ms=timer.median_ms,
        workers=strategy.num_replicas_in_sync,
    )
    reporting.report([row], "digits, as in the tutorial with Keras")


if __name__ == "__main__":
    app.run(main)
