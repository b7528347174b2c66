"""Hints about settings that save no bytes."""

import re

import keras
import pytest
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc import callbacks

WARMUP = tf_dgc.schedules.PiecewiseConstantSparsity([1], [0.0, 0.9])


def dgc(sparsity=0.999):
    return lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1), sparsity)


class Composed(tf_dgc.compressors.TopK):
    """Never goes dense, unlike the fused step of `TopK` itself."""


def top_k(sparsity):
    method = Composed(sparsity)
    return lambda: tf_dgc.CompressedOptimizer(keras.optimizers.SGD(0.1), method)


@pytest.mark.parametrize(
    ("units", "make_optimizer", "expected"),
    [
        (4, dgc(), "sent uncompressed.*`min_compress_size=1024`.*`tf_dgc.prepa"),
        (40, top_k(0.01), "Send fewer entries, or train"),
        (40, dgc(), None),
        (40, dgc(WARMUP), None),  # dense steps of a schedule are intended
        (4, dgc(0.0), None),
    ],
    ids=["exempt", "more", "less", "dense step", "dense"],
)
def test_hint_if_compression_saves_nothing(strategies, units, make_optimizer, expected):
    shapes = [(40, units)]
    weights = initial_weights("float32", shapes)
    trainer = Trainer(strategies[2], make_optimizer, weights)
    assert callbacks.compression_hint(trainer.optimizer) is None
    (gradients,) = make_gradients(2, 1, "float32", shapes)
    trainer.step(gradients)
    hint = callbacks.compression_hint(trainer.optimizer)
    assert (hint is None) == (expected is None)
    assert not expected or re.search(expected, hint)
