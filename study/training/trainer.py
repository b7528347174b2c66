"""Trains a task with an optimizer on N workers of one process, for several seeds."""

import contextlib
import math
import time

import keras
import numpy as np
import tensorflow as tf
from common import progress
from tasks.small import predictor

import tf_dgc
from training import states

MIN_RANK, MIN_SIZE = 2, 1024
"""Tensors of a lower rank or size are uncompressed by default."""


def is_uncompressed(shape):
    """Whether a tensor of this shape is uncompressed by default."""
    return len(shape) < MIN_RANK or math.prod(shape) < MIN_SIZE


def make_strategy(num_workers):
    """Return a strategy whose workers are logical CPUs of this process."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * num_workers
    tf.config.set_logical_device_configuration(cpu, logical)
    devices = [f"CPU:{i}" for i in range(num_workers)]
    return tf_dgc.prepare(tf.distribute.MirroredStrategy(devices))


class Trainer:
    """A model and an optimizer under a strategy, traced once for all runs.

    Args:
        task: a `small.Task`.
        make_optimizer: called without arguments in the scope of the strategy.
        strategy: strategy of `make_strategy`.

    Attributes:
        optimizer: the result of `make_optimizer`.
        seconds: duration of the last run, including evaluations.
    """

    def __init__(self, task, make_optimizer, strategy):
        self.task = task
        self._strategy = strategy
        with strategy.scope():
            self._model = task.model()
            self.optimizer = make_optimizer()
            self.optimizer.build(self._model.trainable_variables)
        self._initial = states.get_values(self.optimizer.variables)
        self._predict = predictor(self._model)
        self._step = tf.function(self._on_all_workers)
        self._gradients = self._loss_and_gradients
        if task.jit_compile:
            self._gradients = tf.function(self._gradients, jit_compile=True)
        self.seconds = 0.0

    def run(self, seed, steps, evaluate_every, checkpoint=None):
        """Train from the initial weights; return [(steps, bytes, metric)].

        Bytes are those that one worker passed to the collectives; None if the optimizer
        does not count them.

        Args:
            seed: seed of the weights and of the data.
            steps: number of steps.
            evaluate_every: steps between two evaluations.
            checkpoint: a `RunCheckpoint`, from which the run resumes if it exists.
        """
        self._reset(seed)
        random = np.random.default_rng(seed)
        done, points = self._resume(checkpoint, random)
        for step in progress.track(range(done + 1, steps + 1), "steps"):
            start = time.perf_counter()
            self.step(random)
            if step % evaluate_every == 0 or step == steps:
                value = self.evaluate(self.task.evaluate)
                points.append((step, self._bytes(), value))
            self.seconds += time.perf_counter() - start
            if checkpoint and checkpoint.is_due():
                self._save(checkpoint, step, points, random)
        return points

    def step(self, random):
        """Train one step on new random batches, and wait for it."""
        batches = [self.task.batch(random) for _ in range(self.num_workers)]
        inputs, targets = zip(*batches, strict=True)
        self._step(self._distribute(inputs), self._distribute(targets)).numpy()

    def evaluate(self, metric):
        """Return a metric of the consensus weights.

        Args:
            metric: function of a function that predicts.
        """
        consensus = getattr(self.optimizer, "consensus_weights", contextlib.nullcontext)
        with consensus():
            return metric(self._predict)

    @property
    def num_workers(self):
        """Number of workers of the strategy."""
        return self._strategy.num_replicas_in_sync

    @property
    def num_parameters(self):
        """Number of trainable entries of the model."""
        return sum(v.shape.num_elements() for v in self._model.trainable_variables)

    @property
    def num_uncompressed(self):
        """Number of trainable entries that are uncompressed by default."""
        shapes = [v.shape for v in self._model.trainable_variables]
        return sum(math.prod(shape) for shape in shapes if is_uncompressed(shape))

    def _resume(self, checkpoint, random):
        """Return the number of completed steps, and their points."""
        self.seconds = 0.0
        loaded = checkpoint.load() if checkpoint else None
        if loaded is None:
            return 0, []
        arrays, notes = loaded
        states.set_values(self._variables(), arrays)
        random.bit_generator.state = notes["random"]
        self.seconds = notes["seconds"]
        return notes["step"], [tuple(point) for point in notes["points"]]

    def _save(self, checkpoint, step, points, random):
        notes = {"step": step, "points": points, "seconds": self.seconds}
        notes["random"] = random.bit_generator.state
        checkpoint.save(states.get_values(self._variables()), notes)

    def _variables(self):
        return [*self._model.variables, *self.optimizer.variables]

    def _reset(self, seed):
        keras.utils.set_random_seed(seed)
        fresh = self.task.model()
        self._model.set_weights(fresh.get_weights())
        states.set_values(self.optimizer.variables, self._initial)

    def _on_all_workers(self, inputs, targets):
        losses = self._strategy.run(self._on_one_worker, (inputs, targets))
        return self._strategy.reduce("SUM", losses, axis=None)

    def _on_one_worker(self, inputs, targets):
        loss, gradients = self._gradients(inputs, targets)
        self.optimizer.apply(gradients, self._model.trainable_variables)
        return loss

    def _loss_and_gradients(self, inputs, targets):
        with tf.GradientTape() as tape:
            loss = self.task.loss(self._model, inputs, targets)
        return loss, tape.gradient(loss, self._model.trainable_variables)

    def _distribute(self, values):
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[context.replica_id_in_sync_group])
        )

    def _bytes(self):
        stats = getattr(self.optimizer, "stats", None)
        return stats.bytes if stats else None
