"""TensorFlow's tutorial "Custom training loop with Keras", compressed.

    tf-dgc run --workers 2 examples/multi_worker_custom_loop.py

Uses `MultiWorkerMirroredStrategy`: every worker creates its own input, one function
takes a step on all workers, and a checkpoint holds model, optimizer, epoch and step, so
that a restarted run resumes.
"""

import os
import tempfile
import time

import keras
import reporting
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tf_dgc

_DIRECTORY = flags.DEFINE_string("directory", None, "Folder on each worker's disk.")
_EPOCHS = flags.DEFINE_integer("epochs", 3, "Passes of `steps` steps.")
_STEPS = flags.DEFINE_integer("steps", 30, "Steps per epoch.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Examples per step and worker.")
_SPARSITY = flags.DEFINE_float("sparsity", 0.99, "Share of entries not sent.")


def make_dataset(global_batch_size, context):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    dataset = dataset.shuffle(len(images), seed=0).repeat()
    return dataset.batch(context.get_per_replica_batch_size(global_batch_size))


def build_model():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(
                32, 3, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-4)
            ),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def make_train_step(strategy, model, optimizer, accuracy, global_batch_size):
    """Return a function of an iterator that takes a step and returns the loss."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )

    def replica_step(inputs):
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = tf.nn.compute_average_loss(
                loss_of(labels, predictions), global_batch_size=global_batch_size
            )
            if model.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        accuracy.update_state(labels, predictions)
        return loss

    @tf.function
    def train_step(iterator):
        losses = strategy.run(replica_step, args=(next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return train_step


def directory_to_write(directory, resolver):
    """Return the directory for the chief, and a subdirectory for other workers."""
    chief = "chief" not in resolver.cluster_spec().as_dict() and resolver.task_id == 0
    if resolver.task_type in (None, "chief") or chief:
        return directory
    return os.path.join(directory, f"temporary_{resolver.task_id}")


def main(_):
    reporting.silence_tensorflow()
    directory = _DIRECTORY.value or os.path.join(tempfile.gettempdir(), "tf_dgc_loop")
    strategy = tf_dgc.multi_worker_strategy()
    resolver = strategy.cluster_resolver
    global_batch_size = _BATCH_SIZE.value * strategy.num_replicas_in_sync

    with strategy.scope():
        model = build_model()
        data = strategy.distribute_datasets_from_function(
            lambda context: make_dataset(global_batch_size, context)
        )
        optimizer = tf_dgc.DGCOptimizer(  # the one line
            keras.optimizers.SGD(0.05), _SPARSITY.value
        )
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    train_step = make_train_step(
        strategy, model, optimizer, accuracy, global_batch_size
    )

    epoch = tf.Variable(tf.constant(0, tf.int64), name="epoch")
    step = tf.Variable(tf.constant(0, tf.int64), name="step")
    checkpoint = tf.train.Checkpoint(
        model=model, optimizer=optimizer, epoch=epoch, step=step
    )
    worker_directory = directory_to_write(directory, resolver)
    manager = tf.train.CheckpointManager(checkpoint, worker_directory, max_to_keep=1)
    latest = tf.train.latest_checkpoint(directory)
    if latest:
        checkpoint.restore(latest)
        reporting.log(f"going on from epoch {epoch.numpy()}")

    times, train_accuracy = [], float("nan")
    while epoch.numpy() < _EPOCHS.value:
        iterator, total_loss = iter(data), 0.0
        while step.numpy() < _STEPS.value:
            start = time.perf_counter()
            total_loss += train_step(iterator)
            times.append(time.perf_counter() - start)
            step.assign_add(1)
        loss = float(total_loss) / _STEPS.value
        train_accuracy = float(accuracy.result())
        reporting.log(
            f"epoch {epoch.numpy()}: loss {loss:.4f}, accuracy {train_accuracy:.4f}"
        )
        accuracy.reset_state()
        epoch.assign_add(1)
        step.assign(0)
        manager.save()
        if worker_directory != directory:
            tf.io.gfile.rmtree(worker_directory)

    if times:
        row = reporting.row(
            method="dgc",
            model=model,
            optimizer=optimizer,
            sparsity=_SPARSITY.value,
            val_accuracy=train_accuracy,
            step_ms=1000 * sorted(times)[len(times) // 2],
            workers=strategy.num_replicas_in_sync,
        )
        reporting.report([row], "digits, as in the tutorial with a custom loop")


if __name__ == "__main__":
    app.run(main)
