"""Step implementations: which one is chosen, and how to add one."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc import compressors, native_library
from tf_dgc.collectives.requests import AllReduce
from tf_dgc.steps import (
    generic_step,
    implementations,
    native,
    tensorflow_ops,
    top_k_step,
)
from tf_dgc.steps.base import StepOutcome


def half_sum_step(inputs):
    """A step implementation without compression, which halves the sums."""

    def step():
        flat = [tf.reshape(g, [-1]) for g in inputs.gradients]
        (total,) = yield [AllReduce(tf.concat(flat, axis=0))]
        sizes = [t.size for t in inputs.tensors]
        halves = [part / 2 for part in tf.split(total, sizes)]
        return StepOutcome(lambda: (halves, tf.constant(0)), sum(sizes), 8 * sum(sizes))

    return step()


def test_added_step_implementation_is_used(monkeypatch, strategies):
    monkeypatch.setattr(
        implementations,
        "IMPLEMENTATIONS",
        [half_sum_step, *implementations.IMPLEMENTATIONS],
    )
    weights = initial_weights()
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(1.0), 0.9),
        weights,
    )
    (gradients,) = make_gradients(2, 1)
    trainer.step(gradients)
    for after, before, *worker_gradients in zip(
        trainer.weights(), weights, *gradients, strict=True
    ):
        np.testing.assert_allclose(after, before - sum(worker_gradients) / 2)
    assert trainer.optimizer.stats.entries_per_step == trainer.optimizer.num_entries


def take_step(monkeypatch, strategy, make_optimizer):
    """Return the step implementation, and the path of top-k steps, that a step used."""
    names = []

    def spy(module, name):
        function = getattr(module, name)

        def spied(*args):
            result = function(*args)
            if result is not None:
                names.append(module.__name__.rpartition(".")[2])
            return result

        monkeypatch.setattr(module, name, spied)
        return spied

    spied_implementations = [
        spy(top_k_step, "start_top_k_step"),
        spy(generic_step, "start_generic_step"),
    ]
    monkeypatch.setattr(implementations, "IMPLEMENTATIONS", spied_implementations)
    spy(native, "compress")
    spy(tensorflow_ops, "compress")
    (gradients,) = make_gradients(2, 1)
    Trainer(strategy, make_optimizer, initial_weights()).step(gradients)
    return set(names)


SGD = keras.optimizers.SGD


@pytest.mark.parametrize(
    ("make_optimizer", "implementation"),
    [
        (lambda: tf_dgc.DGCOptimizer(SGD(1.0), 0.9), "top_k_step"),
        (lambda: tf_dgc.DGCOptimizer(SGD(1.0), 0.0), "generic_step"),
        (lambda: tf_dgc.CompressedOptimizer(SGD(1.0), "top_k"), "top_k_step"),
        (
            lambda: tf_dgc.CompressedOptimizer(SGD(1.0), "top_k", error_feedback=False),
            "generic_step",
        ),
        (
            lambda: tf_dgc.CompressedOptimizer(SGD(1.0), compressors.QSGD()),
            "generic_step",
        ),
    ],
)
def test_chosen_step_implementation(
    monkeypatch, strategies, make_optimizer, implementation
):
    names = take_step(monkeypatch, strategies[2], make_optimizer)
    path = {"native" if native_library.load_library().library else "tensorflow_ops"}
    assert names == (
        {"top_k_step"} | path if implementation == "top_k_step" else {"generic_step"}
    )


def test_subclass_of_top_k_takes_a_generic_step(monkeypatch, strategies):
    """It may select other entries."""

    class Mine(compressors.TopK):
        pass

    names = take_step(
        monkeypatch,
        strategies[2],
        lambda: tf_dgc.CompressedOptimizer(SGD(1.0), Mine(0.9)),
    )
    assert names == {"generic_step"}


def test_step_without_native_operations(monkeypatch, strategies):
    monkeypatch.setattr(native, "is_available", lambda variables: False)
    names = take_step(
        monkeypatch, strategies[2], lambda: tf_dgc.DGCOptimizer(SGD(1.0), 0.9)
    )
    assert names == {"top_k_step", "tensorflow_ops"}
