"""Base class of tasks whose data are determined by seed, step and worker."""

import numpy as np

from tasks.recipes import RECIPES


class Task:
    """A model and its data.

    Subclasses set the attributes and implement the methods that raise here. A seed, the
    step and the worker determine all randomness, so that a run can resume from any
    step, and runs with the same seed use the same data.

    Args:
        data: folder of the data sets, `../shared` in the plan.
        tuning: whether to evaluate on held-back training data instead of the test set.

    Attributes:
        name: name of the task.
        metric: name of the metric that `evaluate` returns.
        higher_is_better: whether larger values of the metric are better.
        recipe: `recipes.Recipe` of the task.
        num_examples: number of training examples.
    """

    name: str
    metric: str
    higher_is_better: bool
    num_examples: int

    def __init__(self, data, tuning=False):
        self.recipe = RECIPES[self.name]
        self._data, self._tuning = data, tuning

    def model(self):
        """Return the network with random weights."""
        raise NotImplementedError

    def carry(self):
        """Return the initial state that is carried between steps, NumPy arrays."""
        return []

    def batch(self, seed, step, worker, workers):
        """Return inputs and targets of one worker's step, counted from 0."""
        raise NotImplementedError

    def outputs(self, model, inputs, carry, seed):
        """Return the logits while training, and the new carried state.

        Args:
            model: network of `model`.
            inputs: tensor of `batch`.
            carry: tensors, like `carry`.
            seed: int32 [2], seed of the network's randomness.
        """
        del seed
        return model(inputs, training=True), carry

    def evaluate(self, model):
        """Return the metric of a model on the test data."""
        raise NotImplementedError

    def steps_per_epoch(self, workers):
        """Return the number of steps of a pass over the training data."""
        return self.num_examples / (self.recipe.batch_size * workers)


def shuffled(seed, step, worker, workers, batch_size, num_examples):
    """Return the indices of a worker's examples in a step, and a random generator.

    Each epoch has its own order of the examples, which are dealt to the workers. The
    last examples, which do not fill a step, are left out of the epoch.

    Returns:
        int64 [batch_size], and a NumPy generator of this seed, step and worker.
    """
    steps_per_epoch = num_examples // (batch_size * workers)
    epoch, step_of_epoch = divmod(step, steps_per_epoch)
    order = _order(seed, epoch, num_examples)
    start = (step_of_epoch * workers + worker) * batch_size
    random = np.random.default_rng([seed, 1, step, worker])
    return order[start : start + batch_size], random


_last_order = {}


def _order(seed, epoch, num_examples):
    key = seed, epoch, num_examples
    if key not in _last_order:
        _last_order.clear()  # keeps only the current epoch
        random = np.random.default_rng([seed, 0, epoch])
        _last_order[key] = random.permutation(num_examples)
    return _last_order[key]
