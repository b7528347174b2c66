"""`GlobalTopK` against NumPy, and methods that compress all tensors together."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc.codecs.bits import to_words
from tf_dgc.compressors import (
    AllGather,
    Compressor,
    GlobalTopK,
    Result,
    StateSpec,
    to_dense_tensor,
)
from tf_dgc.compressors.common.one_round import from_words
from tf_dgc.testing import Simulation

SHAPES = [(20, 30), (4,), (5, 6, 2)]
SIZES = [600, 4, 60]


def end_to_end(tensors):
    return np.concatenate([np.ravel(t) for t in tensors])


@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.999])
def test_equals_sorting_all(sparsity):
    simulation = Simulation(GlobalTopK(sparsity), SHAPES, 3, "float64")
    scales = [1.0, 0.1, 5.0]
    residual = np.zeros((3, 664))
    for gradients in make_gradients(3, 4, shapes=SHAPES):
        scaled = [
            [s * g for s, g in zip(scales, local, strict=True)] for local in gradients
        ]
        total = end_to_end(simulation.step(scaled))
        residual += [end_to_end(local) for local in scaled]
        sent = np.zeros_like(residual)
        for worker in range(3):
            k = int(np.ceil((1 - sparsity) * 664 - 1e-6))
            chosen = np.argsort(-np.abs(residual[worker]))[:k]
            sent[worker, chosen] = residual[worker, chosen]
        residual -= sent
        np.testing.assert_allclose(total, sent.sum(axis=0), rtol=1e-12)
        residuals = [end_to_end(worker) for worker in simulation.residual]
        np.testing.assert_allclose(residuals, residual)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_in_an_optimizer_with_uncompressed_and_missing_tensors(strategies):
    """Variables of different dtypes have separate flat buffers."""
    weights = initial_weights("float32", SHAPES)
    weights.append(np.ones((30, 10), "float16"))
    weights.append(np.ones((10, 30), "float32"))
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.CompressedOptimizer(
            keras.optimizers.SGD(2.0**-3, momentum=0.5),
            GlobalTopK(0.9),
            corrections=tf_dgc.Corrections(momentum=True, factor_masking=True),
            min_compress_size=100,
        ),
        weights,
    )
    (gradients,) = make_gradients(2, 1, "float32", [w.shape for w in weights])
    for worker in gradients:
        worker[3] = worker[3].astype("float16")
        worker[4] *= 1e-3
    trainer.step(gradients)
    optimizer = trainer.optimizer
    # A tenth of 600 and 300 float32 entries together, and of 300 float16 entries.
    assert optimizer.stats.entries_per_step == 90 + 30 + 4 + 60
    residual = trainer.local(optimizer.residual)
    velocity = trainer.local(optimizer.velocity)
    for worker_residual, worker_velocity in zip(residual, velocity, strict=True):
        masked = [int(np.count_nonzero(u == 0)) for u in worker_velocity]
        assert masked == [90, 0, 0, 30, 0]
        sent = [int(np.count_nonzero(v == 0)) for v in worker_residual]
        assert sent == [90, 4, 60, 30, 0]
    for worker in gradients:
        worker[0] = None
    trainer.step(gradients)
    assert trainer.optimizer.stats.entries_per_step == 30 + 30 + 4 + 60


class Counting(Compressor):
    """Stores the number of steps of each tensor, and the sum of each entry."""

    name = "counting"
    kind = "control"
    reference = "none"
    entire_model = True

    def state(self, shape):
        return {
            "steps": StateSpec((), per_worker=False),
            "total": StateSpec(shape),
        }

    def bytes(self, shape, dtype):
        return int(np.prod(shape)) * dtype.size

    def aggregate(self, values, state, keys):
        assert keys.sizes == SIZES
        rows = yield AllGather(to_words(values))
        total = from_words(tf.reshape(rows, [-1]), values.dtype, [-1, *values.shape])
        steps = state["steps"] + tf.constant([1.0, 2.0, 3.0], values.dtype)
        state = {"steps": steps, "total": state["total"] + values}
        return Result(tf.reduce_sum(total, axis=0), values, state)


def test_state_of_tensors_is_concatenated():
    simulation = Simulation(Counting(), SHAPES, 2, "float64")
    expected = [np.zeros(s) for s in SHAPES]
    for gradients in make_gradients(2, 3, shapes=SHAPES):
        simulation.step(gradients)
        expected = [e + g for e, g in zip(expected, gradients[1], strict=True)]
    for i, state in enumerate(simulation.state[1]):
        assert state["steps"] == 3 * (i + 1)
        np.testing.assert_allclose(state["total"], expected[i])


class Averaging(GlobalTopK):
    """Stores a mean over the steps for all tensors at once."""

    name = "averaging"

    def common_state(self):
        return {"mean": StateSpec((), per_worker=False)}

    def aggregate(self, values, state, keys):
        result = yield from super().aggregate(values, {}, keys)
        mean = 0.5 * state["mean"] + 0.5 * tf.reduce_sum(to_dense_tensor(result.sum))
        return result._replace(state={"mean": mean})


def make_averaging(strategies, weights):
    return Trainer(
        strategies[2],
        lambda: tf_dgc.CompressedOptimizer(
            keras.optimizers.SGD(1.0), Averaging(0.5), min_compress_size=1
        ),
        weights,
    )


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_state_of_all_tensors(strategies):
    """It is also updated in steps with missing gradients, such as the first one."""
    shapes = [(20, 30), (10, 30), (4, 4)]
    trainer = make_averaging(strategies, [np.zeros(s, "float32") for s in shapes])
    mean = 0.0
    for step, gradients in enumerate(make_gradients(2, 3, "float32", shapes)):
        for worker in gradients:
            worker[step % 2] = None
        before = trainer.weights()
        trainer.step(gradients)
        pairs = zip(before, trainer.weights(), strict=True)
        mean = 0.5 * mean + 0.5 * sum(np.sum(b - a, dtype="f8") for b, a in pairs)
        (common,) = trainer.optimizer.compressor_state[len(shapes) :]
        np.testing.assert_allclose(common["mean"].numpy(), mean, rtol=1e-3)


def test_state_of_all_tensors_needs_one_dtype(strategies):
    weights = [np.zeros((20, 20), dtype) for dtype in ("float32", "float16")]
    with pytest.raises(ValueError, match="must have one dtype"):
        make_averaging(strategies, weights)


@pytest.mark.parametrize("error_feedback", [True, False])
def test_only_uncompressed_tensors_with_a_schedule(strategies, error_feedback):
    """With a schedule, masking is decided only when the step runs."""
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([1], [0.5, 0.99])
    method = GlobalTopK(schedule)
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.CompressedOptimizer(
            keras.optimizers.SGD(0.25), method, error_feedback=error_feedback
        ),
        [np.zeros(5, "float32")],
        traced=True,
    )
    for _ in range(2):
        trainer.step([[np.ones(5, "float32")]] * 2)
    np.testing.assert_array_equal(trainer.weights()[0], np.full(5, -1.0))
