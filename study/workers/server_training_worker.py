"""One worker of `server_training.py`, or its server; both do what they are told.

    PYTHONPATH=study:benchmarks python study/workers/server_training_worker.py SETTINGS

As `server_worker.py`, but "run" goes on until the optimizer has had so many updates, by
new examples in each step; and "curve" is answered by the accuracy of the weights at
equal times, by the server or, where there is none, by worker 0.
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
    """The server, which keeps snapshots of what it serves: so that they cost no bytes.

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
        """Return what has been done so far, or the curve."""
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
        # What `numpy` returns may be the memory that the next update changes.
        return [np.array(v.numpy()) for v in self.model.variables]

    def _curve(self, seconds):
        self._is_over.set()
        task = Digits(self._settings["folder"], self._settings["width"])
        last = self._weights(), seconds, self.model.clock
        return {"curve": self._snapshots.curve(task, *last)}


def make_worker(settings):
    """Return a worker, of which the first looks where there is no server."""
    rank, number = settings["rank"], len(settings["speeds"])
    task = Digits(settings["folder"], settings["width"], (rank, number))
    by = [settings["seed"], rank], settings["batch_size"]
    looks = rank == 0 and settings["mode"] not in server_processes.SERVED
    snapshots = Snapshots(settings["every"]) if looks else None
    return evaluating_worker.Worker(settings, task, by, optimizer, snapshots)


def optimizer(settings):
    """Return the optimizer of a mode."""
    decay = keras.optimizers.schedules.CosineDecay
    rate = decay(settings["learning_rate"], settings["updates"])
    inner = keras.optimizers.SGD(rate, momentum=0.9)
    if settings["inner"] == "adam":
        inner = keras.optimizers.Adam(rate)
    if settings["mode"] == "dense":
        return inner
    if settings["mode"] == "dgc":
        by = settings["sparsity"], settings["factor_masking"]
        return tf_dgc.DGCOptimizer(
            inner, by[0], corrections=tf_dgc.Corrections(factor_masking=by[1])
        )
    return server_processes.optimizer(inner, settings)


def main(settings):
    """Do what the parent asks for."""
    server_processes.serve(
        lambda task: Server(task, settings), lambda: make_worker(settings)
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
