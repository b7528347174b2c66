"""Dense and compressed training of a digit classifier, side by side.

    tf-dgc run --workers 2 examples/digits.py

Trains the same network from the same seeds with plain SGD and with DGC, and prints
accuracy, bytes and time of both.
"""

import statistics
import time

import keras
import reporting
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_dgc

_STEPS = flags.DEFINE_integer("steps", 200, "Training steps of each run.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Examples per step, all workers.")
_SPARSITY = flags.DEFINE_float(
    "sparsity", None, "Share of entries not sent; by default depends on `steps`."
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs per method, with seeds 0, 1, ...")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.1, "For both methods.")


def load_data():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    return train_test_split(images, labels, test_size=0.2, random_state=0)


def build_model():
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(1024, activation="relu"),
            keras.layers.Dense(1024, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def make_optimizer(method):
    sgd = keras.optimizers.SGD(_LEARNING_RATE.value, momentum=0.9)
    if method == "dense":
        return sgd
    settings = {} if _SPARSITY.value is None else {"sparsity": _SPARSITY.value}
    return tf_dgc.dgc_for_steps(sgd, _STEPS.value, **settings)  # the one line


def train(method, seed, strategy, data):
    x_train, x_val, y_train, y_val = data
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=make_optimizer(method),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    examples = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    examples = examples.shuffle(len(x_train), seed=seed).repeat()
    timer = reporting.StepTimer(_STEPS.value // 5)
    model.fit(
        examples.batch(_BATCH_SIZE.value),
        steps_per_epoch=_STEPS.value,
        callbacks=[timer],
        shuffle=False,
        verbose=reporting.verbose(),
    )
    _, accuracy = model.evaluate(x_val, y_val, batch_size=len(x_val), verbose=0)
    return model, accuracy, timer.median_ms


def last_sparsity(optimizer):
    """Return the sparsity after the warm-up."""
    sparsity = getattr(optimizer, "sparsity", 0.0)
    return getattr(sparsity, "final", sparsity)


def compare(method, strategy, data):
    start = time.time()
    runs = [train(method, seed, strategy, data) for seed in range(_SEEDS.value)]
    models, accuracies, step_ms = zip(*runs, strict=True)
    reporting.log(f"{method}: {_SEEDS.value} runs in {time.time() - start:.0f} s")
    return reporting.row(
        method=method,
        model=models[-1],
        sparsity=last_sparsity(models[-1].optimizer),
        val_accuracy=statistics.mean(accuracies),
        step_ms=statistics.median(step_ms),
        workers=strategy.num_replicas_in_sync,
    )


def main(_):
    reporting.silence_tensorflow()
    strategy = tf_dgc.multi_worker_strategy()
    data = load_data()
    rows = [compare(method, strategy, data) for method in ("dense", "dgc")]
    reporting.report(rows, f"digits, mean of {_SEEDS.value} seeds")


if __name__ == "__main__":
    app.run(main)
