"""One worker of `exchange.py`, which starts it and tells it what to do.

    PYTHONPATH=benchmarks python benchmarks/workers/exchange_worker.py SETTINGS

Every line of standard input is a JSON object: `exchange`, `kind` and `payload`, its
bytes. It is done once, traced before the first time, and answered by its `ms`.
"""

import faulthandler
import functools
import json
import sys
import time

import numpy as np
import tensorflow as tf
from common.replies import reply, take_standard_output
from common.ways import make

import tf_dgc
from tf_dgc.collectives.requests import Gather, Sum
from tf_dgc.distribute.communicator import Communicator


class Worker:
    """Sums and gathers along all ways.

    Args:
        strategy: strategy of all workers.
    """

    def __init__(self, strategy):
        self._strategy = strategy
        self._step = functools.cache(self._make)

    def run(self, exchange, kind, payload):
        """Do it once; return milliseconds."""
        step = self._step(exchange, kind, payload)
        start = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - start)

    def _make(self, exchange, kind, payload):
        number = self._strategy.num_replicas_in_sync
        communicator = Communicator(self._strategy, make(exchange, number))
        # A variable, or the graph would have it as a constant.
        values = tf.Variable(np.ones(payload // 4, "int32"), trainable=False)
        request = {
            "sum": lambda: Sum(tf.cast(values, tf.float32)),
            "gather": lambda: Gather(tf.identity(values)),
        }[kind]

        @tf.function
        def step():
            def replica():
                return tf.reduce_sum(communicator.answer(request()))

            return self._strategy.run(replica)

        return lambda: step().numpy()


def main():
    """Do what the parent asks for."""
    faulthandler.enable()
    replies = take_standard_output()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    worker = Worker(tf_dgc.prepare(tf_dgc.multi_worker_strategy()))
    reply(replies, ready=True)
    for line in sys.stdin:
        reply(replies, ms=worker.run(**json.loads(line)))


if __name__ == "__main__":
    main()
