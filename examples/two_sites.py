"""Training at two distant sites, which communicate every few steps.

    tf-dgc run --workers 2 examples/two_sites.py

Each site trains on its own data, which never leave it, and takes `--period` steps
without communication. Then the sites exchange the largest entries of their parameter
deltas, in 2 bits each. To use two machines, start it on both, each with its own
`TF_CONFIG`; see docs/research/distant.md for the link between them.
"""

import time

import keras
import reporting
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tf_dgc

_PERIOD = flags.DEFINE_integer("period", 30, "Steps from one exchange to the next.", 1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Exchanges of an epoch.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 4, "Epochs; sites synchronize after each.", 1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Examples per step of a site.")
_DIRECTORY = flags.DEFINE_string("directory", None, "For backups, on each site's disk.")


def load_data(site, num_sites):
    """Return a site's share of the training set, and a test set of 400 images."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    share = slice(site, len(images) - 400, num_sites)
    examples = tf.data.Dataset.from_tensor_slices((images[share], labels[share]))
    examples = examples.shuffle(1000, seed=site).repeat()
    # Keras divides the global batch among the sites; without sharding each takes its
    # part of its own examples.
    batches = examples.batch(num_sites * _BATCH_SIZE.value)
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy
    return batches.with_options(options), (images[-400:], labels[-400:])


def build_model():
    layers = [keras.layers.Dense(256, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])


def main(_):
    reporting.silence_tensorflow()
    strategy = tf_dgc.multi_worker_strategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model()
        inner = keras.optimizers.AdamW(1e-3)
        optimizer = tf_dgc.sparse_loco(inner, _PERIOD.value)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])

    num_sites = strategy.num_replicas_in_sync
    site = strategy.cluster_resolver.task_id if num_sites > 1 else 0
    examples, (x_test, y_test) = load_data(site, num_sites)
    callbacks = []
    if _DIRECTORY.value:  # sites have equal weights after an epoch, which ends a round
        callbacks.append(tf_dgc.callbacks.BackupAndRestore(_DIRECTORY.value))
    start = time.perf_counter()
    model.fit(
        examples,
        epochs=_EPOCHS.value,
        steps_per_epoch=_PERIOD.value * _ROUNDS.value,
        callbacks=callbacks,
        verbose=reporting.verbose(),
    )
    seconds = time.perf_counter() - start
    outputs = model.predict(x_test, verbose=0)  # without communication
    accuracy = (outputs.argmax(axis=-1) == y_test).mean()
    stats = optimizer.stats
    reporting.log(f"{stats.steps} rounds of {_PERIOD.value} steps: {seconds:.1f} s")
    reporting.log(f"accuracy {accuracy:.2%} at {num_sites} sites")
    reporting.log(f"{stats.bytes_per_step:,} bytes per round, 1/{stats.ratio:.0f}")


if __name__ == "__main__":
    app.run(main)
