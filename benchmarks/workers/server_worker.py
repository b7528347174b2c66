"""Worker process or server of `server.py`.

    PYTHONPATH=benchmarks python benchmarks/workers/server_worker.py SETTINGS

Every line of standard input is a JSON object, answered by one on standard output.
"warm" takes some steps and times them; "run" takes steps until a number of seconds or
of steps is reached, and then leaves the server; "read" returns the server's counts.
"""

import functools
import json
import sys

import keras
import tensorflow as tf
from common import models, server_processes

import tf_dgc


def optimizer(settings):
    """Return the optimizer of a mode."""
    sgd = keras.optimizers.SGD(0.01, momentum=0.9)
    if settings["mode"] == "mirrored":
        return tf_dgc.DGCOptimizer(sgd, settings["sparsity"])
    return server_processes.create_optimizer(sgd, settings)


def draw(settings, model):
    """Return a function that returns one batch, the same at every step."""
    arrays = models.data(model, settings["rank"], settings["batch_size"])
    batch = [tf.constant(a) for a in arrays]
    return lambda: batch


def main(settings):
    """Answer the requests of the benchmark."""
    server_processes.serve(
        server_processes.Server,
        lambda: server_processes.Worker(
            settings,
            models.MODELS[settings["model"]],
            optimizer,
            functools.partial(draw, settings),
        ),
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
