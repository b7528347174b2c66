"""A worker process of `time_to_accuracy.py`.

    PYTHONPATH=study:benchmarks python study/workers/accuracy_worker.py SETTINGS

It handles three requests: "warm" takes first steps and undoes them; "run" trains until
the optimizer has done the requested number of updates; "curve" returns the accuracies
of this worker's share of the snapshots.
"""

import json
import sys

from common import server_processes
from tasks.timed import TASKS
from training.timed_worker import Worker

import tf_dgc


def make_worker(settings):
    """Return the worker of the task in `settings`."""
    part = settings["rank"], len(settings["speeds"])
    task = TASKS[settings["task"]](settings["folder"], settings["width"], part)
    return Worker(settings, task, lambda _: _optimizer(settings, task.recipe))


def _optimizer(settings, recipe):
    """Return the optimizer of a method around the SGD of the recipe."""
    method, updates = settings["mode"], settings["updates"]
    sgd = recipe.sgd(updates)
    if method == "dense":
        return sgd
    if method == "dgc":
        return tf_dgc.dgc_for_steps(sgd, updates)
    return tf_dgc.CompressedOptimizer(sgd, method)


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    server_processes.serve(None, lambda: make_worker(settings))
