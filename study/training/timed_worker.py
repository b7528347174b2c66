"""A worker of `time_to_accuracy.py`, timed from the weights as they were drawn."""

import numpy as np

import tf_dgc
from training import evaluating_worker, snapshots, states


class Worker(evaluating_worker.Worker):
    """A worker that begins at update 0 and, with all others, looks when all is over.

    "warm" takes steps, by which functions are traced and connections made, and then
    puts weights, statistics, the optimizer's state and what is drawn back as they were.
    "curve" is answered by the accuracy of a part of the copies, each worker's another
    one, and by sums of all of them, by which workers are compared.

    Args:
        settings: of `evaluating_worker.Worker`, and `seed` and `looks`.
        task: one of `timed_tasks`.
        make_optimizer: function of the settings that returns the optimizer.
    """

    def __init__(self, settings, task, make_optimizer):
        self._part = slice(settings["rank"], None, len(settings["speeds"]))
        self._draw_by = settings["seed"], task.recipe.batch_size
        looks = snapshots.Looks(settings["looks"], settings["updates"])
        super().__init__(settings, task, self._draw_by, make_optimizer, looks)

    def answer(self, request):
        """Do what is asked for."""
        if request["do"] == "warm":
            return self._warm_and_restored()
        if request["do"] == "run":
            self._look(0.0, 0)
        return super().answer(request)

    def _warm_and_restored(self):
        before = self._variables()
        drawn = states.take(before)
        found = super().answer({"do": "warm"})
        if len(self._variables()) != len(before):
            raise RuntimeError("The first steps have made variables")
        states.put(before, drawn)
        self._draw = self._task.draws(*self._draw_by)
        return found

    def _variables(self):
        return [*self.model.variables, *self.optimizer.variables]

    def _curve(self, seconds):
        del seconds
        taken = [(*when, self._averaged(w)) for *when, w in self._snapshots.taken]
        sums = [float(sum(np.sum(w, dtype=np.float64) for w in ws)) for *_, ws in taken]
        curve = snapshots.evaluated(self._task, taken[self._part])
        return {"curve": curve, "sums": sums, "copying": self._snapshots.copying}

    def _averaged(self, weights):
        """Return weights with the mean of all workers' statistics, as `fit` has it.

        That is a collective, and so it waits until the run is over.
        """
        self.model.set_weights(weights)
        tf_dgc.average_statistics(self.model)
        return self.model.get_weights()
