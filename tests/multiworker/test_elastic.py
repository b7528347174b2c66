"""Resuming a checkpoint with another number of workers loses nothing.

`tests/compressors/test_compressors.py` tests this for every method.

    pytest -s tests/multiworker/test_elastic.py

prints norms of the state before and after.
"""

import itertools

import keras
import numpy as np
import pytest
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc.compressors import AllGather, Quantizer, Result, StateSpec
from tf_dgc.multiworker import worker_variables

COUNTS = range(1, 5)
SHAPES = [(40, 50), (50,)]
SGD = keras.optimizers.SGD


def dgc():
    return tf_dgc.DGCOptimizer(SGD(0.1, momentum=0.9, nesterov=True), 0.99)


def make_trainer(strategy, optimizer):
    return Trainer(strategy, optimizer, initial_weights("float32", SHAPES))


def train(trainer, steps, seed=2):
    num_workers = trainer.strategy.num_replicas_in_sync
    for gradients in make_gradients(num_workers, steps, "float32", SHAPES, seed):
        trainer.step(gradients)


def total(variables):
    """Return the sum over workers of every entry, in float64."""
    values = [v.gather().astype("float64").sum(axis=0).ravel() for v in variables]
    return np.concatenate(values)


def difference(one, other):
    return np.max(np.abs(one - other)) / np.max(np.abs(one))


@pytest.fixture(scope="module")
def trainers(strategies):
    """Return trainers of DGC after three steps, by number of workers."""
    trainers = {n: make_trainer(strategies[n], dgc) for n in COUNTS}
    for trainer in trainers.values():
        train(trainer, 3)
    return trainers


def test_every_number_of_workers_resumes_from_every_other(trainers):
    saved = {n: trainer.save() for n, trainer in trainers.items()}
    kinds = ("residual", "velocity")
    totals = {
        n: {kind: total(getattr(trainers[n].optimizer, kind)) for kind in kinds}
        for n in COUNTS
    }
    print("\n N  M  what      norm before   norm after  largest difference")
    for n, m in itertools.product(COUNTS, COUNTS):
        trainer = trainers[m]
        trainer.load(saved[n])
        for before, after in zip(saved[n][0], trainer.weights(), strict=True):
            np.testing.assert_array_equal(before, after)
        assert trainer.optimizer.iterations.numpy() == 3
        for kind in kinds:
            before = totals[n][kind]
            after = total(getattr(trainer.optimizer, kind))
            apart = difference(before, after)
            norms = [np.linalg.norm(t) for t in (before, after)]
            print(
                f"{n:2} {m:2}  {kind} {norms[0]:12.6f} {norms[1]:12.6f} {apart:12.1e}"
            )
            assert apart == 0 if n == m else apart < 2**-23
        train(trainer, 2, seed=3)
        for copies in trainer.replica_weights():
            for copy in copies[1:]:
                np.testing.assert_array_equal(copy, copies[0])


def test_updates_and_residuals_add_up_across_restarts(strategies):
    """From 2 to 3 to 1 workers, weights change by all gradients minus the residuals."""
    weights = initial_weights("float64", SHAPES)
    saved, expected = None, [w.copy() for w in weights]
    for num_workers in (2, 3, 1):
        trainer = Trainer(
            strategies[num_workers],
            lambda: tf_dgc.DGCOptimizer(SGD(1.0), 0.99),
            weights,
        )
        if saved:
            trainer.load(saved)
        for gradients in make_gradients(num_workers, 3, "float64", SHAPES, num_workers):
            trainer.step(gradients)
            for i in range(len(SHAPES)):
                expected[i] -= sum(worker[i] for worker in gradients)
        saved = trainer.save()
    for i, residual in enumerate(trainer.optimizer.residual):
        total = trainer.weights()[i] - residual.gather().sum(axis=0)
        np.testing.assert_allclose(total, expected[i], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "local", "shared"),
    [("diana", "shift", "shift_sum"), ("laq", "uploaded", "uploaded_sum")],
)
def test_local_state_still_adds_up_to_the_shared_sum(strategies, name, local, shared):
    def make():
        return tf_dgc.CompressedOptimizer(SGD(0.01), name)

    def gap(trainer):
        state = trainer.optimizer.compressor_state[0]
        return difference(state[shared].numpy(), state[local].gather().sum(axis=0))

    two = make_trainer(strategies[2], make)
    train(two, 3)
    other = make_trainer(strategies[3], make)
    other.load(two.save())
    assert np.any(other.optimizer.compressor_state[0][shared].numpy())
    assert gap(other) < 1e-6
    train(other, 3, seed=3)
    assert gap(other) < 1e-6


class Remembers(Quantizer):
    """Has state with each of the rescaling rules."""

    name = "remembers"
    reference = "this test"
    error_feedback = "forbidden"

    def bytes(self, shape, dtype):
        return None

    def state(self, shape):
        return {
            rule: StateSpec((2,), rescaling=rule)
            for rule in worker_variables.RESTORE_RULES
        }

    def aggregate(self, values, state, draw):
        yield AllGather(draw.local())
        return Result(values, values, {})


def test_rescaling_rules(strategies):
    def make():
        return tf_dgc.CompressedOptimizer(SGD(0.1), Remembers(), min_compress_size=0)

    two = make_trainer(strategies[2], make)
    for variable in two.optimizer.compressor_state[0].values():
        variable.scatter(np.array([[1.0, 2.0], [4.0, 8.0]], "float32"))
    three = make_trainer(strategies[3], make)
    three.load(two.save())
    values = {
        rule: variable.gather().tolist()
        for rule, variable in three.optimizer.compressor_state[0].items()
    }
    assert values == {
        "sum": [pytest.approx([5 / 3, 10 / 3])] * 3,
        "mean": [[2.5, 5.0]] * 3,
        "largest": [[4.0, 8.0]] * 3,
        "zero": [[0.0, 0.0]] * 3,
    }


def test_an_unknown_rescaling_rule_is_refused():
    class Wrong(Remembers):
        def state(self, shape):
            return {"memory": StateSpec((2,), rescaling="median")}

    optimizer = tf_dgc.CompressedOptimizer(SGD(0.1), Wrong(), min_compress_size=0)
    with pytest.raises(
        ValueError, match="`rescaling` must be one of sum, mean, largest, zero"
    ):
        optimizer.build([keras.Variable(np.zeros((2, 3)))])
