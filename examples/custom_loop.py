"""Compressed training with a custom loop instead of `model.fit`.

    tf-dgc run --workers 2 examples/custom_loop.py

Gradients of all workers are summed, so the loss is divided by the whole batch.
"""

import time

import keras
import reporting
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_dgc

_STEPS = flags.DEFINE_integer("steps", 200, "Training steps.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Examples per step, all workers.")
_SPARSITY = flags.DEFINE_float("sparsity", 0.99, "Share of entries not sent.")


def build_model():
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main(_):
    reporting.silence_tensorflow()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    x_train, x_val, y_train, y_val = train_test_split(images, labels, random_state=0)

    strategy = tf_dgc.multi_worker_strategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model()
        optimizer = tf_dgc.DGCOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), _SPARSITY.value
        )
        optimizer.build(model.trainable_variables)

    loss_of = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )

    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True)))
            loss /= _BATCH_SIZE.value
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    @tf.function
    def distributed_step(batch):
        losses = strategy.run(train_step, args=batch)
        return strategy.reduce("SUM", losses, axis=None)

    examples = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    examples = examples.shuffle(len(x_train), seed=0).repeat().batch(_BATCH_SIZE.value)
    times = []
    for step, batch in enumerate(strategy.experimental_distribute_dataset(examples)):
        if step == _STEPS.value:
            break
        start = time.perf_counter()
        loss = distributed_step(batch)
        times.append(time.perf_counter() - start)
        if step % 50 == 0:
            reporting.log(f"step {step}: loss {float(loss):.4f}")

    correct = tf.argmax(model(x_val), axis=1) == y_val
    row = reporting.row(
        method="dgc",
        model=model,
        optimizer=optimizer,
        sparsity=_SPARSITY.value,
        val_accuracy=float(tf.reduce_mean(tf.cast(correct, tf.float32))),
        step_ms=1000 * sorted(times)[len(times) // 2],
        workers=strategy.num_replicas_in_sync,
    )
    reporting.report([row], "digits, custom loop")


if __name__ == "__main__":
    app.run(main)
