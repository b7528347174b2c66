"""Optimizers with collective algorithms that merge entries on the way."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer
from selection import rows

import tf_dgc
from tf_dgc import collectives, native_library
from tf_dgc.codecs import buffer
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.codecs.value_types import encode_values
from tf_dgc.collectives import Rank
from tf_dgc.collectives.requests import BufferLayout
from tf_dgc.testing import run_all

MERGING = ["gtopk", "oktopk", "twoway"]
LAYOUT = BufferLayout([TensorSpec("a", (60,), tf.float32, False)], [4])


def make_trainer(
    strategies, num_workers, algorithm, inner=None, round_weights=False, **settings
):
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=s).astype("float32") for s in [(40, 50), (60, 30), (9,)]]
    weights = [np.round(w) for w in weights] if round_weights else weights
    inner = inner or (lambda: keras.optimizers.SGD(0.25, momentum=0.5))
    return Trainer(
        strategies[num_workers],
        lambda: tf_dgc.DGCOptimizer(inner(), collective=algorithm, **settings),
        weights,
    )


@pytest.mark.parametrize("algorithm", MERGING)
@pytest.mark.parametrize("num_workers", rows([1, 2, 3, 4], [3]))
def test_no_entries_are_lost(strategies, num_workers, algorithm):
    """Updates and residuals add up bit for bit; all workers have the same weights."""
    plain = lambda: keras.optimizers.SGD(0.25)  # noqa: E731
    settings = {
        "sparsity": 0.97,
        "diagnostics": tf_dgc.Diagnostics(check_every=2),
        "round_weights": True,
    }
    trainer = make_trainer(strategies, num_workers, algorithm, plain, **settings)
    rng = np.random.default_rng(0)
    before = trainer.weights()
    total = [np.zeros(w.shape) for w in before]
    for _ in range(4):
        gradients = [
            [rng.integers(-64, 64, size=w.shape).astype("float32") for w in before]
            for _ in range(num_workers)
        ]
        trainer.step(gradients)
        total = [t + sum(g[i] for g in gradients) for i, t in enumerate(total)]
    residuals = trainer.local(trainer.optimizer.residual)
    num_changed = 0
    for i, (old, new) in enumerate(zip(before, trainer.weights(), strict=True)):
        residual = sum(worker[i] for worker in residuals)
        np.testing.assert_array_equal(old - new, 0.25 * total[i] - residual)
        num_changed += np.count_nonzero(old != new)
    assert num_changed > 100
    for copies in trainer.replica_weights():
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.parametrize("algorithm", rows(MERGING, MERGING[:1]))
def test_one_worker_equals_dgc(strategies, algorithm):
    merging = make_trainer(strategies, 1, algorithm, sparsity=0.97)
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=w.shape).astype("float32") for w in merging.weights()]
    sgd = lambda: keras.optimizers.SGD(0.25, momentum=0.5)  # noqa: E731
    plain = Trainer(strategies[1], lambda: tf_dgc.DGCOptimizer(sgd(), 0.97), weights)
    for _ in range(3):
        gradients = [[rng.normal(size=w.shape).astype("float32") for w in weights]]
        merging.step(gradients)
        plain.step(gradients)
    for actual, expected in zip(merging.weights(), plain.weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("algorithm", rows(MERGING, MERGING[:1]))
def test_velocity_is_cleared_after_a_dense_step(strategies, algorithm):
    """Factor masking clears the velocity where entries were delivered."""
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([1], [0.0, 0.9])
    settings = {
        "sparsity": schedule,
        "corrections": tf_dgc.Corrections(factor_masking=True),
    }
    trainer = make_trainer(strategies, 2, algorithm, **settings)
    rng = np.random.default_rng(0)
    for _ in range(3):
        gradients = [
            [rng.normal(size=w.shape).astype("float32") for w in trainer.weights()]
            for _ in range(2)
        ]
        trainer.step(gradients)
    optimizer = trainer.optimizer
    for velocity, residual in zip(
        trainer.local(optimizer.velocity),
        trainer.local(optimizer.residual),
        strict=True,
    ):
        for v, r in zip(velocity[:2], residual[:2], strict=True):
            sent = np.count_nonzero(v == 0)
            assert 0 < sent <= 0.1 * v.size + 1
            if algorithm != "twoway":  # its owners keep the entries that they drop
                np.testing.assert_array_equal(r[v == 0], 0)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", MERGING)
@pytest.mark.parametrize("path", ["native", "operations"])
def test_only_uncompressed_tensors_on_a_schedule(
    strategies, monkeypatch, algorithm, path
):
    """Every step is dense, which is known only at run time."""
    if path == "operations":
        monkeypatch.setattr(
            native_library,
            "load_library",
            lambda: native_library.NativeLibrary(None, "", False, {}),
        )
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([1], [0.0, 0.9])
    sgd = lambda: keras.optimizers.SGD(0.25)  # noqa: E731
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer(sgd(), schedule, collective=algorithm),
        [np.zeros(5, "float32")],
        traced=True,
    )
    for _ in range(2):
        trainer.step([[np.ones(5, "float32")]] * 2)
    np.testing.assert_array_equal(trainer.weights()[0], np.full(5, -1.0))


@pytest.mark.parametrize("algorithm", MERGING)
def test_worker_whose_entries_are_all_dropped(strategies, algorithm):
    """Momentum is cleared only where entries were delivered."""
    sgd = lambda: keras.optimizers.SGD(1.0, momentum=0.5)  # noqa: E731
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer(sgd(), 0.999, collective=algorithm),
        [np.zeros((40, 50), "float32")],
    )
    gradients = [[np.zeros((40, 50), "float32")] for _ in range(2)]
    gradients[0][0][7, 7:9] = 5, -4  # k is 2
    gradients[1][0][3, 7:9] = 1, 2
    trainer.step(gradients)
    np.testing.assert_array_equal(trainer.weights()[0], -gradients[0][0])
    residual = sum(r for (r,) in trainer.local(trainer.optimizer.residual))
    np.testing.assert_array_equal(residual, gradients[1][0])


def refusal(rounds):
    """Run a worker's rounds and read the result; return the error message."""
    replies = None
    try:
        while True:
            replies = yield rounds.send(replies)
    except tf.errors.InvalidArgumentError as error:
        return error.message
    except StopIteration as end:
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            buffer.read_buffers(end.value.words[tf.newaxis], *LAYOUT)
        return caught.value.message


