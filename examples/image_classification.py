"""Image classification: a model of `keras.applications` with a `tf.data` pipeline.

    tf-dgc run --workers 2 examples/image_classification.py

Images are scikit-learn's digits, resized to 32 x 32 pixels and randomly shifted, so
nothing is downloaded. Each worker gets its share of a batch.
"""

import keras
import reporting
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tf_dgc

_EPOCHS = flags.DEFINE_integer("epochs", 10, "Passes over the data.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Examples per step, all workers.")
_STEPS = flags.DEFINE_integer("steps", None, "Steps of an epoch; None for all.")
_RECORD = flags.DEFINE_string("record", None, "A file for `tf-dgc report`.")
_RATE = flags.DEFINE_float("learning_rate", 2e-3, "Learning rate of Adam.")


def load_data():
    """Return a training set of 1,500 images, and a test set of the others."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    digits = tf.data.Dataset.from_tensor_slices((images, labels))
    train = digits.take(1500).cache().shuffle(1500, seed=0)
    train = train.map(prepare).map(shift).batch(_BATCH_SIZE.value, drop_remainder=True)
    test = digits.skip(1500).map(prepare).batch(_BATCH_SIZE.value)
    return train.prefetch(2), test


def prepare(image, label):
    return tf.image.grayscale_to_rgb(tf.image.resize(image, (32, 32))), label


def shift(image, label):
    """Shift an image by up to two pixels."""
    larger = tf.image.resize_with_crop_or_pad(image, 36, 36)
    return tf.image.random_crop(larger, (32, 32, 3)), label


def build_model():
    return keras.applications.MobileNet(
        input_shape=(32, 32, 3), alpha=0.25, weights=None, classes=10, dropout=0.0
    )


def main(_):
    reporting.silence_tensorflow()
    strategy = tf_dgc.multi_worker_strategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model()
        model.compile(
            tf_dgc.DGCOptimizer(keras.optimizers.Adam(_RATE.value), sparsity=0.99),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    train, test = load_data()
    train = train.repeat() if _STEPS.value else train
    monitor = tf_dgc.callbacks.CompressionMonitor(path=_RECORD.value)
    model.fit(
        train,
        epochs=_EPOCHS.value,
        steps_per_epoch=_STEPS.value,
        validation_data=test,
        callbacks=[monitor],
        verbose=reporting.verbose(),
    )
    _, accuracy = model.evaluate(test, verbose=0)
    reporting.log(f"accuracy {accuracy:.1%}, 1/{model.optimizer.stats.ratio:.0f} sent")


if __name__ == "__main__":
    app.run(main)
