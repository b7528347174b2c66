"""Worker process of `background.py`.

    PYTHONPATH=benchmarks python benchmarks/workers/background_worker.py SETTINGS

Every line of standard input is a JSON object with settings of a `LocalOptimizer`. The
worker takes three rounds of `steps` steps, each after sleeping for `seconds`, and
answers with `ms`, the mean of a step of the last two rounds, and the `bytes` of an
exchange. The first request with some settings traces.
"""

import faulthandler
import functools
import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from common.replies import reply, take_standard_output

import tf_dgc

_TIMED_ROUNDS = 2


class Worker:
    """Takes local steps of a model of equal layers.

    Args:
        strategy: strategy of all workers.
        settings: settings of the benchmark.
    """

    def __init__(self, strategy, settings):
        self._strategy, self._settings = strategy, settings
        width = settings["width"]
        self._gradient = np.full([width, width], 1e-6, "float32")
        self._cached_step = functools.cache(self._create_step)

    def run(self, **options):
        """Take the steps of all rounds; return a step's milliseconds and bytes."""
        step, optimizer = self._cached_step(tuple(options.items()))
        times = []
        for _ in range((1 + _TIMED_ROUNDS) * self._settings["steps"]):
            start = time.perf_counter()
            time.sleep(self._settings["seconds"])
            step().numpy()
            times.append(time.perf_counter() - start)
        # No exchange is pending in the first round.
        ms = 1000 * float(np.mean(times[self._settings["steps"] :]))
        if optimizer.background:
            optimizer.background.finish()
        return {"ms": ms, "bytes": optimizer.stats.bytes_per_step}

    def _create_step(self, options):
        zeros = np.zeros_like(self._gradient)
        with self._strategy.scope():
            layers = range(self._settings["layers"])
            variables = [keras.Variable(zeros, name=f"layer{i}") for i in layers]
            optimizer = tf_dgc.LocalOptimizer(
                keras.optimizers.SGD(0.01),
                compressor=self._settings["compressor"],
                diagnostics=tf_dgc.Diagnostics(check_every=None),
                **dict(options),
            )
            optimizer.build(variables)

        def replica():
            gradients = [tf.constant(self._gradient) for _ in variables]
            optimizer.apply(gradients, variables)
            return tf.cast(optimizer.iterations.value, tf.float32)

        step = tf.function(lambda: self._strategy.run(replica))
        for _ in range(self._settings["steps"]):
            step()
        return step, optimizer


def main():
    """Answer the requests of the benchmark."""
    faulthandler.enable()
    replies = take_standard_output()
    settings = json.loads(sys.argv[1])
    strategy = tf_dgc.prepare(tf_dgc.multi_worker_strategy())
    worker = Worker(strategy, settings)
    reply(replies, ready=True)
    for line in sys.stdin:
        reply(replies, **worker.run(**json.loads(line)))


if __name__ == "__main__":
    main()
