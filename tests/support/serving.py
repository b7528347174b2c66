"""Servers in this process, with threads as workers."""

import contextlib
import json
import sys
import threading
import time
import traceback

import keras
import numpy as np
import tensorflow as tf

import tf_dgc
from tf_dgc._internals import rpc
from tf_dgc.multiworker.launch import launcher
from tf_dgc.server import worker
from tf_dgc.server.process import ServerLoop
from tf_dgc.server.sessions import Limits

QUICK = Limits(lease=60.0, start=60.0, wait=60.0, work=120.0, hold=0.2)


class Server:
    """A server on a port of its own; a context manager that ends it.

    Args:
        num_workers: number of workers.
        limits: the server's time limits in seconds.
        shard: index of the server, and number of servers.
    """

    def __init__(self, num_workers, limits, shard):
        self.lines, self.error = [], None
        (port,) = launcher.free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self.transport = rpc.Server(self.address, 2 * num_workers)
        settings = {"log": self.lines.append, "secret": "", "shard": shard}
        self.loop = ServerLoop(self.transport, num_workers, limits, **settings)
        self.service = self.loop.runs.service(0)
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, daemon=True),
            threading.Thread(target=self._wake, daemon=True),
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def join(self):
        """Wait until the loop ends."""
        self._threads[0].join(10)
        assert not self._threads[0].is_alive()

    def __exit__(self, *_):
        self.loop.runs.is_over = lambda now: True
        self._threads[0].join(10)
        self._stopped.set()
        self._threads[1].join(10)
        assert self.error is None, self.error

    def _serve(self):
        try:
            self.loop.run()
        except BaseException as error:
            self.error = error
            raise

    def _wake(self):
        while not self._stopped.wait(0.05):
            self.transport.wake()


class ServerGroup:
    """One or more servers; a context manager that ends them.

    Args:
        num_workers: number of workers.
        limits: the servers' time limits in seconds.
        servers: number of servers.
    """

    def __init__(self, num_workers, limits=QUICK, servers=1):
        self.num_workers = num_workers
        shards = [(i, servers) for i in range(servers)]
        self.servers = [Server(num_workers, limits, shard) for shard in shards]
        self._optimizers, self._stack = [], contextlib.ExitStack()

    def __enter__(self):
        for server in self.servers:
            self._stack.enter_context(server)
        return self

    def __exit__(self, *_):
        for optimizer in self._optimizers:  # or their threads run on in other tests
            optimizer.leave()
        self._stack.close()
        # A later test's server may have the same port; its runs are others.
        addresses = {server.address for server in self.servers}
        for task in [t for t in worker._current_runs if addresses & {*t.servers}]:
            del worker._current_runs[task]

    @property
    def loop(self):
        """Loop of the first server."""
        return self.servers[0].loop

    @property
    def lines(self):
        return [line for server in self.servers for line in server.lines]

    @property
    def models(self):
        return [server.service.model for server in self.servers]

    @property
    def model(self):
        """Model of the first server."""
        return self.models[0]

    def weights(self):
        """Return all weights in the model's order, by the names of `TracedTrainer`."""
        variables = [v for model in self.models for v in model.variables]
        variables.sort(key=lambda v: int(v.name[1:]))
        return [v.numpy() for v in variables]

    def config(self, index):
        cluster = {
            "ps": [server.address for server in self.servers],
            "worker": [f"127.0.0.1:{i + 1}" for i in range(self.num_workers)],
        }
        return json.dumps(
            {"cluster": cluster, "task": {"type": "worker", "index": index}}
        )

    def optimizer(self, monkeypatch, index, inner, *args, **settings):
        """Return the optimizer of a worker."""
        with monkeypatch.context() as patch:
            patch.setenv("TF_CONFIG", self.config(index))
            optimizer = tf_dgc.ServerOptimizer(inner, *args, **settings)
        self._optimizers.append(optimizer)
        return optimizer


class TracedTrainer:
    """Variables and an optimizer that takes traced steps with fixed gradients."""

    def __init__(self, optimizer, weights):
        self.optimizer = optimizer
        self.variables = [
            keras.Variable(w, dtype=w.dtype.name, name=f"w{i}")
            for i, w in enumerate(weights)
        ]
        optimizer.build(self.variables)
        self._apply = tf.function(self._step)

    def _step(self, gradients):
        self.optimizer.apply_gradients(
            list(zip(gradients, self.variables, strict=True))
        )

    def step(self, gradients):
        self._apply([tf.constant(g) for g in gradients])

    def weights(self):
        return [v.numpy() for v in self.variables]


def run_together(*functions, seconds=180.0):
    """Run each function in a thread; return their results, or raise their error."""
    results, errors = [None] * len(functions), [None] * len(functions)

    def run(i, function):
        try:
            results[i] = function()
        except BaseException as error:
            errors[i] = error

    threads = [
        threading.Thread(target=run, args=pair, daemon=True)
        for pair in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stacks = [_stack_of(t) for t in threads if t.is_alive()]
    assert not stacks, "\n".join([f"after {seconds} s: {errors}", *stacks])
    for error in errors:
        if error is not None:
            raise error
    return results


def _stack_of(thread):
    """Return the stack of a thread that still runs, as text."""
    return "".join(traceback.format_stack(sys._current_frames()[thread.ident]))


@contextlib.contextmanager
def leave_at_end(*trained):
    """Let workers leave the server at the end."""
    try:
        yield
    finally:
        for worker in trained:
            worker.optimizer.leave()


def some_weights(shapes, dtype="float64", seed=1):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s).astype(dtype) for s in shapes]
