"""Weights as they were on the way of a run, which are evaluated when it is over."""

import time

from tasks import small


class Snapshots:
    """Copies of weights at equal times; evaluating them costs the run no time.

    Args:
        every: seconds from one to the next.
    """

    def __init__(self, every):
        self._every, self._next = every, 0.0
        self._taken = []

    def take_if_due(self, weights, seconds, updates):
        """Keep the weights, if it is time to.

        Args:
            weights: function that returns copies of them.
            seconds: since the run began.
            updates: of the optimizer by now.
        """
        if seconds >= self._next:
            self._next = self._every * (1 + seconds // self._every)
            self._taken.append((seconds, updates, weights()))

    def curve(self, task, weights, seconds, updates):
        """Return [(seconds, updates, accuracy)], the last one of the run's end.

        Args:
            task: task that says how good a model is.
            weights: weights at the end.
            seconds: that the run took.
            updates: of the optimizer by then.
        """
        taken = [each for each in self._taken if each[0] < seconds]
        return evaluated(task, [*taken, (seconds, updates, weights)])


class Looks:
    """Copies of weights at equal numbers of updates, before the first one too.

    Args:
        number: of copies behind a first one, at update 0.
        updates: at which the last one is taken; `number` at least.

    Attributes:
        taken: (seconds, updates, weights) of each.
        copying: seconds that copying has taken.
    """

    def __init__(self, number, updates):
        self._due = {round(updates * i / number) for i in range(number + 1)}
        self.taken, self.copying = [], 0.0

    def take_if_due(self, weights, seconds, updates):
        """Keep the weights, if they are to be; see `Snapshots`."""
        if updates in self._due:
            start = time.perf_counter()
            self.taken.append((seconds, updates, weights()))
            self.copying += time.perf_counter() - start


def evaluated(task, taken):
    """Return [(seconds, updates, accuracy)] of [(seconds, updates, weights)].

    Args:
        task: task that says how good a model is.
        taken: weights, and when they were those of the model.
    """
    model = task.model()
    predict = small.predictor(model)
    found = []
    for at, done, values in taken:
        model.set_weights(values)
        found.append((round(at, 3), done, task.evaluate(predict)))
    return found
