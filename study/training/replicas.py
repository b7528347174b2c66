"""Workers of one process that train a task together, and their complete state."""

import keras
import numpy as np
import tensorflow as tf

from training import states


class Replicas:
    """A model and an optimizer under a strategy of N workers.

    Every worker has a replica of the model, with the same initial weights, and
    normalizes over its own batch.

    Args:
        task: a `recipe_task.Task`.
        make_optimizer: called without arguments in the scope of the strategy.
        strategy: strategy of `trainer.make_strategy`.
        seed: seed of the weights, the order of the data and all other randomness.

    Attributes:
        step: number of completed steps.
        optimizer: the result of `make_optimizer`.
    """

    def __init__(self, task, make_optimizer, strategy, seed):
        self.step = 0
        self._task, self._strategy, self._seed = task, strategy, seed
        self._workers = strategy.num_replicas_in_sync
        keras.utils.set_random_seed(seed)
        self._evaluation_model = task.model()
        with strategy.scope():
            self._model = task.model()
            self.optimizer = make_optimizer()
            self.optimizer.build(self._model.trainable_variables)
        self._model.set_weights(self._evaluation_model.get_weights())
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._carry = [np.stack([a] * self._workers) for a in task.carry()]
        self._train = tf.function(self._on_all_workers, autograph=False)

    def train(self):
        """Train one step and return the mean loss."""
        batches = [
            self._task.batch(self._seed, self.step, worker, self._workers)
            for worker in range(self._workers)
        ]
        inputs, targets = (np.stack(part) for part in zip(*batches, strict=True))
        loss, self._carry = self._train(
            inputs, targets, self._carry, np.int32(self.step)
        )
        self.step += 1
        return float(loss)

    def evaluate(self):
        """Return the metric, with moving statistics averaged over workers."""
        values = [np.mean(states.values(v), axis=0) for v in self._model.variables]
        variables = self._evaluation_model.variables
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        return self._task.evaluate(self._evaluation_model)

    @property
    def num_parameters(self):
        """Number of trainable entries."""
        return sum(v.shape.num_elements() for v in self._model.trainable_variables)

    @property
    def sent_bytes(self):
        """Bytes that a worker passed to collectives.

        Stock optimizers do not count them; theirs are dense float32 gradients.
        """
        stats = getattr(self.optimizer, "stats", None)
        return stats.bytes if stats else 4 * self.num_parameters * self.step

    def state(self):
        """Return the complete state of the run as NumPy arrays by name."""
        values = states.get_values(self._variables())
        carry = {f"carry{i}": np.asarray(a) for i, a in enumerate(self._carry)}
        return {"step": np.int64(self.step), **values, **carry}

    def restore(self, state):
        """Resume from a `state` of a run with the same task, method and workers."""
        self.step = int(state["step"])
        states.set_values(self._variables(), state)
        self._carry = [state[f"carry{i}"] for i in range(len(self._carry))]

    def _variables(self):
        return [*self._model.variables, *self.optimizer.variables]

    def _on_all_workers(self, inputs, targets, carry, step):
        losses, carries = self._strategy.run(
            self._on_one_worker, (inputs, targets, carry, step)
        )
        losses = self._strategy.experimental_local_results(losses)
        parts = [self._strategy.experimental_local_results(c) for c in carries]
        return tf.add_n(losses) / self._workers, [tf.stack(p) for p in parts]

    def _on_one_worker(self, inputs, targets, carry, step):
        worker = tf.distribute.get_replica_context().replica_id_in_sync_group
        seed = tf.stack([self._seed, step * self._workers + worker])
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            outputs, carry = self._task.outputs(
                self._model, inputs[worker], [c[worker] for c in carry], seed
            )
            # Within a strategy, Keras divides losses by the number of workers.
            scaled = self._loss(targets[worker], outputs)
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return scaled * self._workers, carry
