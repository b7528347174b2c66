"""Uncompressed tensors travel in the buffer, or by all-reduce where that is cheaper."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import (
    Trainer,
    damage_replies,
    initial_weights,
    make_gradients,
    record_collectives,
)

import tf_dgc
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.steps import native
from tf_dgc.steps.base import split_uncompressed

SGD = keras.optimizers.SGD
# With three workers the bias gets its own all-reduce.
SHAPES = [(50, 40), (60_000,), (7, 3)]


def tensors(*sizes, uncompressed):
    return [
        TensorSpec("", (n,), tf.float32, i in uncompressed, "float32")
        for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("layout", "num_workers", "expected"),
    [
        (tensors(9, 10**6, 10**6, uncompressed=[0, 1]), 1, [[0, 1, 2]]),
        (tensors(9, 10**6, 10**6, uncompressed=[0, 1]), 2, [[0, 1, 2]]),
        (tensors(9, 10**6, 10**6, uncompressed=[0, 1]), 3, [[2], [0, 1]]),
        (tensors(9, 1000, 10**6, uncompressed=[0, 1]), 3, [[0, 1, 2]]),
        (tensors(9, 1000, 10**6, uncompressed=[0, 1]), 64, [[2], [0, 1]]),
        (tensors(9, 10**6, uncompressed=[0, 1]), 64, [[0, 1]]),
        (tensors(9, 10**6, uncompressed=[]), 64, [[0, 1]]),
    ],
)
def test_split_of_tensors(layout, num_workers, expected):
    assert split_uncompressed(layout, num_workers) == expected


@pytest.mark.parametrize("path", ["native", "operations", "composed"])
def test_collectives_of_a_step(monkeypatch, strategies, path):
    if path == "operations":
        monkeypatch.setattr(native, "is_available", lambda variables: False)
    method = "qsgd" if path == "composed" else tf_dgc.compressors.TopK(0.99)
    weights = initial_weights("float32", SHAPES)
    trainer = Trainer(
        strategies[3],
        lambda: tf_dgc.CompressedOptimizer(
            SGD(1.0), method, diagnostics=tf_dgc.Diagnostics(check_every=None)
        ),
        weights,
    )
    sizes = record_collectives(monkeypatch)
    (gradients,) = make_gradients(3, 1, "float32", SHAPES)
    trainer.step(gradients)
    all_reduce_size = 4 * (1 + 60_000 + 21)
    assert sorted(sizes)[3:] == [all_reduce_size] * 3
    assert len(sizes) == 6
    assert sum(sizes) == 3 * trainer.optimizer.stats.bytes_per_step
    for i in (1, 2):
        np.testing.assert_allclose(
            trainer.weights()[i],
            weights[i] - sum(local[i] for local in gradients),
            atol=1e-5,
        )


@pytest.mark.parametrize("inner", [SGD(1.0), keras.optimizers.Adam(1.0)])
def test_refused_buffer_changes_no_weight(monkeypatch, strategies, inner):
    weights = initial_weights("float32", SHAPES)
    trainer = Trainer(strategies[3], lambda: tf_dgc.DGCOptimizer(inner, 0.99), weights)
    damage_replies(monkeypatch)
    (gradients,) = make_gradients(3, 1, "float32", SHAPES)
    with pytest.raises(tf.errors.InvalidArgumentError, match="The buffer of worker 0"):
        trainer.step(gradients)
    for copies, before in zip(trainer.replica_weights(), weights, strict=True):
        for copy in copies:
            np.testing.assert_array_equal(copy, before)


def test_worker_with_a_nonfinite_tensor_is_skipped(strategies):
    weights = initial_weights("float32", SHAPES)
    trainer = Trainer(strategies[3], lambda: tf_dgc.DGCOptimizer(SGD(1.0), 0), weights)
    (gradients,) = make_gradients(3, 1, "float32", SHAPES)
    gradients[0][0][3, 3] = np.nan
    gradients[2][1][3] = np.inf
    trainer.step(gradients)
    assert trainer.optimizer.stats.nonfinite == 2
    for after, before, gradient in zip(
        trainer.weights(), weights, gradients[1], strict=True
    ):
        np.testing.assert_allclose(after, before - gradient, atol=1e-5)


def test_overflow_in_both_parts_is_counted_once(strategies):
    weights = initial_weights("float32", SHAPES)
    trainer = Trainer(
        strategies[3],
        lambda: tf_dgc.DGCOptimizer(
            SGD(1e-9),
            0.9,
            corrections=tf_dgc.Corrections(scale_before_accumulation=False),
        ),
        weights,
    )
    zeros = [[np.zeros(s, "float32") for s in SHAPES] for _ in range(3)]
    trainer.step(zeros)
    residual = [r.value for r in trainer.optimizer.residual]
    for i in (0, 1):  # of every worker, in a tensor of each part
        for copy in trainer.strategy.experimental_local_results(residual[i]):
            copy.assign(tf.fill(copy.shape, 3e38))
    zeros[1][0][:] = zeros[1][1][:] = 3e38
    zeros[2][1][:] = 3e38
    trainer.step(zeros)
    assert trainer.optimizer.stats.nonfinite == 2
