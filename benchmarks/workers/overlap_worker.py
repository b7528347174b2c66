"""One worker of `overlap.py`, which starts it and tells it what to do.

    PYTHONPATH=benchmarks python benchmarks/workers/overlap_worker.py SETTINGS

Every line of standard input is a JSON object: `method`; `backward`, the seconds that a
backward pass takes, 0 for gradients that are there at once; `behind`, what follows it:
"step" of the optimizer, its "update" alone, or "nothing"; and `overlap` of the
optimizer. It is done once, traced before the first time, and answered by its `ms`, and
by `exchange` and `bytes` of the optimizer's stats.
SETTINGS says how large the model is, and whether the backward pass `computes`, by
products of matrices on one thread, or waits.
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

_SIDE = 256  # of matrices whose products a backward pass consists of


class Worker:
    """Steps of a model of equal layers.

    Args:
        strategy: strategy of all workers.
        layers: number of layers.
        width: number of inputs and of outputs of each.
        computes: whether a backward pass computes, or waits.
        exchange: exchange of the optimizers.
    """

    def __init__(self, strategy, layers, width, computes, exchange):
        self._strategy, self._exchange = strategy, exchange
        self._step = functools.cache(self._make)
        self._product = _seconds_of_product() if computes else None
        # Of a constant, the graph would know all beforehand.
        self._begin = tf.Variable(0.0)
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

    def run(self, method, backward, behind, overlap):
        """Do it once; return milliseconds, and what the optimizer says."""
        step, optimizer = self._step(method, backward, behind, overlap)
        start = time.perf_counter()
        step().numpy()
        found = {"ms": 1000 * (time.perf_counter() - start)}
        stats = optimizer.stats
        return {**found, "exchange": stats.collective, "bytes": stats.bytes_per_step}

    def _make(self, method, backward, behind, overlap):
        with self._strategy.scope():
            optimizer = _optimizer(method, overlap, self._exchange)
            optimizer.build(self._variables)

        @tf.function
        def step():
            def replica():
                gradients = self._backward(backward)
                if behind == "step":
                    optimizer.apply(gradients, self._variables)
                elif behind == "update":
                    done = StepOutcome(lambda: (gradients, tf.constant(0)), 0, 0)
                    known = (
                        True,
                        None,
                        optimizer._hyperparameters.scales_by_learning_rate,
                    )
                    apply_update(
                        optimizer.inner_optimizer, done, self._variables, *known
                    )
                else:
                    return tf.add_n([g[0, 0] for g in gradients])
                return tf.cast(optimizer.iterations.value, tf.float32)

            return self._strategy.run(replica)

        step()
        return step, optimizer

    def _backward(self, seconds):
        """Return gradients, of which that of the last layer is there first."""
        each = seconds / len(self._variables)
        done = tf.identity(self._begin)
        found = []
        for gradient in reversed(self._gradients):
            if each:
                done = self._compute(done, each) if self._product else _wait(done, each)
            found.append(gradient + done if each else tf.identity(gradient))
        return found[::-1]

    def _compute(self, done, seconds):
        matrix = tf.fill([_SIDE, _SIDE], done)
        for _ in range(max(1, round(seconds / self._product))):
            matrix = tf.matmul(matrix, matrix)
        return matrix[0, 0]


def _wait(done, seconds):
    """Return the same number, to be had later; it takes no processor."""

    def sleep(number):
        time.sleep(seconds)
        return number

    late = tf.numpy_function(sleep, [done], tf.float32, stateful=False)
    return tf.ensure_shape(late, [])


def _optimizer(method, overlap, exchange):
    sgd = keras.optimizers.SGD(0.01, momentum=0.9)
    asks = {
        "diagnostics": tf_dgc.Diagnostics(check_every=None),
        "collective": algorithms.overlapped(exchange, overlap),
    }
    if method == "dgc":
        return tf_dgc.DGCOptimizer(sgd, **asks)
    name, *rank = method.split()
    compressor = tf_dgc.compressors.PowerSGD(int(rank[0])) if rank else name
    return tf_dgc.CompressedOptimizer(sgd, compressor, **asks)


def _seconds_of_product():
    """Return what a product takes, among many, one behind the other."""

    @tf.function
    def multiply(matrix):
        for _ in range(200):
            matrix = tf.matmul(matrix, matrix)
        return matrix

    times = []
    for _ in range(4):
        start = time.perf_counter()
        multiply(tf.zeros([_SIDE, _SIDE])).numpy()
        times.append(time.perf_counter() - start)
    return min(times[1:]) / 200


def main():
    """Do what the parent asks for."""
    faulthandler.enable()
    replies = take_standard_output()
    settings = json.loads(sys.argv[1])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # What waits keeps a thread.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    strategy = tf_dgc.prepare(tf_dgc.multi_worker_strategy())
    sizes = settings["layers"], settings["width"]
    worker = Worker(strategy, *sizes, settings["computes"], settings["exchange"])
    reply(replies, ready=True)
    for line in sys.stdin:
        reply(replies, **worker.run(**json.loads(line)))


if __name__ == "__main__":
    main()
