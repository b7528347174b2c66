"""Synchronization of the workers' second moments."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients, record_collectives
from selection import in_turn, rows

import tf_dgc
from tf_dgc.optimizers import adam

O = keras.optimizers  # noqa: E741
INNER = {
    "adam": lambda **settings: O.Adam(0.02, **settings),
    "amsgrad": lambda **settings: O.Adam(0.02, amsgrad=True, **settings),
    "adamax": lambda **settings: O.Adamax(0.02, **settings),
    "nadam": lambda **settings: O.Nadam(0.02, **settings),
}
MAKE = {
    "dgc": lambda inner: tf_dgc.DGCOptimizer(
        inner, 0.97, diagnostics=tf_dgc.Diagnostics(check_every=None)
    ),
    "power_sgd": lambda inner: tf_dgc.CompressedOptimizer(inner, "power_sgd"),
}
SIZE = 40 * 50 + 50 * 30  # of the compressed tensors


def make_trainer(strategy, inner="adam", make="dgc", dtype="float32", **settings):
    def optimizer():
        return MAKE[make](INNER[inner](**settings))

    return Trainer(strategy, optimizer, initial_weights(dtype))


def moments_of(trainer):
    """Return `[variable][worker]` of the compressed tensors."""
    optimizer = trainer.optimizer
    lists = (optimizer.second_moment, optimizer.largest_moment)
    return [
        v.local_values()
        for moments in lists
        if moments
        for v in (moments[0], moments[2])
    ]


def are_alike(moments):
    return [len({v.tobytes() for v in workers}) == 1 for workers in moments]


def test_synchronization_is_due_at_growing_intervals():
    steps = tf.range(5000, dtype=tf.int64)
    due = np.flatnonzero(adam.is_synchronization_due(steps))
    early = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert due.tolist() == [*early, 1024, 2048, 3072, 4096]


@pytest.mark.parametrize(
    ("inner", "make"), in_turn(INNER, MAKE, ["adam", "amsgrad", "adamax"])
)
@pytest.mark.parametrize("num_workers", [2, 3])
def test_moments_are_equal_after_synchronization(strategies, inner, make, num_workers):
    trainer = make_trainer(strategies[num_workers], inner, make)
    for step, gradients in enumerate(make_gradients(num_workers, 5, "float32"), 1):
        trainer.step(gradients)
        alike = are_alike(moments_of(trainer))
        assert all(alike) if step in (1, 2, 4) else not any(alike)


@pytest.mark.parametrize("inner", ["adam", "adamax"])
def test_synchronized_moments_equal_numpy(strategies, inner):
    """They are the mean or maximum of the workers' moments, in bfloat16."""
    trainer = make_trainer(strategies[2], inner)
    gradients = make_gradients(2, 1, "float32")[0]
    trainer.step(gradients)
    narrow = tf.bfloat16.as_numpy_dtype
    for i, moments in zip((0, 2), moments_of(trainer), strict=True):
        magnitudes = [np.abs(local[i]) for local in gradients]
        if inner == "adamax":
            expected = np.max([2 * g for g in magnitudes], axis=0).astype(narrow)
        else:
            halves = [(1e-3 * 4 * g**2 / 2).astype(narrow) for g in magnitudes]
            expected = np.add(*halves)
        np.testing.assert_allclose(moments[0], expected.astype("float32"), rtol=5e-3)


@pytest.mark.parametrize(
    ("inner", "calls", "steps"),
    rows(
        [("adam", 1, 300), ("adamax", 1, 900), ("nadam", 1, 300), ("adam", 2, 300)],
        [("adam", 1, 300)],
    ),
)
def test_reaches_the_optimum_of_unequal_workers(strategies, inner, calls, steps):
    """Losses are (w - 1)**2 / 2 and 9 (w + 1)**2 / 2, halved; the optimum is -0.8.

    Without synchronization, updates would cancel at 0.
    """
    settings = {"gradient_accumulation_steps": calls} if calls > 1 else {}
    means = train_unequal(
        strategies[2], lambda: MAKE["dgc"](INNER[inner](**settings)), steps * calls
    )
    assert abs(np.mean(means[-100:]) + 0.8) < 0.08


@pytest.mark.slow
def test_error_of_the_optimum_if_synchronizations_are_rare(strategies):
    """In 1,000 steps, a moment forgets 1 - 1 / e of the synchronized value."""
    means = train_unequal(
        strategies[2], lambda: tf_dgc.DGCOptimizer(O.Adam(0.005), 0.9), 3 * 1024
    )
    assert -0.75 < np.mean(means[1024:]) < -0.68


