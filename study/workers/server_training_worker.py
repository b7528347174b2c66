"""A worker or server process of `server_training.py`.

    PYTHONPATH=study:benchmarks python study/workers/server_training_worker.py SETTINGS

It differs from `server_worker.py` in two requests: "run" trains until the optimizer has
done the requested number of updates, with new examples in each step; "curve" returns
the accuracy at equal intervals of time, from the server or, without one, from worker 0.
"""

import json
import sys
import threading
import time

import keras
import numpy as np
from common import server_processes
from tasks.digits import Digits
from training import evaluating_worker
from training.snapshots import Snapshots

import tf_dgc


class Server(server_processes.Server):
    """A server that takes snapshots of its weights, which costs no network traffic.

    Args:
        task: task of this process.
        settings: settings of the mode.
    """

    def __init__(self, task, settings):
        super().__init__(task)
        self._settings = settings
        self._snapshots = Snapshots(settings["every"])
        self._is_over = threading.Event()

    def answer(self, request):
        """Handle a request of the parent."""
        if request["do"] == "run":
            threading.Thread(target=self._watch, daemon=True).start()
        if request["do"] == "curve":
            return self._curve(request["seconds"])
        return super().answer(request)

    def _watch(self):
        start = time.perf_counter()
        while not self._is_over.wait(0.01):
            seconds = time.perf_counter() - start
            self._snapshots.take_if_due(self._weights, seconds, self.model.clock)

    def _weights(self):
        # `numpy` may return a view of memory that the next update changes.
        return [np.array(v.numpy()) for v in self.model.variables]

    def _curve(self, seconds):
        self._is_over.set()
        task = Digits(self._settings["folder"], self._settings["width"])
        curve = self._snapshots.curve(task, self._weights(), seconds, self.model.clock)
        return {"curve": curve}


def make_worker(settings):
    """Return a worker; without a server, the first one takes snapshots."""
    rank, number = settings["rank"], len(settings["speeds"])
    has_server = settings["mode"] in server_processes.SERVED
    return evaluating_worker.Worker(
        settings,
        Digits(settings["folder"], settings["width"], (rank, number)),
        [settings["seed"], rank],
        settings["batch_size"],
        make_optimizer,
        None if has_server or rank else Snapshots(settings["every"]),
    )


def make_optimizer(settings):
    """Return the optimizer of a mode."""
    decay = keras.optimizers.schedules.CosineDecay
    rate = decay(settings["learning_rate"], settings["updates"])
    inner = keras.optimizers.SGD(rate, momentum=0.9)
    if settings["inner"] == "adam":
        inner = keras.optimizers.Adam(rate)
    if settings["mode"] == "dense":
        return inner
    if settings["mode"] == "dgc":
        masking = settings["factor_masking"]
        return tf_dgc.DGCOptimizer(
            inner,
            settings["sparsity"],
            corrections=tf_dgc.Corrections(factor_masking=masking),
        )
    return server_processes.create_optimizer(inner, settings)


def main(settings):
    """Serve the parent's requests."""
    server_processes.serve(
        lambda task: Server(task, settings), lambda: make_worker(settings)
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
