"""Workers whose variables differ are named, for every kind of step."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients, record_collectives

import tf_dgc
from tf_dgc.multiworker import divergence, failures
from tf_dgc.steps import native

SGD = keras.optimizers.SGD
SHAPES = [(40, 50), (50,)]
WARMUP = tf_dgc.schedules.PiecewiseConstantSparsity([2], [0.0, 0.99])


def dgc(sparsity, **settings):
    inner = SGD(0.1, momentum=0.9)
    return lambda: tf_dgc.DGCOptimizer(inner, sparsity, **settings)


def compressed(name, **settings):
    return lambda: tf_dgc.CompressedOptimizer(SGD(0.1), name, **settings)


def train(strategy, make, dtype="float32", steps=4):
    weights = initial_weights(dtype, SHAPES)
    gradients = make_gradients(strategy.num_replicas_in_sync, steps, dtype, SHAPES)
    return Trainer(strategy, make, weights), gradients


def assign(trainer, variable, replica, value):
    """Change a variable on one worker alone."""
    copies = trainer.strategy.experimental_local_results(variable.value)
    copies[replica].assign(tf.cast(tf.fill(variable.shape, value), variable.dtype))


# Each kind of collective: buffers of the native operations and of TensorFlow's, sums in
# float32, float16 and bfloat16, several rounds, a step that decides while it runs.
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda **s: dgc(0.99, **s), "float32"),
        (lambda **s: dgc(0.0, **s), "float64"),
        (lambda **s: dgc(WARMUP, **s), "bfloat16"),
        (lambda **s: compressed("float16", **s), "float16"),
        (lambda **s: compressed("bfloat16", **s), "float32"),
        (lambda **s: compressed("power_sgd", **s), "float32"),
        (lambda **s: compressed("sign_sgd", **s), "float32"),
    ],
    ids=["sparse", "dense", "scheduled", "float16", "bfloat16", "rounds", "votes"],
)
def test_a_worker_that_differs_is_named(strategies, make, dtype):
    trainer, gradients = train(
        strategies[2], make(diagnostics=tf_dgc.Diagnostics(check_every=2)), dtype
    )
    for step in gradients[:2]:
        trainer.step(step)
    assign(trainer, trainer.variables[1], 1, 7.0)
    before = trainer.replica_weights()
    expected = (
        r"Workers differ at iteration 2: replica 1 .*CPU:1.* from replica 0 .*"
        r"in w1, 1 of 2 variables\. All must"
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=expected):
        trainer.step(gradients[2])
    for old, new in zip(before, trainer.replica_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_worker_that_differs_is_named_by_tensorflow_operations(
    strategies, monkeypatch
):
    monkeypatch.setattr(native, "is_available", lambda variables: False)
    trainer, gradients = train(
        strategies[2], dgc(0.99, diagnostics=tf_dgc.Diagnostics(check_every=1))
    )
    assign(trainer, trainer.variables[0], 0, 1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="in w0, 1 of 2"):
        trainer.step(gradients[0])


@pytest.mark.parametrize("sparsity", [0.0, 0.99], ids=["dense", "sparse"])
def test_equal_workers_are_left_alone(strategies, monkeypatch, sparsity):
    """Also with NaN; only checked steps send checksums, and their bytes are counted."""
    sent_bytes = record_collectives(monkeypatch)
    results = {}
    for every in (None, 2):
        trainer, gradients = train(
            strategies[2],
            dgc(sparsity, diagnostics=tf_dgc.Diagnostics(check_every=every)),
        )
        for replica in range(2):
            assign(trainer, trainer.variables[1], replica, np.nan)
        sizes = []
        for step in gradients:
            sent_bytes.clear()
            trainer.step(step)
            sizes.append(trainer.optimizer.stats.bytes_per_step)
            assert sent_bytes == sizes[-1:] * 2
        results[every] = np.array(sizes), trainer.weights()
    plain, weights = results[None]
    extra = 2 * 2 * 4 * 4 if sparsity == 0.0 else 4 * (1 + 2)
    sizes, checked_weights = results[2]
    np.testing.assert_array_equal(sizes - plain, extra * np.array([1, 0, 1, 0]))
    for one, other in zip(weights, checked_weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_warning(strategies, capfd):
    settings = {"diagnostics": tf_dgc.Diagnostics(check_every=2, on_divergence="warn")}
    trainer, gradients = train(strategies[2], dgc(0.99, **settings))
    assign(trainer, trainer.variables[0], 1, 1.0)
    for step in gradients:
        trainer.step(step)
    assert trainer.optimizer.stats.steps == 4
    lines = [x for x in capfd.readouterr().err.splitlines() if "Workers differ" in x]
    assert [x[: x.index(": replica")] for x in lines] == [
        f"WARNING: tf_dgc: Workers differ at iteration {i}" for i in (0, 2)
    ]


def test_eager_steps(strategies):
    trainer, gradients = train(
        strategies[2], dgc(0.9, diagnostics=tf_dgc.Diagnostics(check_every=1))
    )
    step = trainer.per_replica(gradients[0])
    trainer._distributed(step)
    assign(trainer, trainer.variables[0], 1, 1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="in w0, 1 of 2"):
        trainer._distributed(step)


def test_an_error_that_ends_the_process_is_shown_once(strategies, monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    failures.show_own_errors_plainly()
    trainer, gradients = train(
        strategies[2], dgc(0.9, diagnostics=tf_dgc.Diagnostics(check_every=1))
    )
    assign(trainer, trainer.variables[0], 1, 1.0)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        trainer.step(gradients[0])
    sys.excepthook(caught.type, caught.value, caught.tb)
    place, error = capsys.readouterr().err.splitlines()[-2:]
    assert place.startswith("At ")
    assert error.startswith("RuntimeError: tf_dgc: Workers differ at iteration 0: ")
    assert error.endswith('With `on_divergence="warn"` training continues; '
                          "`check_every=None` turns the check off.")  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_checksums(dtype):
    def checksum(values, shape=(2, 3)):
        variable = keras.Variable(np.reshape(values, shape), dtype=dtype)
        return int(divergence.checksums([variable])[0])

    values = [1.0, 2.0, 3.0, 4.0, 5.0, np.inf]
    swapped = [2.0, 1.0, *values[2:]]
    assert checksum(values) == checksum(values)
    different = [values, swapped, [np.nan, *values[1:]], [*values[:5], -np.inf]]
    assert len({checksum(v) for v in different}) == 4
    assert checksum(np.zeros(0), (0, 5)) != checksum([0.0], ())


def test_all_nans_are_the_same():
    bits = np.array([0x7FC00000, 0xFFC00001, 0x7F800001], np.uint32)
    checksums = [
        int(divergence.checksums([keras.Variable(np.full(3, b).view("float32"))])[0])
        for b in bits
    ]
    assert len(set(checksums)) == 1


def test_most_workers_are_right():
    checksums = np.array([[1, 5, 9], [2, 5, 9], [1, 5, 8], [1, 6, 9]])
    replicas, variables = [f"worker {i}" for i in range(4)], ["a", "b", "c"]
    assert divergence.describe_differences(checksums, replicas, variables) == (
        "worker 1 from worker 0 in a, 1 of 3 variables; "
        "worker 3 from worker 0 in b, 1 of 3 variables; "
        "worker 2 from worker 0 in c, 1 of 3 variables"
    )
    checksums = np.array([[1] * 8, [2] * 8])
    text = divergence.describe_differences(checksums, replicas[:2], list("abcdefgh"))
    assert text == "worker 1 from worker 0 in a, b, c, d, e, ..., 8 of 8 variables"


@pytest.mark.parametrize("every", [-1, 1.5, True])
def test_settings(every):
    with pytest.raises(ValueError, match=rf"number of steps.*check_every={every}"):
        tf_dgc.DGCOptimizer(SGD(0.1), diagnostics=tf_dgc.Diagnostics(check_every=every))
    with pytest.raises(ValueError, match=r"on_divergence.*'ignore'"):
        tf_dgc.CompressedOptimizer(
            SGD(0.1), "qsgd", diagnostics=tf_dgc.Diagnostics(on_divergence="ignore")
        )
    optimizer = tf_dgc.DGCOptimizer(
        SGD(0.1), diagnostics=tf_dgc.Diagnostics(check_every=5, on_divergence="warn")
    )
    again = tf_dgc.DGCOptimizer.from_config(optimizer.get_config())
    assert (again.diagnostics.check_every, again.diagnostics.on_divergence) == (
        5,
        "warn",
    )
