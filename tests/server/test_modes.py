"""Pushes of several workers, by threads, against NumPy and the mirrored run."""

import keras
import numpy as np
import pytest
from harness import SHAPES, Trainer, initial_weights, make_gradients
from serving import Served, Trained, leaving, run_together

import tf_dgc

STEPS = 3


def run(monkeypatch, mode, inner, gradients, weights, **settings):
    """Return the server's weights, and each worker's, after given gradients."""
    number = len(gradients[0])
    with Served(number) as served:
        workers = [
            Trained(served.optimizer(monkeypatch, i, inner(), mode, **settings), weights)
            for i in range(number)
        ]
        with leaving(*workers):

            def train(i):
                for step in gradients:
                    workers[i].step(step[i])

            run_together(*(lambda i=i: train(i) for i in range(number)))
        return served, served.weights(), [w.weights() for w in workers]


@pytest.mark.parametrize("mode", [("sync",), ("ssp", 0)])
def test_sync_equals_mirrored_workers(strategies, monkeypatch, mode):
    """In float64, step for step, with momentum correction and what is kept back."""
    gradients, weights = make_gradients(2, STEPS), initial_weights()

    def inner():
        return keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=3.0)

    method = tf_dgc.compressors.TopK(0.9)
    settings = {"compressor": method, "min_compress_size": 100}
    mirrored = Trainer(
        strategies[2],
        lambda: tf_dgc.CompressedOptimizer(
            inner(), momentum_correction=True, **settings
        ),
        weights,
    )
    for step in gradients:
        halves = [[g / 2 for g in worker] for worker in step]
        mirrored.step(halves)
    served, found, each = run(
        monkeypatch, mode[0], inner, gradients, weights, staleness=(mode + (None,))[1],
        **settings,
    )
    for mine, theirs in zip(found, mirrored.weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for worker in each:
        for mine, theirs in zip(worker, found, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert served.loop.service.model.clock == STEPS
