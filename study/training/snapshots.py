"""Snapshots of weights during a run, evaluated after the run."""

import time

from tasks import small


class Snapshots:
    """Snapshots at equal intervals of time.

    Args:
        every: seconds between two snapshots.
    """

    def __init__(self, every):
        self._every, self._next = every, 0.0
        self._snapshots = []

    def take_if_due(self, get_weights, seconds, updates):
        """Copy the weights if a snapshot is due.

        Args:
            get_weights: function that returns copies of the weights.
            seconds: seconds since the run began.
            updates: updates that the optimizer has done.
        """
        if seconds >= self._next:
            self._next = self._every * (1 + seconds // self._every)
            self._snapshots.append((seconds, updates, get_weights()))

    def curve(self, task, weights, seconds, updates):
        """Return [(seconds, updates, accuracy)] including the end of the run.

        Args:
            task: task whose `evaluate` returns the accuracy.
            weights: final weights.
            seconds: duration of the run.
            updates: number of updates of the run.
        """
        snapshots = [each for each in self._snapshots if each[0] < seconds]
        return evaluate_snapshots(task, [*snapshots, (seconds, updates, weights)])


class UpdateSnapshots:
    """Snapshots at equal numbers of updates, including one before the first update.

    Args:
        number: number of snapshots after the first one.
        updates: number of updates of the run; at least `number`.

    Attributes:
        snapshots: (seconds, updates, weights) of each.
        copying: seconds spent on copying.
    """

    def __init__(self, number, updates):
        self._due = {round(updates * i / number) for i in range(number + 1)}
        self.snapshots, self.copying = [], 0.0

    def take_if_due(self, get_weights, seconds, updates):
        """Copy the weights if a snapshot is due; see `Snapshots`."""
        if updates in self._due:
            start = time.perf_counter()
            self.snapshots.append((seconds, updates, get_weights()))
            self.copying += time.perf_counter() - start


def evaluate_snapshots(task, snapshots):
    """Return [(seconds, updates, accuracy)] for [(seconds, updates, weights)].

    Args:
        task: task whose `evaluate` returns the accuracy.
        snapshots: snapshots of the weights.
    """
    model = task.model()
    predict = small.predictor(model)
    curve = []
    for seconds, updates, weights in snapshots:
        model.set_weights(weights)
        curve.append((round(seconds, 3), updates, task.evaluate(predict)))
    return curve
