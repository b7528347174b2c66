"""A worker that trains and keeps snapshots of its weights for a later evaluation."""

from common import server_processes


class Worker(server_processes.Worker):
    """A worker that trains with its part of the examples.

    The request "run" trains until the optimizer has done `updates` updates. The worker
    that takes snapshots answers "curve" with their accuracies.

    Args:
        settings: settings of `server_processes.Worker`, and `updates`.
        task: task with `model` and `draws`, and `evaluate` for the curve.
        data_seed: seed of the random examples.
        batch_size: examples of a step.
        make_optimizer: function of the settings that returns the optimizer.
        snapshots: `Snapshots` or `UpdateSnapshots`; None if another process takes them.
    """

    def __init__(
        self, settings, task, data_seed, batch_size, make_optimizer, snapshots
    ):
        self._task, self._snapshots = task, snapshots
        self._updates = settings["updates"]
        super().__init__(
            settings,
            task.model,
            make_optimizer,
            lambda model: task.draws(data_seed, batch_size),
        )

    def answer(self, request):
        """Handle a request of the parent."""
        if request["do"] == "run":
            updates = self._updates
            return self.run(float("inf"), updates, updates, self._take_snapshot)
        if request["do"] == "curve":
            return self._payload_bytes() | self._curve(request["seconds"])
        return super().answer(request)

    def _take_snapshot(self, seconds, updates):
        if self._snapshots:
            self._snapshots.take_if_due(self.model.get_weights, seconds, updates)

    def _payload_bytes(self):
        """Return the payload bytes of a step, without protocols."""
        stats = getattr(self.optimizer, "stats", None)
        return {
            "push": stats and round(stats.bytes / stats.steps),
            "pull_bytes": getattr(self.optimizer, "bytes_per_pull", None),
        }

    def _curve(self, seconds):
        if not self._snapshots:
            return {}
        weights = self.model.get_weights()
        curve = self._snapshots.curve(self._task, weights, seconds, self._updates)
        return {"curve": curve}
