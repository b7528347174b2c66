"""Train a task with an optimizer on N workers of one process, again and again."""

import statistics
import time

import keras
import numpy as np
import tensorflow as tf

import tf_dgc
from common.tasks import predictor


def make_strategy(num_workers):
    """Return a strategy of workers that are logical CPUs of this process."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * num_workers
    tf.config.set_logical_device_configuration(cpu, logical)
    devices = [f"CPU:{i}" for i in range(num_workers)]
    return tf_dgc.prepare(tf.distribute.MirroredStrategy(devices))


class Trainer:
    """A model and an optimizer under a strategy; traced once for all its runs.

    Args:
        task: a `tasks.Task`.
        make_optimizer: called without arguments in the scope of the strategy.
        strategy: of `make_strategy`.
    """

    def __init__(self, task, make_optimizer, strategy):
        self.task = task
        self._strategy = strategy
        with strategy.scope():
            self._model = task.model()
            self.optimizer = make_optimizer()
            self.optimizer.build(self._model.trainable_variables)
        self._initial = [np.array(v) for v in self.optimizer.variables]
        self._predict = predictor(self._model)
        self._step = tf.function(self._on_all_workers)

    def run(self, seed, steps, evaluate_every):
        """Train from the beginning; return [(steps, bytes sent, metric)].

        Bytes are those that one worker handed to the collectives; None if the
        optimizer does not count them.
        """
        self._reset(seed)
        random = np.random.default_rng(seed)
        points = []
        for step in range(1, steps + 1):
            self.step(random)
            if step % evaluate_every == 0 or step == steps:
                value = self.task.evaluate(self._predict)
                points.append((step, self._bytes(), value))
        return points

    def step(self, random):
        """Train one step on batches drawn anew, and wait for it."""
        batches = [self.task.batch(random) for _ in range(self.num_workers)]
        inputs, targets = zip(*batches, strict=True)
        self._step(self._distribute(inputs), self._distribute(targets)).numpy()

    @property
    def num_workers(self):
        """Workers of the strategy."""
        return self._strategy.num_replicas_in_sync

    @property
    def num_parameters(self):
        """Trainable entries of the model."""
        return sum(v.shape.num_elements() for v in self._model.trainable_variables)

    def _reset(self, seed):
        keras.utils.set_random_seed(seed)
        fresh = self.task.model()
        self._model.set_weights(fresh.get_weights())
        for variable, value in zip(
            self.optimizer.variables, self._initial, strict=True
        ):
            variable.assign(value)

    def _on_all_workers(self, inputs, targets):
        losses = self._strategy.run(self._on_one_worker, (inputs, targets))
        return self._strategy.reduce("SUM", losses, axis=None)

    def _on_one_worker(self, inputs, targets):
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.task.loss(self._model, inputs, targets)
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def _distribute(self, values):
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[context.replica_id_in_sync_group])
        )

    def _bytes(self):
        stats = getattr(self.optimizer, "stats", None)
        return stats.bytes if stats else None


def extra_ms(trainer, dense, rounds=15):
    """Return milliseconds that a step takes one worker beyond a dense one's.

    Steps of both alternate. All workers share this machine, so the difference is
    divided by their number.
    """
    random = np.random.default_rng(0)
    times = {trainer: [], dense: []}
    for _ in range(rounds):
        for each, spent in times.items():
            start = time.perf_counter()
            each.step(random)
            spent.append(1e3 * (time.perf_counter() - start))
    mine, others = (statistics.median(spent) for spent in times.values())
    return (mine - others) / trainer.num_workers
