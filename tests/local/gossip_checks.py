"""Settings and helpers that the tests of gossip share."""

import numpy as np

SHAPES = [(12, 10), (5,)]
RATE = 0.125  # learning rate, exact in float32
PATH = [[0.75, 0.25, 0], [0.25, 0.5, 0.25], [0, 0.25, 0.75]]


def flat(tensors):
    return np.concatenate([np.ravel(t) for t in tensors])


def worker_weights(trainer):
    """Return the flat weights of each worker."""
    return [flat(w) for w in zip(*trainer.replica_weights(), strict=True)]


def local_updates(gradients):
    """Return how far SGD moves each worker by its own gradient."""
    return [-RATE * len(gradients) * flat(g) for g in gradients]


def disagreement(trainer):
    """Return the norm of the standard deviation over workers."""
    return np.linalg.norm(np.std(worker_weights(trainer), axis=0))
