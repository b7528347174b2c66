"""Collective algorithms that drop entries: the effect on each worker's state."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc.codecs import buffer, value_types
from tf_dgc.codecs.buffer import SelectedEntries
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.steps import native
from tf_dgc.steps.base import plan_step

SHAPES = [(40, 50), (5,), (60, 25)]
SPARSITY = 0.99
STEPS = 4
MOMENTUM = 0.5


class DropsEveryOther(Communicator):
    """Drops every other entry that a worker sends."""

    drops_entries = True

    def __init__(self, strategy, value_dtype):
        super().__init__(strategy)
        layout = [
            TensorSpec("", s, tf.float32, len(s) < 2, value_dtype) for s in SHAPES
        ]
        self._plan = plan_step(layout, SPARSITY, self.num_workers)

    def answer(self, request, check=None):
        layout, counts = self._plan.layout, self._plan.counts
        positions = buffer.sent_positions(request.words, layout, counts)
        values = buffer.sent_values(request.words, layout, counts)
        selections, delivered = [], []
        for t, p, v in zip(layout, positions, values, strict=True):
            if not t.uncompressed:
                is_delivered = tf.range(tf.size(v)) % 2 == 0
                v = tf.where(is_delivered, v, 0.0)
                delivered.append(is_delivered)
            selections.append(
                SelectedEntries(p, value_types.encode_values(v, t.value_type))
            )
        words = buffer.encode_sparse(layout, counts, selections, tf.constant(True))
        reply = super().answer(request._replace(words=words), check)
        return reply._replace(delivered=tf.concat(delivered, axis=0))


def oracle(weights, gradients, factor_masking, value_dtype):
    """Return weights, velocity and residual after steps `[step][worker][tensor]`."""
    dtype = np.dtype(value_dtype)
    weights = [w.copy() for w in weights]
    workers = range(len(gradients[0]))
    velocity = [[np.zeros_like(w) for w in weights] for _ in workers]
    residual = [[np.zeros_like(w) for w in weights] for _ in workers]
    for step in gradients:
        for i, w in enumerate(weights):
            total = np.zeros(w.size, "float32")
            for u, v, local in zip(velocity, residual, step, strict=True):
                u[i] = np.float32(MOMENTUM) * u[i] + local[i]
                v[i] = v[i] + u[i]
                flat, masked = v[i].reshape(-1), u[i].reshape(-1)
                if w.ndim < 2:
                    total += flat
                    flat[:] = 0
                    continue
                k = int(np.ceil((1 - SPARSITY) * w.size - 1e-6))
                selected = np.sort(np.argsort(-np.abs(flat), kind="stable")[:k])
                delivered = selected[::2]
                sent = flat[delivered].astype(dtype).astype("float32")
                total[delivered] += sent
                flat[delivered] -= sent
                if factor_masking:
                    masked[delivered] = 0
            w -= total.reshape(w.shape)
    return weights, velocity, residual


@pytest.mark.parametrize(
    ("path", "factor_masking", "value_dtype"),
    [
        ("native", True, "float32"),
        ("native", False, "float16"),
        ("operations", True, "float16"),
    ],
)
def test_dropped_entries_return_to_the_residual(
    monkeypatch, strategies, path, factor_masking, value_dtype
):
    if path == "operations":
        monkeypatch.setattr(native, "is_available", lambda variables: False)
    strategy = strategies[2]

    def make_optimizer():
        optimizer = tf_dgc.DGCOptimizer(
            keras.optimizers.SGD(1.0, momentum=MOMENTUM),
            SPARSITY,
            corrections=tf_dgc.Corrections(factor_masking=factor_masking),
            value_dtype=value_dtype,
            diagnostics=tf_dgc.Diagnostics(check_every=None, track_staleness=True),
        )
        optimizer.communicator = DropsEveryOther(strategy, value_dtype)
        return optimizer

    weights = initial_weights("float32", SHAPES)
    trainer = Trainer(strategy, make_optimizer, weights)
    gradients = make_gradients(2, STEPS, "float32", SHAPES)
    for local in gradients:
        trainer.step(local)
    expected_state = oracle(weights, gradients, factor_masking, value_dtype)
    optimizer = trainer.optimizer
    actual_state = (
        trainer.weights(),
        trainer.local(optimizer.velocity),
        trainer.local(optimizer.residual),
    )
    pairs = zip(
        tf.nest.flatten(actual_state), tf.nest.flatten(expected_state), strict=True
    )
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    # Four steps of 20 and 15 entries, half of which are delivered.
    last_sent = trainer.local(
        list(optimizer.state.worker_state.last_sent._last_sent.values())
    )
    for worker in last_sent:
        for tensor, max_delivered in zip(worker, (40, 32), strict=True):
            assert 10 <= np.count_nonzero(tensor) <= max_delivered
