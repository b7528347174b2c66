"""What a task of the study is: a model, and its data by seed and step."""

import numpy as np

from tasks.recipes import RECIPES


class Task:
    """A model and its data.

    Subclasses set the attributes and define the methods that raise here. Everything
    random follows from a seed, the step and the worker, so that a run may go on from
    any step, and runs of one seed see the same.

    Args:
        data: folder of the data sets, `../shared` in the plan.
        tuning: whether to leave the test set alone, and measure on a part of the
            training data that is then not trained on.

    Attributes:
        name: name of the task.
        metric: name of what `evaluate` returns.
        higher_is_better: direction of the metric.
        recipe: `recipes.Recipe` of the task's name.
        num_examples: number of examples of a pass over the training data.
    """

    name: str
    metric: str
    higher_is_better: bool
    num_examples: int

    def __init__(self, data, tuning=False):
        self.recipe = RECIPES[self.name]
        self._data, self._tuning = data, tuning

    def model(self):
        """Return the network, with weights drawn anew."""
        raise NotImplementedError

    def carry(self):
        """Return what a worker takes from one step to the next, NumPy arrays."""
        return []

    def batch(self, seed, step, worker, workers):
        """Return inputs and targets of one worker's step, counted from 0."""
        raise NotImplementedError

    def outputs(self, model, inputs, carry, seed):
        """Return the logits while training, and what to carry on.

        Args:
            model: network of `model`.
            inputs: tensor of `batch`.
            carry: tensors, as of `carry`.
            seed: int32 [2], for what is random in the network.
        """
        del seed
        return model(inputs, training=True), carry

    def evaluate(self, model):
        """Return the metric of a model, with the data that is measured on."""
        raise NotImplementedError

    def steps_per_epoch(self, workers):
        """Return the number of steps of a pass over the training data."""
        return self.num_examples / (self.recipe.batch_size * workers)


def shuffled(seed, step, worker, workers, batch_size, num_examples):
    """Return the numbers of a worker's examples in a step, and what is random in it.

    Each pass over the data has an order of its own, of which workers take their turns;
    the examples that do not fill a step are left out of the pass.

    Returns:
        int64 [batch_size], and a NumPy generator of this seed, step and worker.
    """
    per_epoch = num_examples // (batch_size * workers)
    epoch, at = divmod(step, per_epoch)
    order = _order(seed, epoch, num_examples)
    start = (at * workers + worker) * batch_size
    random = np.random.default_rng([seed, 1, step, worker])
    return order[start : start + batch_size], random


_last_order = {}


def _order(seed, epoch, num_examples):
    key = seed, epoch, num_examples
    if key not in _last_order:
        _last_order.clear()  # one at a time
        random = np.random.default_rng([seed, 0, epoch])
        _last_order[key] = random.permutation(num_examples)
    return _last_order[key]
