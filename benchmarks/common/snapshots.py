"""Weights as they were at equal times of a run, which are evaluated when it is over."""

from common import tasks


class Snapshots:
    """Copies of weights; evaluating them costs the run no time.

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
        model = task.model()
        predict = tasks.predictor(model)
        taken = [each for each in self._taken if each[0] < seconds]
        found = []
        for at, done, values in [*taken, (seconds, updates, weights)]:
            model.set_weights(values)
            found.append((round(at, 3), done, task.evaluate(predict)))
        return found