@pytest.mark.parametrize(
    ("algorithm", "num_workers"),
    [("gtopk", 3), ("gtopk", 4), ("oktopk", 2), ("oktopk", 3), ("twoway", 4)],
)
def test_infinite_sum_is_refused_by_all_workers(algorithm, num_workers):
    """The single entries are finite."""
    values = encode_values(tf.constant([1.0, 3e38, -2.0, 1.0]), "float32")
    selection = buffer.SelectedEntries(tf.constant([3, 20, 41, 50]), values)
    words = buffer.encode_sparse(*LAYOUT, [selection], tf.constant(True))
    merge = collectives.get(algorithm).merge
    steps = [
        refusal(merge(words, LAYOUT, Rank(w, num_workers))) for w in range(num_workers)
    ]
    for message in run_all(steps):
        assert "not finite" in message


@pytest.mark.parametrize("algorithm", MERGING)
def test_values_narrower_than_sums_raise(algorithm):
    """Each merge would round them again, and the rounding error would be lost."""
    sgd = keras.optimizers.SGD(1.0)
    settings = {"value_dtype": "float32", "collective": algorithm}
    optimizer = tf_dgc.DGCOptimizer(sgd, 0.9, **settings)
    variable = keras.Variable(np.zeros((40, 50)), dtype="float64")
    with pytest.raises(ValueError, match="would round those of float64 tensors again"):
        optimizer.build([variable])
    optimizer.exclude_from_compression(var_list=[variable])
    optimizer.build([variable])
