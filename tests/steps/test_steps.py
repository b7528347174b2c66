"""Kinds of steps: which one is chosen, and that another one can be plugged in."""

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


def sum_everything(inputs):
    """A kind of step of this file's own: no compression, and everything halved."""

    def step():
        flat = [tf.reshape(g, [-1]) for g in inputs.gradients]
        (total,) = yield [AllReduce(tf.concat(flat, axis=0))]
        sizes = [t.size for t in inputs.tensors]
        halves = [part / 2 for part in tf.split(total, sizes)]
        return StepOutcome(lambda: (halves, tf.constant(0)), sum(sizes), 8 * sum(sizes))

    return step()


def test_a_third_kind_of_step(monkeypatch, strategies):
    monkeypatch.setattr(
        implementations,
        "IMPLEMENTATIONS",
        [sum_everything, *implementations.IMPLEMENTATIONS],
    )
    weights = initial_weights()
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(1.0), 0.9),
        weights,
    )
    (gradients,) = make_gradients(2, 1)
    trainer.step(gradients)
    for after, before, *both in zip(
        trainer.weights(), weights, *gradients, strict=True
    ):
        np.testing.assert_allclose(after, before - sum(both) / 2)
    assert trainer.optimizer.stats.entries_per_step == trainer.optimizer.num_entries


def take_step(monkeypatch, strategy, make_optimizer):
    """Return which kinds of steps, and of fused steps which paths, one step takes."""
    taken = []

    def spy(module, name):
        function = getattr(module, name)

        def recorded(*args):
            result = function(*args)
            if result is not None:
                taken.append(module.__name__.rpartition(".")[2])
            return result

        monkeypatch.setattr(module, name, recorded)
        return recorded

    recorded = [
        spy(top_k_step, "start_top_k_step"),
        spy(generic_step, "start_generic_step"),
    ]
    monkeypatch.setattr(implementations, "IMPLEMENTATIONS", recorded)
    spy(native, "compress")
    spy(tensorflow_ops, "compress")
    (gradients,) = make_gradients(2, 1)
    Trainer(strategy, make_optimizer, initial_weights()).step(gradients)
    return set(taken)


SGD = keras.optimizers.SGD


@pytest.mark.parametrize(
    ("make_optimizer", "kind"),
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
def test_which_kind_is_chosen(monkeypatch, strategies, make_optimizer, kind):
    taken = take_step(monkeypatch, strategies[2], make_optimizer)
    path = {"native" if native_library.load_library().library else "tensorflow_ops"}
    assert taken == (
        {"top_k_step"} | path if kind == "top_k_step" else {"generic_step"}
    )


def test_a_subclass_of_top_k_is_composed(monkeypatch, strategies):
    """It may choose in another way."""

    class Mine(compressors.TopK):
        pass

    taken = take_step(
        monkeypatch,
        strategies[2],
        lambda: tf_dgc.CompressedOptimizer(SGD(1.0), Mine(0.9)),
    )
    assert taken == {"generic_step"}


def test_without_the_native_operations(monkeypatch, strategies):
    monkeypatch.setattr(native, "is_available", lambda variables: False)
    taken = take_step(
        monkeypatch, strategies[2], lambda: tf_dgc.DGCOptimizer(SGD(1.0), 0.9)
    )
    assert taken == {"top_k_step", "tensorflow_ops"}