def train_unequal(strategy, make, steps):
    """Return the mean weight before each step."""
    rng = np.random.default_rng(0)
    weights = [np.zeros((32, 40), "float32")]
    trainer = Trainer(strategy, make, weights, traced=True)
    means = []
    for _ in range(steps):
        (w,) = trainer.weights()
        noise = rng.normal(size=(2, *w.shape)).astype("float32")
        trainer.step([[(w - 1 + noise[0]) / 2], [9 * (w + 1 + noise[1]) / 2]])
        means.append(w.mean())
    return means


@pytest.mark.parametrize(
    ("inner", "dtype", "num_bytes"),
    [
        ("adam", "float32", 2 * SIZE),
        ("amsgrad", "float32", 2 * 2 * SIZE),
        ("adamax", "float32", 2 * SIZE + SIZE),  # and the gathered shards
        ("adam", "float64", 8 * SIZE),
    ],
)
def test_bytes_are_counted(strategies, monkeypatch, inner, dtype, num_bytes):
    trainer = make_trainer(strategies[2], inner, dtype=dtype)
    recorded_bytes = record_collectives(monkeypatch)
    sent, collective_bytes = [], []
    for gradients in make_gradients(2, 5, dtype):
        trainer.step(gradients)
        stats = trainer.optimizer.stats
        sent.append(stats.bytes_per_step)
        collective_bytes.append(sum(recorded_bytes) // 2)  # workers
        recorded_bytes.clear()
    assert stats.bytes == sum(sent)
    assert stats.dense_bytes_per_step == 4 * dense_entries() * (
        1 + (dtype == "float64")
    )
    extra = [n - sent[2] for n in sent]
    assert extra == [num_bytes, num_bytes, 0, num_bytes, 0]
    if inner != "adamax":  # part of which is exchanged in a group
        assert collective_bytes == sent


def dense_entries():
    return sum(w.size for w in initial_weights())


@pytest.mark.parametrize("large", [np.inf, np.nan, 1e30])
@pytest.mark.parametrize("inner", ["adam", "adamax"])
def test_nonfinite_gradients_do_not_spread(strategies, inner, large):
    trainer = make_trainer(strategies[2], inner)
    for step, gradients in enumerate(make_gradients(2, 9, "float32")):
        if step in (0, 3, 5, 7):
            gradients[step % 2][0][0, 0] = large
        trainer.step(gradients)
    moments = moments_of(trainer)
    assert all(np.isfinite(v).all() for workers in moments for v in workers)
    assert all(np.isfinite(w).all() for w in trainer.weights())


@pytest.mark.parametrize("inner", ["adam", "adamax"])
def test_a_nonfinite_moment_is_replaced_by_that_of_the_others(strategies, inner):
    trainer = make_trainer(strategies[2], inner)
    steps = make_gradients(2, 2, "float32")
    trainer.step(steps[0])
    moment = trainer.optimizer.second_moment[0]
    values = moment.gather()
    values[1, 3, 4], values[1, 5, 6] = np.nan, np.inf
    moment.scatter(values)
    trainer.step(steps[1])
    (local_moments, *_) = moments_of(trainer)
    assert all(np.isfinite(v).all() and (v > 0).all() for v in local_moments)
    assert are_alike([local_moments]) == [True]


def test_one_worker_synchronizes_nothing(strategies):
    trainer = make_trainer(strategies[1])
    sent = []
    for gradients in make_gradients(1, 3, "float32"):
        trainer.step(gradients)
        sent.append(trainer.optimizer.stats.bytes_per_step)
    assert len(set(sent)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["adam", "adamax"])
@pytest.mark.parametrize("num_steps", [3, 4])
def test_resumes_before_or_after_a_synchronization(strategies, inner, num_steps):
    """The 4th and 8th steps synchronize; a schedule's first two do not count."""
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([2], [0.0, 0.97])

    def make():
        return Trainer(
            strategies[2],
            lambda: tf_dgc.DGCOptimizer(INNER[inner](), schedule),
            initial_weights("float32"),
        )

    steps = make_gradients(2, 11, "float32")
    first, second = make(), make()
    for gradients in steps[: 2 + num_steps]:
        first.step(gradients)
    second.load(first.save())
    for number, gradients in enumerate(steps[2 + num_steps :], num_steps + 1):
        for trainer in (first, second):
            trainer.step(gradients)
            alike = are_alike(moments_of(trainer))
            assert all(alike) if number in (4, 8) else not any(alike)
    for value, expected in zip(second.weights(), first.weights(), strict=True):
        np.testing.assert_array_equal(value, expected)
    for value, expected in zip(moments_of(second), moments_of(first), strict=True):
        np.testing.assert_array_equal(value, expected)
