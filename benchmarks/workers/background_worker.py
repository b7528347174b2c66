"""One worker of `background.py`, which starts it and tells it what to do.

    PYTHONPATH=benchmarks python benchmarks/workers/background_worker.py SETTINGS

Every line of standard input is a JSON object, settings of a `LocalOptimizer`. It takes
the steps of three rounds of so many `steps`, each of which waits for `seconds` first,
and is answered by the mean `ms` of those of the last two, and the `bytes` of an
exchange. The first answer traces.
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

_ROUNDS = 2  # that are timed


class Worker:
    """Local steps of a model of equal layers.

    Args:
        strategy: strategy of all workers.
        settings: settings of the benchmark.
    """

    def __init__(self, strategy, settings):
        self._strategy, self._settings = strategy, settings
        width = settings["width"]
        self._gradient = np.full([width, width], 1e-6, "float32")
        self._made = functools.cache(self._make)

    def run(self, **chosen):
        """Take the steps of some rounds; return milliseconds of one, and bytes."""
        step, optimizer = self._made(tuple(chosen.items()))
        times = []
        for _ in range((1 + _ROUNDS) * self._settings["steps"]):
            start = time.perf_counter()
            time.sleep(self._settings["seconds"])
            step().numpy()
            times.append(time.perf_counter() - start)
        # The first round has nothing under way.
        ms = 1000 * float(np.mean(times[self._settings["steps"] :]))
        if optimizer.background:
            optimizer.background.finish()
        return {"ms": ms, "bytes": optimizer.stats.bytes_per_step}

    def _make(self, chosen):
        zeros = np.zeros_like(self._gradient)
        with self._strategy.scope():
            layers = range(self._settings["layers"])
            variables = [keras.Variable(zeros, name=f"layer{i}") for i in layers]
            optimizer = tf_dgc.LocalOptimizer(
                keras.optimizers.SGD(0.01),
                compressor=self._settings["compressor"],
                diagnostics=tf_dgc.Diagnostics(check_every=None),
                **dict(chosen),
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
    """Do what the parent asks for."""
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
