"""Worker process of `overlap.py`.

    PYTHONPATH=benchmarks python benchmarks/workers/overlap_worker.py SETTINGS

SETTINGS are JSON: the model's `layers` and `width`, the optimizers' `collective`, and
whether the backward pass `computes` matrix products on one thread, or sleeps.

Every line of standard input is a JSON object: `method`; `backward`, the seconds of a
backward pass, 0 for constant gradients; `then`, which follows it: a "step" of the
optimizer, its "update" alone, or "nothing"; and the optimizer's `overlap`. The worker
runs it once, traced before, and answers with `ms`, and `collective` and `bytes` of the
optimizer's stats.
"""

import faulthandler
import functools
import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from common import algorithms
from common.replies import reply, take_standard_output

import tf_dgc
from tf_dgc.optimizers.update import apply_update
from tf_dgc.steps.base import StepOutcome

_MATRIX_SIZE = 256  # of the matrices that a backward pass multiplies


class Worker:
    """Takes steps of a model of equal layers.

    Args:
        strategy: strategy of all workers.
        layers: number of layers.
        width: number of inputs and of outputs of each layer.
        computes: whether a backward pass computes, or sleeps.
        collective: collective algorithm of the optimizers.
    """

    def __init__(self, strategy, layers, width, computes, collective):
        self._strategy = strategy
        self._collective = collective
        self._cached_step = functools.cache(self._create_step)
        self._product_seconds = _time_product() if computes else None
        # A variable, since TensorFlow would fold a constant's results.
        self._zero = tf.Variable(0.0)
        rng = np.random.default_rng()
        with strategy.scope():
            weights = np.zeros([width, width], "float32")
            self._variables = [
                keras.Variable(weights, name=f"layer{i}") for i in range(layers)
            ]
        self._gradients = [
            tf.Variable(rng.normal(size=weights.shape), dtype=tf.float32)
            for _ in range(layers)
        ]

    def run(self, method, backward, then, overlap):
        """Run it once; return milliseconds, algorithm and bytes."""
        step, optimizer = self._cached_step(method, backward, then, overlap)
        start = time.perf_counter()
        step().numpy()
        ms = 1000 * (time.perf_counter() - start)
        stats = optimizer.stats
        return {
            "ms": ms,
            "collective": stats.collective,
            "bytes": stats.bytes_per_step,
        }

    def _create_step(self, method, backward, then, overlap):
        with self._strategy.scope():
            optimizer = _optimizer(method, overlap, self._collective)
            optimizer.build(self._variables)

        @tf.function
        def step():
            def replica():
                gradients = self._backward(backward)
                if then == "step":
                    optimizer.apply(gradients, self._variables)
                elif then == "update":
                    outcome = StepOutcome(lambda: (gradients, tf.constant(0)), 0, 0)
                    apply_update(
                        optimizer.inner_optimizer,
                        outcome,
                        self._variables,
                        True,
                        None,
                        optimizer._hyperparameters.scales_by_learning_rate,
                    )
                else:
                    return tf.add_n([g[0, 0] for g in gradients])
                return tf.cast(optimizer.iterations.value, tf.float32)

            return self._strategy.run(replica)

        step()
        return step, optimizer

    def _backward(self, seconds):
        """Return gradients that become available one by one, the last layer's first."""
        if not seconds:
            return [tf.identity(gradient) for gradient in self._gradients]
        layer_seconds = seconds / len(self._variables)
        zero = tf.identity(self._zero)
        gradients = []
        for gradient in reversed(self._gradients):
            if self._product_seconds:
                zero = self._compute(zero, layer_seconds)
            else:
                zero = _sleep(zero, layer_seconds)
            gradients.append(gradient + zero)
        return gradients[::-1]

    def _compute(self, zero, seconds):
        """Return 0 after multiplying matrices for some seconds."""
        matrix = tf.fill([_MATRIX_SIZE, _MATRIX_SIZE], zero)
        for _ in range(max(1, round(seconds / self._product_seconds))):
            matrix = tf.matmul(matrix, matrix)
        return matrix[0, 0]


def _sleep(zero, seconds):
    """Return 0 after sleeping for some seconds."""

    def sleep(number):
        time.sleep(seconds)
        return number

    delayed = tf.numpy_function(sleep, [zero], tf.float32, stateful=False)
    return tf.ensure_shape(delayed, [])


def _optimizer(method, overlap, collective):
    sgd = keras.optimizers.SGD(0.01, momentum=0.9)
    options = {
        "diagnostics": tf_dgc.Diagnostics(check_every=None),
        "collective": algorithms.overlapped(collective, overlap),
    }
    if method == "dgc":
        return tf_dgc.DGCOptimizer(sgd, **options)
    name, *rank = method.split()
    compressor = tf_dgc.compressors.PowerSGD(int(rank[0])) if rank else name
    return tf_dgc.CompressedOptimizer(sgd, compressor, **options)


def _time_product():
    """Return the seconds of a matrix product, measured over many in sequence."""

    @tf.function
    def multiply(matrix):
        for _ in range(200):
            matrix = tf.matmul(matrix, matrix)
        return matrix

    times = []
    for _ in range(4):
        start = time.perf_counter()
        multiply(tf.zeros([_MATRIX_SIZE, _MATRIX_SIZE])).numpy()
        times.append(time.perf_counter() - start)
    return min(times[1:]) / 200


def main():
    """Answer the requests of the benchmark."""
    faulthandler.enable()
    replies = take_standard_output()
    settings = json.loads(sys.argv[1])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # Operations that sleep or wait occupy threads.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    worker = Worker(
        tf_dgc.prepare(tf_dgc.multi_worker_strategy()),
        settings["layers"],
        settings["width"],
        settings["computes"],
        settings["collective"],
    )
    reply(replies, ready=True)
    for line in sys.stdin:
        reply(replies, **worker.run(**json.loads(line)))


if __name__ == "__main__":
    main()
