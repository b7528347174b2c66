"""Drives an optimizer with fixed gradients on the workers of one process."""

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import tf_collectives
from tf_dgc.collectives.communicator import Communicator

SHAPES = [(40, 50), (50,), (50, 30), (7, 3)]


def initial_weights(dtype="float64", shapes=SHAPES, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s).astype(dtype) for s in shapes]


def make_gradients(num_workers, steps, dtype="float64", shapes=SHAPES, seed=2):
    """Return `gradients[step][worker][tensor]`."""
    rng = np.random.default_rng(seed)
    return [
        [[rng.normal(size=s).astype(dtype) for s in shapes] for _ in range(num_workers)]
        for _ in range(steps)
    ]


class Trainer:
    """Variables and an optimizer under a strategy, stepped with fixed gradients.

    A trace takes longer than dozens of eager steps, so steps are eager by default. With
    `pytest --traced` they are traced by default.
    """

    always_traced = False

    def __init__(self, strategy, make_optimizer, weights, traced=None):
        self.strategy = strategy
        with strategy.scope():
            self.variables = [
                keras.Variable(w, dtype=w.dtype.name, name=f"w{i}")
                for i, w in enumerate(weights)
            ]
            self.optimizer = make_optimizer()
            self.optimizer.build(self.variables)
        traced = self.always_traced if traced is None else traced
        self._run = tf.function(self._distributed) if traced else self._distributed

    def _distributed(self, gradients):
        def replica(*local):
            self.optimizer.apply_gradients(
                list(zip(local, self.variables, strict=True))
            )

        self.strategy.run(replica, args=gradients)

    def per_replica(self, gradients):
        """Turn `gradients[worker][tensor]` into one per-replica value per tensor.

        None stands for a missing gradient; it must be None for all workers.
        """
        return tuple(
            None
            if gradients[0][i] is None
            else self.strategy.experimental_distribute_values_from_function(
                lambda context, i=i: tf.constant(
                    gradients[context.replica_id_in_sync_group][i]
                )
            )
            for i in range(len(self.variables))
        )

    def step(self, gradients):
        self._run(self.per_replica(gradients))

    def save(self):
        """Return weights and the stores that Keras would save."""
        stores = {}, {}
        for optimizer, store in zip(self._optimizers(), stores, strict=True):
            optimizer.save_own_variables(store)
        return self.weights(), stores

    def load(self, saved):
        weights, stores = saved
        for variable, value in zip(self.variables, weights, strict=True):
            variable.assign(value)
        for optimizer, store in zip(self._optimizers(), stores, strict=True):
            optimizer.load_own_variables(store)

    def _optimizers(self):
        return self.optimizer, self.optimizer.inner_optimizer

    def state(self):
        """Return all variables of all workers, by path."""
        local = self.strategy.experimental_local_results
        variables = [*self.variables, *self.optimizer.variables]
        return {v.path: [copy.numpy() for copy in local(v.value)] for v in variables}

    def weights(self):
        return [v.numpy() for v in self.variables]

    def replica_weights(self):
        """Return each worker's own copy of every variable."""
        local = self.strategy.experimental_local_results
        return [[copy.numpy() for copy in local(v.value)] for v in self.variables]

    def local(self, variables):
        """Return `values[worker][tensor]` of per-worker variables."""
        local = self.strategy.experimental_local_results
        columns = [[copy.numpy() for copy in local(v.value)] for v in variables]
        return [list(row) for row in zip(*columns, strict=True)]


def record_collectives(monkeypatch):
    """Return a list to which every collective's bytes are appended."""
    sizes = []

    def spy(launch):
        def launch_and_record(launcher, tensor):
            size = tensor.dtype.size * tf.size(tensor)
            tf.py_function(lambda n: sizes.append(int(n)), [size], [])
            return launch(launcher, tensor)

        return launch_and_record

    for name in ("launch_all_gather", "launch_all_reduce"):
        monkeypatch.setattr(tf_collectives, name, spy(getattr(tf_collectives, name)))
    return sizes


def damage_replies(monkeypatch):
    """Change the bodies of received buffers, not their headers."""
    choose = Communicator._answer_dense_or_sparse

    def damage(self, *args):
        reply = choose(self, *args)
        head, body = reply.buffers[:, :9], reply.buffers[:, 9:]
        return reply._replace(buffers=tf.concat([head, body + 1], axis=1))

    monkeypatch.setattr(Communicator, "_answer_dense_or_sparse", damage)
