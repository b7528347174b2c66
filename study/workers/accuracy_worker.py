"""One worker of `time_to_accuracy.py`, which does what it is told.

    PYTHONPATH=study:benchmarks python study/workers/accuracy_worker.py SETTINGS

"warm" takes first steps and undoes them; "run" goes on until the optimizer has had so
many updates, by new examples in each step; and "curve" is answered by the accuracy of
weights on the way, each worker by that of some of them.
"""

import json
import sys

from common import server_processes
from tasks.timed import TASKS
from training.timed_worker import Worker

import tf_dgc


def make_worker(settings):
    """Return a worker of the task."""
    part = settings["rank"], len(settings["speeds"])
    task = TASKS[settings["task"]](settings["folder"], settings["width"], part)
    return Worker(settings, task, lambda _: _optimizer(settings, task.recipe))


def _optimizer(settings, recipe):
    """Return the optimizer of a method, with the recipe of the dense run."""
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
