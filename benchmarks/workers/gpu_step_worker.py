"""A worker of gpu_training.py: times steps of one optimizer on one GPU.

Prints one line of JSON. Gradients are fixed and there is no communication.
"""

import json
import math
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import keras
import tensorflow as tf
from absl import app, flags
from common import models, resnet50

import tf_dgc

_MODEL = flags.DEFINE_enum("model", "mlp", ["mlp", "resnet50"], "Whose shapes.")
_OPTIMIZER = flags.DEFINE_enum("optimizer", "dgc", ["sgd", "dgc"], "What is timed.")
_STEPS = flags.DEFINE_integer("steps", 100, "Steps that are timed.", lower_bound=3)
_DIVIDE = flags.DEFINE_integer(
    "divide", 1, "Divides the length of last axes, for an emulated device."
)
_WARMUP = 3


def shapes():
    """Return the shapes of the model's variables, divided."""
    if _MODEL.value == "resnet50":
        full = resnet50.shapes()
    else:
        full = [tuple(v.shape) for v in models.mlp().trainable_variables]
    return [(*rest, math.ceil(last / _DIVIDE.value)) for *rest, last in full]


def create_optimizer():
    """Return stock SGD, or DGC around it."""
    sgd = keras.optimizers.SGD(0.01, momentum=0.9)
    return sgd if _OPTIMIZER.value == "sgd" else tf_dgc.DGCOptimizer(sgd)


def peak_memory():
    """Return the peak of the GPU's memory in bytes; None if it is not known."""
    try:
        return tf.config.experimental.get_memory_info("GPU:0")["peak"]
    except ValueError:
        return None


def main(_):
    """Time the steps, and print the row."""
    with tf.device("GPU:0"):
        variables = [keras.Variable(tf.zeros(shape)) for shape in shapes()]
        gradients = [tf.random.normal(shape) for shape in shapes()]
        optimizer = create_optimizer()
        optimizer.build(variables)
        step = tf.function(lambda: optimizer.apply(gradients, variables))
        for _ in range(_WARMUP):
            step()
        seconds = []
        for _ in range(_STEPS.value):
            tf.test.experimental.sync_devices()
            start = time.perf_counter()
            step()
            tf.test.experimental.sync_devices()
            seconds.append(time.perf_counter() - start)
    quartiles = statistics.quantiles(seconds, n=4)
    row = {
        "entries": sum(map(math.prod, shapes())),
        "median_ms": 1000 * quartiles[1],
        "quartiles_ms": [1000 * quartiles[0], 1000 * quartiles[2]],
        "peak_bytes": peak_memory(),
    }
    print("ROW " + json.dumps(row), flush=True)


if __name__ == "__main__":
    app.run(main)
