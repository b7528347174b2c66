"""Servers decode exactly what a worker counts as sent, with every method."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from selection import rows

from tf_dgc import compressors, schedules
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.server import validation
from tf_dgc.steps import push
from tf_dgc.steps.base import StepInputs
from tf_dgc.steps.push import PushReceiver
from tf_dgc.steps.state import create_worker_state

SHAPES = [(30, 40), (7,), (25, 20)]
SCHEDULE = schedules.PiecewiseConstantSparsity([3], [0.0, 0.9])


def can_be_pushed(name):
    try:
        validation.check_compressor(compressors.get(name))
    except ValueError:
        return False
    return True


METHODS = [name for name in compressors.METHODS if can_be_pushed(name)]


def test_most_methods_can_be_pushed():
    supported = {
        "none",
        "top_k",
        "random_k",
        "float16",
        "uniform_8bit",
        "qsgd",
        "tern_grad",
    }
    assert supported <= {*METHODS}
    assert not {"sign_sgd", "power_sgd", "scale_com", "diana", "laq"} & {*METHODS}


def make_push(compressor, dtype, step, seed=0, worker=1, momentum=0.0, has_nan=False):
    """Return a worker's push, its receivers, and the step."""
    tensor_dtype = tf.as_dtype(dtype)
    tensors = [
        TensorSpec(
            f"t{i}", s, tensor_dtype, uncompressed=i == 1, max_magnitude=math.inf
        )
        for i, s in enumerate(SHAPES)
    ]
    feedback = compressor.error_feedback in ("required", "default")
    worker_state = create_worker_state(
        tensors,
        compressor,
        keeps_residual=feedback,
        keeps_velocity=momentum > 0,
        keeps_second_moment=False,
        keeps_largest_moment=False,
        tracks_staleness=False,
    )
    rng = np.random.default_rng(seed)
    gradients = [tf.constant(rng.normal(size=s), tensor_dtype) for s in SHAPES]
    if has_nan:
        gradients[0] *= math.nan
    step_number = tf.constant(step, tf.int64)
    inputs = StepInputs(
        compressor,
        tensors,
        [0, 1, 2],
        gradients,
        [0.5] * 3,
        worker_state,
        momentum,
        False,
        True,
        7,
        step_number,
        worker,
        push.NUM_WORKERS,
        [t.size for t in tensors],
    )
    pushed = push.push(inputs)
    receivers = [
        PushReceiver(compressor, tensors, feedback, 7, n) for n in (False, True)
    ]
    return pushed, receivers, step_number


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", rows(["float32", "float64"], ["float32"]))
def test_received_values_equal_the_sent_ones(name, dtype):
    pushed, (receiver, native), step = make_push(compressors.get(name), dtype, 5)
    sent, _ = pushed.outcome.decode()
    for push_receiver in (receiver, native):
        received, nonfinite = push_receiver.receive(
            [pushed.words], [tf.constant(1)], step
        ).decode()
        assert nonfinite == pushed.nonfinite == 0
        for actual, expected in zip(received, sent, strict=True):
            np.testing.assert_array_equal(
                np.ravel(actual.numpy()), np.ravel(expected.numpy())
            )


@pytest.mark.parametrize("step", [2, 5], ids=["dense", "sparse"])
@pytest.mark.parametrize("sparsity", [0.9, 0.3, SCHEDULE], ids=["0.9", "0.3", "moves"])
def test_pushes_of_several_workers_are_added(step, sparsity):
    method = compressors.TopK(sparsity)
    pushes, total = [], [0.0] * 3
    for worker in range(3):
        pushed, (receiver, _), number = make_push(
            method, "float64", step, worker, worker, momentum=0.9
        )
        pushes.append(pushed.words)
        sent, _ = pushed.outcome.decode()
        total = [t + np.ravel(s.numpy()) for t, s in zip(total, sent, strict=True)]
    outcome = receiver.receive(pushes, list(map(tf.constant, range(3))), number)
    received, _ = outcome.decode()
    for actual, expected in zip(received, total, strict=True):
        np.testing.assert_array_equal(np.ravel(actual.numpy()), expected)
    changed, is_any = outcome.touched()
    assert bool(is_any) == (sparsity is SCHEDULE and step == 2)
    for i, (positions, expected) in enumerate(zip(changed, total, strict=True)):
        if i == 1 or is_any:  # uncompressed, or all entries
            assert len(positions) == 0
        else:
            np.testing.assert_array_equal(
                np.unique(positions), np.flatnonzero(expected)
            )


@pytest.mark.parametrize("name", ["top_k", "none", "uniform_8bit"])
def test_gradient_that_is_not_finite_is_flagged_and_zero(name):
    pushed, (receiver, _), step = make_push(
        compressors.get(name), "float32", 5, has_nan=True
    )
    assert pushed.nonfinite == 1
    received, nonfinite = receiver.receive(
        [pushed.words], [tf.constant(1)], step
    ).decode()
    assert nonfinite == 1
    assert not any(np.any(f) for f in received)


@pytest.mark.parametrize(
    "method, change",
    [
        *itertools.product(
            ["top_k", "uniform_8bit"], ["cut", "longer", "damaged", "empty"]
        ),
        *itertools.product([compressors.TopK(0.01)], ["cut", "longer", "empty"]),
    ],
    ids=str,
)
def test_malformed_push_raises(method, change):
    """A step of `TopK(0.01)` is dense, so that missing words could be read as zeros."""
    pushed, (receiver, _), step = make_push(compressors.get(method), "float32", 5)
    words = pushed.words.numpy()
    words = {
        "cut": words[:-1],
        "longer": np.append(words, 0),
        "damaged": words ^ (np.arange(len(words)) == 9),
        "empty": words[:0],
    }[change].astype(np.int32)
    outcome = tf.function(lambda w: receiver.receive([w], [1], step).decode()[0])
    with pytest.raises(tf.errors.InvalidArgumentError):
        outcome.get_concrete_function(tf.TensorSpec([None], tf.int32))(
            tf.constant(words)
        )
