"""One worker of `exchange.py`, which starts it and tells it what to do.

    PYTHONPATH=benchmarks python benchmarks/workers/exchange_worker.py SETTINGS

Every line of standard input is a JSON object: `exchange`, `kind` and `payload`, its
bytes, or entries and sparsity; "shards" are such entries after gradients were added up
inside the machine, and "step" is a whole step of a model of them. It is done once, at
the time `start`, if it is given, traced before the first time, and answered by its `ms`
and `bytes`, and a step by the exchange that the optimizer states; "probe" by the
numbers of `tf_dgc.collectives.LinkSpeeds`.
"""

import faulthandler
import functools
import gc
import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from common.algorithms import METHODS, create_algorithm, overlapped
from common.replies import reply, take_standard_output

import tf_dgc
from tf_dgc.codecs import buffer
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.codecs.value_types import encode_values
from tf_dgc.collectives import link_benchmark
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    BufferLayout,
    DenseOrSparse,
)
from tf_dgc.compressors import num_sent
from tf_dgc.optimizers import autotune

_WIDTH = 1000  # of the tensor of a step


class Worker:
    """Sums and gathers along all ways.

    Args:
        strategy: strategy of all workers.
    """

    def __init__(self, strategy):
        self._strategy = strategy
        self._step = functools.cache(self._make)
        self._whole = {}  # of one step, as all of them would not be in memory

    def run(self, exchange, kind, payload, start=0.0):
        """Do it once; return milliseconds, and bytes of this worker."""
        if kind == "probe":
            return {"links": self._probe()}
        if kind == "step":
            return self._take(exchange, payload, start)
        step, size = self._step(exchange, kind, payload)
        return {"ms": _milliseconds(step, start), "bytes": size}

    def _take(self, exchange, payload, start):
        """Take a step; return milliseconds, bytes, and what the optimizer states."""
        if (exchange, payload) not in self._whole:
            self._whole.clear()
            gc.collect()
            made = make_step(self._strategy, exchange, payload)
            self._whole[exchange, payload] = made
        step, optimizer = self._whole[exchange, payload]
        found = {"ms": _milliseconds(step, start)}
        stats = optimizer.stats
        return {**found, "bytes": stats.bytes_per_step, "stated": stats.collective}

    def _probe(self):
        """Return what all workers measure together, as a list."""
        place, *_ = link_benchmark.local_ranks(self._strategy)
        measuring = autotune.probe_links(place, autotune.local_speeds)
        return link_benchmark.run_probe(self._strategy, measuring)

    def _make(self, exchange, kind, payload):
        number = self._strategy.num_replicas_in_sync
        communicator = Communicator(self._strategy, create_algorithm(exchange, number))
        add_up = kind == "shards"
        inside = len(self._strategy.run(communicator.machine)) if add_up else 1
        value, request = REQUESTS[kind](payload, inside)
        # A variable, or the graph would have it as a constant.
        variable = tf.Variable(value, trainable=False)
        gradient = tf.Variable(_gradient(payload, inside) if add_up else [0.0])

        @tf.function
        def step():
            def replica():
                before = []
                if add_up:
                    rows = AllToAll(tf.identity(gradient), communicator.node_workers())
                    before = [tf.reduce_sum(communicator.answer(rows), axis=0)]
                with tf.control_dependencies(before):
                    reply = communicator.answer(request(tf.identity(variable)))
                replies = [r for r in tf.nest.flatten(reply) if r is not None]
                return tf.add_n([_some(r) for r in replies])

            return self._strategy.run(replica)

        return step, value.nbytes


def _milliseconds(step, start):
    """Wait for the time at which all workers of this machine start, and take it."""
    time.sleep(max(0.0, start - time.monotonic()))
    begin = time.perf_counter()
    step().numpy()
    return 1000 * (time.perf_counter() - begin)


def make_step(strategy, exchange, payload):
    """Return a step of a model of one tensor, whose gradient is there; its optimizer.

    Args:
        strategy: strategy of all workers.
        exchange: name of an exchange, or of `METHODS`.
        payload: entries and sparsity.
    """
    size, sparsity = payload.split(":")
    shape = [-(-int(float(size)) // _WIDTH), _WIDTH]
    with strategy.scope():
        number = strategy.num_replicas_in_sync
        optimizer = _optimizer(exchange, float(sparsity), number)
        variable = keras.Variable(np.zeros(shape, "float32"))
        optimizer.build([variable])
    drawn = np.random.default_rng().normal(size=shape).astype("float32")
    gradient = tf.Variable(drawn, trainable=False)

    @tf.function
    def step():
        def replica():
            optimizer.apply([tf.identity(gradient)], [variable])
            return tf.cast(optimizer.iterations.value, tf.float32)

        return strategy.run(replica)

    return step, optimizer


def _optimizer(exchange, sparsity, number):
    """Return an optimizer of steps without overlap, which one tensor does not have."""
    settings = {"diagnostics": tf_dgc.Diagnostics(check_every=None)}
    sgd = keras.optimizers.SGD(0.01, momentum=0.9)
    if exchange == "scale_com":
        method = tf_dgc.compressors.ScaleCom(sparsity)
        return tf_dgc.CompressedOptimizer(sgd, method, **settings)
    if exchange in METHODS:
        return tf_dgc.CompressedOptimizer(sgd, exchange, **settings)
    algorithm = "auto" if exchange == "auto" else create_algorithm(exchange, number)
    collective = overlapped(algorithm, False)
    return tf_dgc.DGCOptimizer(sgd, sparsity, collective=collective, **settings)


def _some(tensor):
    """Return a number, to be had when the tensor is there."""
    return tf.reduce_sum(tf.cast(tf.reshape(tensor, [-1])[:1], tf.float32))


def _gradient(payload, inside):
    """Return the shards of a gradient, a row for each worker of the machine."""
    size, _ = payload.split(":")
    return np.ones([inside, -(-int(float(size)) // inside)], "float32")


def _sum(payload, _):
    return np.ones(int(payload) // 4, "float32"), AllReduce


def _gather(payload, _):
    return np.ones(int(payload) // 4, "int32"), AllGather


def _entries(payload, inside):
    """Return what `DGCOptimizer` sends of one tensor, and how it asks."""
    size, sparsity = payload.split(":")
    size = int(float(size))
    k = num_sent(-(-size // inside), float(sparsity))
    form = BufferLayout([TensorSpec("", (size,), tf.float32, False)], [k])
    rng = np.random.default_rng()
    positions = np.sort(rng.choice(size, k, replace=False)).astype("int32")
    values = encode_values(tf.constant(rng.normal(size=k), tf.float32), "float32")
    selection = buffer.SelectedEntries(tf.constant(positions), values)
    words = buffer.encode_sparse(*form, [selection], tf.constant(True)).numpy()
    return words, lambda w: DenseOrSparse(False, tf.zeros([0]), w, layout=form)


REQUESTS = {"sum": _sum, "gather": _gather, "entries": _entries, "shards": _entries}


def main():
    """Do what the parent asks for."""
    faulthandler.enable()
    replies = take_standard_output()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    worker = Worker(tf_dgc.prepare(tf_dgc.multi_worker_strategy()))
    reply(replies, ready=True)
    for line in sys.stdin:
        reply(replies, **worker.run(**json.loads(line)))


if __name__ == "__main__":
    main()
