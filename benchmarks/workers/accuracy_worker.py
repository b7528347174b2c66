"""One worker of `time_to_accuracy.py`, which does what it is told.

    PYTHONPATH=benchmarks python benchmarks/workers/accuracy_worker.py SETTINGS

"run" goes on until the optimizer has had so many updates, by new examples in each step;
and "curve" is answered by worker 0 with the accuracy of its weights at equal times.
"""

import json
import sys

from common import served
from common.snapshots import Snapshots
from study.timed_tasks import TASKS

import tf_dgc


class Worker(served.Worker):
    """A worker that trains by its part of the examples.

    Args:
        settings: settings of the run.
    """

    def __init__(self, settings):
        rank, number = settings["rank"], len(settings["speeds"])
        asks = settings["folder"], settings["width"], (rank, number)
        self._task = TASKS[settings["task"]](*asks)
        seed, size = settings["seed"], self._task.recipe.batch_size
        super().__init__(
            settings,
            self._task.model,
            lambda _: _optimizer(settings, self._task.recipe),
            lambda model: self._task.draws(seed, size),
        )
        self._updates = settings["updates"]
        self._snapshots = Snapshots(settings["every"])
        self._looks = rank == 0

    def answer(self, request):
        """Do what is asked for."""
        if request["do"] == "run":
            return self.run(float("inf"), self._updates, self._updates, self._look)
        if request["do"] == "curve":
            stats = getattr(self.optimizer, "stats", None)
            curve = self._curve(request["seconds"])
            return curve | {"handed": stats and round(stats.bytes / stats.steps)}
        return super().answer(request)

    def _look(self, seconds, updates):
        if self._looks:
            self._snapshots.take_if_due(self.model.get_weights, seconds, updates)

    def _curve(self, seconds):
        if not self._looks:
            return {}
        last = self.model.get_weights(), seconds, self._updates
        return {"curve": self._snapshots.curve(self._task, *last)}


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
    served.serve(None, lambda: Worker(settings))
