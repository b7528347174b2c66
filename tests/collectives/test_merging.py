"""What optimizers do with all exchanges that merge entries on the way."""

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
FORM = BufferLayout([TensorSpec("a", (60,), tf.float32, False)], [4])


def make_trainer(strategies, number, exchange, inner=None, whole=False, **settings):
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=s).astype("float32") for s in [(40, 50), (60, 30), (9,)]]
    weights = [np.round(w) for w in weights] if whole else weights
    inner = inner or (lambda: keras.optimizers.SGD(0.25, momentum=0.5))
    return Trainer(
        strategies[number],
        lambda: tf_dgc.DGCOptimizer(inner(), collective=exchange, **settings),
        weights,
    )


@pytest.mark.parametrize("exchange", MERGING)
@pytest.mark.parametrize("number", rows([1, 2, 3, 4], [3]))
def test_nothing_is_lost(strategies, number, exchange):
    """What was sent and what is kept add up, to the last bit; all have the same."""
    plain = lambda: keras.optimizers.SGD(0.25)  # noqa: E731
    settings = {
        "sparsity": 0.97,
        "diagnostics": tf_dgc.Diagnostics(check_every=2),
        "whole": True,
    }
    trainer = make_trainer(strategies, number, exchange, plain, **settings)
    rng = np.random.default_rng(0)
    before = trainer.weights()
    total = [np.zeros(w.shape) for w in before]
    for _ in range(4):
        gradients = [
            [rng.integers(-64, 64, size=w.shape).astype("float32") for w in before]
            for _ in range(number)
        ]
        trainer.step(gradients)
        total = [t + sum(g[i] for g in gradients) for i, t in enumerate(total)]
    residuals = trainer.local(trainer.optimizer.residual)
    moved = 0
    for i, (old, new) in enumerate(zip(before, trainer.weights(), strict=True)):
        kept = sum(worker[i] for worker in residuals)
        np.testing.assert_array_equal(old - new, 0.25 * total[i] - kept)
        moved += np.count_nonzero(old != new)
    assert moved > 100
    for copies in trainer.replica_weights():
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.parametrize("exchange", rows(MERGING, MERGING[:1]))
def test_as_one_worker_it_is_dgc(strategies, exchange):
    ours = make_trainer(strategies, 1, exchange, sparsity=0.97)
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=w.shape).astype("float32") for w in ours.weights()]
    sgd = lambda: keras.optimizers.SGD(0.25, momentum=0.5)  # noqa: E731
    plain = Trainer(strategies[1], lambda: tf_dgc.DGCOptimizer(sgd(), 0.97), weights)
    for _ in range(3):
        gradients = [[rng.normal(size=w.shape).astype("float32") for w in weights]]
        ours.step(gradients)
        plain.step(gradients)
    for mine, theirs in zip(ours.weights(), plain.weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("exchange", rows(MERGING, MERGING[:1]))
def test_velocity_and_a_schedule(strategies, exchange):
    """Dense at first; then velocities are cleared where entries were kept."""
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([1], [0.0, 0.9])
    settings = {
        "sparsity": schedule,
        "corrections": tf_dgc.Corrections(factor_masking=True),
    }
    trainer = make_trainer(strategies, 2, exchange, **settings)
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
            if exchange != "twoway":  # whose owners keep what they do not send on
                np.testing.assert_array_equal(r[v == 0], 0)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", MERGING)
@pytest.mark.parametrize("path", ["native", "operations"])
def test_all_are_exempt_on_a_schedule(strategies, monkeypatch, exchange, path):
    """Every step is dense, which is known only when it runs."""
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
        lambda: tf_dgc.DGCOptimizer(sgd(), schedule, collective=exchange),
        [np.zeros(5, "float32")],
        traced=True,
    )
    for _ in range(2):
        trainer.step([[np.ones(5, "float32")]] * 2)
    np.testing.assert_array_equal(trainer.weights()[0], np.full(5, -1.0))


@pytest.mark.parametrize("exchange", MERGING)
def test_none_of_a_workers_entries_arrive(strategies, exchange):
    """With momentum, whose velocity is cleared where entries did."""
    sgd = lambda: keras.optimizers.SGD(1.0, momentum=0.5)  # noqa: E731
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer(sgd(), 0.999, collective=exchange),
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
    """Run the rounds of a worker, read what it gets, and return why it cannot."""
    replies = None
    try:
        while True:
            replies = yield rounds.send(replies)
    except tf.errors.InvalidArgumentError as error:
        return error.message
    except StopIteration as end:
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            buffer.read_buffers(end.value.words[tf.newaxis], *FORM)
        return caught.value.message


@pytest.mark.parametrize(
    ("exchange", "number"),
    [("gtopk", 3), ("gtopk", 4), ("oktopk", 2), ("oktopk", 3), ("twoway", 4)],
)
def test_a_sum_that_is_infinite_is_refused_by_all(exchange, number):
    """Of entries that are finite, each by itself."""
    values = encode_values(tf.constant([1.0, 3e38, -2.0, 1.0]), "float32")
    selection = buffer.SelectedEntries(tf.constant([3, 20, 41, 50]), values)
    words = buffer.encode_sparse(*FORM, [selection], tf.constant(True))
    merge = collectives.get(exchange).merge
    steps = [refusal(merge(words, FORM, Rank(w, number))) for w in range(number)]
    for message in run_all(steps):
        assert "not finite" in message


@pytest.mark.parametrize("exchange", MERGING)
def test_values_that_are_narrower_than_sums_are_refused(exchange):
    """Each merge would round them again, and nobody would keep what is lost."""
    sgd = keras.optimizers.SGD(1.0)
    settings = {"value_dtype": "float32", "collective": exchange}
    optimizer = tf_dgc.DGCOptimizer(sgd, 0.9, **settings)
    variable = keras.Variable(np.zeros((40, 50)), dtype="float64")
    with pytest.raises(ValueError, match="would round those of float64 tensors again"):
        optimizer.build([variable])
    optimizer.exclude_from_compression(var_list=[variable])
    optimizer.build([variable])
