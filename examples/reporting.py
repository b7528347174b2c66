"""Step times, a table of results, and the flag `--json` of the examples."""

import json
import os
import statistics
import sys
import time

import keras
import tensorflow as tf
from absl import flags, logging
from rich.console import Console
from rich.table import Table

import tf_dgc

_JSON = flags.DEFINE_string("json", None, "File to write the rows of the table to.")


class StepTimer(keras.callbacks.Callback):
    """Times steps, except the first ones, which trace and warm up."""

    def __init__(self, skip):
        super().__init__()
        self._skip = skip
        self._times = []
        self._start = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._times.append(time.perf_counter() - self._start)

    @property
    def median_ms(self):
        return 1000 * statistics.median(self._times[self._skip :] or self._times)


def silence_tensorflow():
    """Turn off TensorFlow's progress messages, of which there is one per collective."""
    logging.set_verbosity(logging.WARNING)
    tf.get_logger().setLevel("WARNING")


def is_chief():
    task = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {})
    return task.get("type", "chief") == "chief" or task.get("index") == 0


def verbose():
    """Return Keras's `verbose`: for the chief bars on a terminal, else epoch lines."""
    if not is_chief():
        return 0
    return 1 if sys.stdout.isatty() else 2


def log(message):
    """Print a message, on the chief only."""
    if is_chief():
        print(message, flush=True)


def row(*, method, model, optimizer=None, sparsity, val_accuracy, step_ms, workers):
    """Return one row, with the mean of a worker's bytes per step."""
    dense_bytes = sum(v.numpy().nbytes for v in model.trainable_variables)
    optimizer = optimizer or model.optimizer
    sent_bytes = dense_bytes
    if isinstance(optimizer, tf_dgc.DGCOptimizer):
        sent_bytes = round(optimizer.stats.bytes / optimizer.stats.steps)
    return {
        "method": method,
        "sparsity": sparsity,
        "val_accuracy": val_accuracy,
        "bytes_per_step": sent_bytes,
        "dense_bytes_per_step": dense_bytes,
        "ratio": dense_bytes / sent_bytes,
        "step_ms": step_ms,
        "workers": workers,
    }


def report(rows, title):
    """Print the rows as a table, and write them to `--json`, on the chief only."""
    if not is_chief():
        return
    table = Table(title=title)
    for heading in (
        "method", "sparsity", "val. accuracy", "bytes per step and worker", "ratio",
        "step (ms)", "workers",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for r in rows:
        table.add_row(
            r["method"],
            f"{r['sparsity']:.3%}",
            f"{r['val_accuracy']:.2%}",
            f"{r['bytes_per_step']:,}",
            f"{r['ratio']:.0f}",
            f"{r['step_ms']:.1f}",
            str(r["workers"]),
        )
    Console(width=100).print(table)
    if _JSON.value:
        with open(_JSON.value, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)
