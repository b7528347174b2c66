"""Worker process of `exchange.py` and `machines.py`.

    PYTHONPATH=benchmarks python benchmarks/workers/exchange_worker.py SETTINGS

Every line of standard input is a JSON object with `exchange`, an algorithm; `payload`,
bytes or "entries:sparsity"; and `kind`:

sum, gather    of a vector of `payload` bytes
entries        a sparse step's entries
shards         such entries after an intra-node reduce
step           a whole step of a model
probe          measures `tf_dgc.collectives.LinkSpeeds`

The worker runs the request once, at the time `start` if there is one, and answers with
`ms` and `bytes`; a step also with `stated`, the algorithm of the optimizer's stats. The
first request of a kind traces.
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

_WIDTH = 1000  # columns of a step's tensor


class Worker:
    """Runs collectives and steps with any algorithm.

    Args:
        strategy: strategy of all workers.
    """

    def __init__(self, strategy):
        self._strategy = strategy
        self._cached_request = functools.cache(self._create_request)
        self._step_key = None
        self._step = None

    def run(self, exchange, kind, payload, start=0.0):
        """Run a request once; return milliseconds, and bytes of this worker."""
        if kind == "probe":
            return {"links": self._probe()}
        if kind == "step":
            return self._run_step(exchange, payload, start)
        step, size = self._cached_request(exchange, kind, payload)
        return {"ms": _run_at(step, start), "bytes": size}

    def _run_step(self, algorithm, payload, start):
        if (algorithm, payload) != self._step_key:
            self._step = None
            gc.collect()  # memory suffices for one optimizer only
            self._step = create_step(self._strategy, algorithm, payload)
            self._step_key = algorithm, payload
        step, optimizer = self._step
        ms = _run_at(step, start)
        stats = optimizer.stats
        return {"ms": ms, "bytes": stats.bytes_per_step, "stated": stats.collective}

    def _probe(self):
        """Return the link speeds that all workers measure together, as a list."""
        rank, *_ = link_benchmark.local_ranks(self._strategy)
        probe = autotune.probe_links(rank, autotune.local_speeds)
        return link_benchmark.run_probe(self._strategy, probe)

    def _create_request(self, name, kind, payload):
        """Return a function that runs a request, and the bytes of its payload."""
        algorithm = create_algorithm(name, self._strategy.num_replicas_in_sync)
        communicator = Communicator(self._strategy, algorithm)
        reduces_first = kind == "shards"
        node_size = (
            len(self._strategy.run(communicator.node_workers)) if reduces_first else 1
        )
        value, create_request = REQUESTS[kind](payload, node_size)
        # Variables, since constants would be part of the graph.
        variable = tf.Variable(value, trainable=False)
        gradient = tf.Variable(
            _gradient_shards(payload, node_size) if reduces_first else [0.0]
        )

        @tf.function
        def step():
            def replica():
                reduced = []
                if reduces_first:
                    shards = AllToAll(
                        tf.identity(gradient), communicator.node_workers()
                    )
                    reduced = [tf.reduce_sum(communicator.answer(shards), axis=0)]
                with tf.control_dependencies(reduced):
                    reply = communicator.answer(create_request(tf.identity(variable)))
                replies = [r for r in tf.nest.flatten(reply) if r is not None]
                return tf.add_n([_first_entry(r) for r in replies])

            return self._strategy.run(replica)

        return step, value.nbytes


def _run_at(step, start):
    """Run a step at a time of the machine's monotonic clock; return milliseconds."""
    time.sleep(max(0.0, start - time.monotonic()))
    begin = time.perf_counter()
    step().numpy()
    return 1000 * (time.perf_counter() - begin)


def create_step(strategy, algorithm, payload):
    """Return a function that takes a step of a model of one tensor, and the optimizer.

    The gradient is constant.

    Args:
        strategy: strategy of all workers.
        algorithm: name of a collective algorithm, or of `METHODS`.
        payload: "entries:sparsity".
    """
    size, sparsity = payload.split(":")
    shape = [-(-int(float(size)) // _WIDTH), _WIDTH]
    with strategy.scope():
        optimizer = _optimizer(
            algorithm, float(sparsity), strategy.num_replicas_in_sync
        )
        variable = keras.Variable(np.zeros(shape, "float32"))
        optimizer.build([variable])
    values = np.random.default_rng().normal(size=shape).astype("float32")
    gradient = tf.Variable(values, trainable=False)

    @tf.function
    def step():
        def replica():
            optimizer.apply([tf.identity(gradient)], [variable])
            return tf.cast(optimizer.iterations.value, tf.float32)

        return strategy.run(replica)

    return step, optimizer


def _optimizer(name, sparsity, num_workers):
    """Return an optimizer without overlap: one tensor has nothing to overlap with."""
    diagnostics = tf_dgc.Diagnostics(check_every=None)
    sgd = keras.optimizers.SGD(0.01, momentum=0.9)
    if name in METHODS:
        compressor = name
        if name == "scale_com":
            compressor = tf_dgc.compressors.ScaleCom(sparsity)
        return tf_dgc.CompressedOptimizer(sgd, compressor, diagnostics=diagnostics)
    algorithm = "auto" if name == "auto" else create_algorithm(name, num_workers)
    return tf_dgc.DGCOptimizer(
        sgd,
        sparsity,
        collective=overlapped(algorithm, False),
        diagnostics=diagnostics,
    )


def _first_entry(tensor):
    """Return the first entry, or 0, available once the whole tensor is."""
    return tf.reduce_sum(tf.cast(tf.reshape(tensor, [-1])[:1], tf.float32))


def _gradient_shards(payload, node_size):
    """Return a gradient with a row of shards for each worker of the node."""
    size, _ = payload.split(":")
    return np.ones([node_size, -(-int(float(size)) // node_size)], "float32")


def _sum(payload, _):
    return np.ones(int(payload) // 4, "float32"), AllReduce


def _gather(payload, _):
    return np.ones(int(payload) // 4, "int32"), AllGather


def _entries(payload, node_size):
    """Return the buffer that `DGCOptimizer` sends of one tensor, and its request."""
    size, sparsity = payload.split(":")
    size = int(float(size))
    k = num_sent(-(-size // node_size), float(sparsity))
    layout = BufferLayout([TensorSpec("", (size,), tf.float32, False)], [k])
    rng = np.random.default_rng()
    positions = np.sort(rng.choice(size, k, replace=False)).astype("int32")
    values = encode_values(tf.constant(rng.normal(size=k), tf.float32), "float32")
    selection = buffer.SelectedEntries(tf.constant(positions), values)
    words = buffer.encode_sparse(*layout, [selection], tf.constant(True)).numpy()
    return words, lambda w: DenseOrSparse(False, tf.zeros([0]), w, layout=layout)


REQUESTS = {"sum": _sum, "gather": _gather, "entries": _entries, "shards": _entries}


def main():
    """Answer the requests of the benchmark."""
    faulthandler.enable()
    replies = take_standard_output()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    worker = Worker(tf_dgc.prepare(tf_dgc.multi_worker_strategy()))
    reply(replies, ready=True)
    for line in sys.stdin:
        reply(replies, **worker.run(**json.loads(line)))


if __name__ == "__main__":
    main()
