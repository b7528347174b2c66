"""A worker of `time_to_accuracy.py`, timed from its initial weights."""

import numpy as np

import tf_dgc
from training import evaluating_worker, snapshots, states


class Worker(evaluating_worker.Worker):
    """A worker whose run begins at update 0, and which shares the evaluation.

    "warm" takes steps to trace functions and open connections, and then restores the
    weights, layer statistics, the optimizer's state and the order of the data. "curve"
    returns the accuracies of this worker's share of the snapshots, and a checksum of
    each snapshot, by which the workers' weights are compared.

    Args:
        settings: settings of `evaluating_worker.Worker`, and `seed` and `looks`.
        task: one of `tasks.timed.TASKS`.
        make_optimizer: function of the settings that returns the optimizer.
    """

    def __init__(self, settings, task, make_optimizer):
        self._share = slice(settings["rank"], None, len(settings["speeds"]))
        self._seed, self._batch_size = settings["seed"], task.recipe.batch_size
        super().__init__(
            settings,
            task,
            self._seed,
            self._batch_size,
            make_optimizer,
            snapshots.UpdateSnapshots(settings["looks"], settings["updates"]),
        )

    def answer(self, request):
        """Handle a request of the parent."""
        if request["do"] == "warm":
            return self._warm_up_and_restore()
        if request["do"] == "run":
            self._take_snapshot(0.0, 0)
        return super().answer(request)

    def _warm_up_and_restore(self):
        variables = self._variables()
        initial = states.get_values(variables)
        reply = super().answer({"do": "warm"})
        if len(self._variables()) != len(variables):
            raise RuntimeError("The first steps created variables")
        states.set_values(variables, initial)
        self._draw = self._task.draws(self._seed, self._batch_size)
        return reply

    def _variables(self):
        return [*self.model.variables, *self.optimizer.variables]

    def _curve(self, seconds):
        del seconds
        averaged = [
            (seconds, updates, self._average_statistics(weights))
            for seconds, updates, weights in self._snapshots.snapshots
        ]
        sums = [
            float(sum(np.sum(w, dtype=np.float64) for w in weights))
            for *_, weights in averaged
        ]
        curve = snapshots.evaluate_snapshots(self._task, averaged[self._share])
        return {"curve": curve, "sums": sums, "copying": self._snapshots.copying}

    def _average_statistics(self, weights):
        """Return weights with layer statistics averaged over workers, as in `fit`.

        This is a collective, so it waits until the run is over.
        """
        self.model.set_weights(weights)
        tf_dgc.average_statistics(self.model)
        return self.model.get_weights()
