"""Training at two sites that are far from each other: an exchange every few steps.

    tf-dgc run --workers 2 examples/two_sites.py

Each site trains on data of its own, which never leave it, and for `--period` steps it
contacts nobody. Then the sites exchange how far they moved, in 2 bits for the largest
entries. On two machines start it on both, with a `TF_CONFIG` of each; see
docs/distant.md for the link between them.
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
_EPOCHS = flags.DEFINE_integer("epochs", 4, "Epochs, at whose ends all meet too.", 1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Examples per step of a site.")
_DIRECTORY = flags.DEFINE_string("directory", None, "For backups, on each site's disk.")


def data_of_site(number, sites):
    """Return every so-manieth image to train on, and the last 400 to try."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    mine = slice(number, len(images) - 400, sites)
    examples = tf.data.Dataset.from_tensor_slices((images[mine], labels[mine]))
    examples = examples.shuffle(1000, seed=number).repeat()
    # Keras divides a batch among the sites; each takes its part of its own.
    whole = examples.batch(sites * _BATCH_SIZE.value)
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy
    return whole.with_options(options), (images[-400:], labels[-400:])


def build_model():
    layers = [keras.layers.Dense(256, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])


def main(_):
    reporting.quiet()
    strategy = tf_dgc.multi_worker_strategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model()
        inner = keras.optimizers.AdamW(1e-3)
        optimizer = tf_dgc.sparse_loco(inner, _PERIOD.value)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])

    sites = strategy.num_replicas_in_sync
    number = strategy.cluster_resolver.task_id if sites > 1 else 0
    examples, (x, y) = data_of_site(number, sites)
    callbacks = []
    if _DIRECTORY.value:  # epochs are whole rounds, so all then have the same weights
        callbacks.append(tf_dgc.callbacks.BackupAndRestore(_DIRECTORY.value))
    start, epochs = time.perf_counter(), {"epochs": _EPOCHS.value}
    epochs["steps_per_epoch"] = _PERIOD.value * _ROUNDS.value
    model.fit(examples, **epochs, callbacks=callbacks, verbose=reporting.bars())
    seconds = time.perf_counter() - start
    outputs = model.predict(x, verbose=0)  # nobody is contacted for that either
    right = (outputs.argmax(axis=-1) == y).mean()
    stats = optimizer.stats
    reporting.say(f"{stats.steps} rounds of {_PERIOD.value} steps: {seconds:.1f} s")
    reporting.say(f"accuracy {right:.2%} at {sites} sites")
    reporting.say(f"{stats.bytes_per_step:,} bytes per round, 1/{stats.ratio:.0f}")


if __name__ == "__main__":
    app.run(main)
