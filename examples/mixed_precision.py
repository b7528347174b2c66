"""Mixed precision: a float16 model, a loss scale, and compressed gradients.

    tf-dgc run --workers 2 examples/mixed_precision.py
    tf-dgc run --workers 2 examples/mixed_precision.py --policy mixed_bfloat16

With the policy mixed_float16, `compile` wraps the optimizer in a `LossScaleOptimizer`.
An overflow on one worker skips the step and halves the scale on all workers.
"""

import keras
import reporting
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tf_dgc

_POLICY = flags.DEFINE_string("policy", "mixed_float16", "For all but the last layer.")
_EPOCHS = flags.DEFINE_integer("epochs", 6, "Passes over the data.", lower_bound=1)


def build_model():
    layers = [keras.layers.Dense(512, activation="relu") for _ in range(2)]
    last = keras.layers.Dense(10, dtype="float32")  # the loss needs full precision
    return keras.Sequential([keras.Input((64,)), *layers, last])


def main(_):
    reporting.silence_tensorflow()
    strategy = tf_dgc.multi_worker_strategy()
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_dtype_policy(_POLICY.value)
    with strategy.scope():
        model = build_model()
        sgd = keras.optimizers.SGD(0.05, momentum=0.9)
        dgc = tf_dgc.DGCOptimizer(sgd, sparsity=0.98, value_dtype="bfloat16")
        model.compile(
            dgc,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
    data = data.shuffle(1500, seed=0).batch(64)
    model.fit(data, epochs=_EPOCHS.value, verbose=reporting.verbose())
    test = tf.data.Dataset.from_tensor_slices((images[1500:], labels[1500:]))
    _, accuracy = model.evaluate(test.batch(99), verbose=0)
    scale = getattr(model.optimizer, "dynamic_scale", None)
    reporting.log(f"accuracy {accuracy:.1%}, {type(model.optimizer).__name__}")
    scale = "none" if scale is None else f"{float(scale.numpy()):,.0f}"
    reporting.log(f"loss scale {scale}, {dgc.stats.nonfinite} left out")
    stats = dgc.stats
    reporting.log(f"{stats.bytes_per_step:,} bytes per step, 1/{stats.ratio:.0f}")


if __name__ == "__main__":
    app.run(main)
