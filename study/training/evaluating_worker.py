"""A worker that trains to an end, of which one looks how good its weights were."""

from common import server_processes


class Worker(server_processes.Worker):
    """A worker that trains by its part of the examples.

    "run" goes on until the optimizer has had so many updates; "curve" is answered by
    the accuracy of the weights on the way, by the worker that looks.

    Args:
        settings: of `server_processes.Worker`, and `updates`.
        task: what is trained: `model` and `draws`, and `evaluate` for the curve.
        draw_by: seed of what is drawn, and examples of a step.
        make_optimizer: function of the settings that returns the optimizer.
        snapshots: where copies of weights are kept; None if it is another one that
            looks.
    """

    def __init__(self, settings, task, draw_by, make_optimizer, snapshots):
        self._task, self._snapshots = task, snapshots
        self._updates = settings["updates"]
        super().__init__(
            settings, task.model, make_optimizer, lambda model: task.draws(*draw_by)
        )

    def answer(self, request):
        """Do what is asked for."""
        if request["do"] == "run":
            return self.run(float("inf"), self._updates, self._updates, self._look)
        if request["do"] == "curve":
            return self._counted() | self._curve(request["seconds"])
        return super().answer(request)

    def _look(self, seconds, updates):
        if self._snapshots:
            self._snapshots.take_if_due(self.model.get_weights, seconds, updates)

    def _counted(self):
        """Return bytes of a step that were handed over, without protocols."""
        stats = getattr(self.optimizer, "stats", None)
        return {
            "push": stats and round(stats.bytes / stats.steps),
            "pull_bytes": getattr(self.optimizer, "bytes_per_pull", None),
        }

    def _curve(self, seconds):
        if not self._snapshots:
            return {}
        last = self.model.get_weights(), seconds, self._updates
        return {"curve": self._snapshots.curve(self._task, *last)}
