"""One worker of `time_to_accuracy.py`, which does what it is told.

    PYTHONPATH=benchmarks python benchmarks/workers/accuracy_worker.py SETTINGS

"run" goes on until the optimizer has had so many updates, by new examples in each step;
and "curve" is answered by worker 0 with the accuracy of its weights at equal times.
"""

import json
import sys

from common import looking, served
from study.timed_tasks import TASKS

import tf_dgc


def make_worker(settings):
    """Return a worker, of which the first looks."""
    rank, number = settings["rank"], len(settings["speeds"])
    asks = settings["folder"], settings["width"], (rank, number)
    task = TASKS[settings["task"]](*asks)
    by = settings["seed"], task.recipe.batch_size
    return looking.Worker(
        settings, task, by, lambda _: _optimizer(settings, task.recipe), rank == 0
    )


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
    served.serve(None, lambda: make_worker(settings))
