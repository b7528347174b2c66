"""Collective algorithms that drop entries on the way: the effect on the local state."""

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


class EveryOther(Communicator):
    """Leaves out every other entry of what each worker sends."""

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
        for t, where, found in zip(layout, positions, values, strict=True):
            if not t.uncompressed:
                kept = tf.range(tf.size(found)) % 2 == 0
                found = tf.where(kept, found, 0.0)
                delivered.append(kept)
            selections.append(
                SelectedEntries(where, value_types.encode_values(found, t.value_type))
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
                chosen = np.sort(np.argsort(-np.abs(flat), kind="stable")[:k])
                arrived = chosen[::2]
                sent = flat[arrived].astype(dtype).astype("float32")
                total[arrived] += sent
                flat[arrived] -= sent
                if factor_masking:
                    masked[arrived] = 0
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
def test_what_is_left_out_on_the_way_is_kept(
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
        optimizer.communicator = EveryOther(strategy, value_dtype)
        return optimizer

    weights = initial_weights("float32", SHAPES)
    trainer = Trainer(strategy, make_optimizer, weights)
    gradients = make_gradients(2, STEPS, "float32", SHAPES)
    for local in gradients:
        trainer.step(local)
    expected = oracle(weights, gradients, factor_masking, value_dtype)
    optimizer = trainer.optimizer
    found = (
        trainer.weights(),
        trainer.local(optimizer.velocity),
        trainer.local(optimizer.residual),
    )
    pairs = zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True)
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    # In four steps of 20 and 15 entries, half of which arrive.
    last = trainer.local(
        list(optimizer.state.worker_state.last_sent._last_sent.values())
    )
    for worker in last:
        for tensor, most in zip(worker, (40, 32), strict=True):
            assert 10 <= np.count_nonzero(tensor) <= most
