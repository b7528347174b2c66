"""Keras's training loops on a prepared strategy: collectives, logs and statistics."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dgc

SCRIPT = pathlib.Path(__file__).with_name("loop_worker.py")


@pytest.fixture(scope="module")
def findings(starter, tmp_path_factory):
    """Findings of two workers, from one run of all scenarios."""
    directory = tmp_path_factory.mktemp("loops")
    finished = starter.run([SCRIPT, "all", directory], 2, directory)
    assert finished.codes == [0, 0]
    return finished.findings


@pytest.mark.workers
@pytest.mark.slow
def test_a_step_of_fit_is_one_collective(findings):
    """A data set of unknown length costs a second one."""
    for finding in findings:
        per_step = finding["meetings"]["per_step"]
        assert per_step.pop("unknown") == [2]
        assert len(per_step) == 6
        assert all(counts == [1] for counts in per_step.values()), per_step


@pytest.mark.workers
@pytest.mark.slow
def test_local_steps_need_no_collective_unless_lengths_are_unknown(findings):
    for finding in findings:
        for name in ("known", "repeated"):
            assert finding["alone"][name] == {"per_step": [0], "said": []}
        unknown = finding["alone"]["unknown"]
        assert unknown["per_step"] == [1]
        (message,) = unknown["said"]
        assert "Use `Dataset.repeat()` with `steps_per_epoch`" in message
        assert message.endswith("Received: a data set of unknown length")


@pytest.mark.workers
@pytest.mark.slow
def test_logs_of_an_epoch_are_the_mean_over_workers(findings):
    for finding in findings:
        result = finding["meetings"]
        expected = result["expected"]
        for name, logs in result["history"].items():
            mean = result["expected of 64"] if name.endswith("64") else expected
            np.testing.assert_allclose(logs, mean, rtol=1e-5, err_msg=name)
        for name in ("evaluate", "evaluate unknown"):
            np.testing.assert_allclose(result[name], expected, rtol=1e-5)
        for name in ("on batches before", "on batches after"):
            np.testing.assert_allclose(
                result[name], result["expected on batches"], rtol=1e-5
            )
    one, other = (finding["meetings"] for finding in findings)
    assert one["last step"] != other["last step"]  # this worker's
    del one["last step"], other["last step"]
    assert one == other


@pytest.mark.workers
@pytest.mark.slow
def test_a_worker_that_runs_out_of_batches(findings):
    """It continues with empty batches, unless Keras counts the batches."""
    one, other = (finding["unequal"] for finding in findings)
    for name, limit, purpose in [
        ("fit", "steps_per_epoch", "all of them, without `steps_per_epoch`"),
        ("evaluate", "steps", "all of them, without `steps`"),
        ("validation", "validation_steps", "all of them, without `validation_steps`"),
        ("epochs", "steps_per_epoch", "6 batches by `steps_per_epoch`, in all epochs"),
        ("by steps", "steps", "4 batches by `steps`"),
    ]:
        for finding, number in ((one, 5), (other, 3)):
            message = finding.pop(name)
            assert message.startswith("The validation") == (name == "validation")
            assert f"use `Dataset.repeat()` with `{limit}`" in message
            assert f"of 3 and 5 batches (on this worker {number}); `" in message
            end = f"` takes {purpose}."
            assert message.endswith(end)
    for finding, number in ((one, "5"), (other, "an unknown number")):
        assert (
            "data sets of 5 batches and a data set of unknown length (on "
            f"this worker {number}); `"
        ) in finding.pop("one told")
    assert len(one["limited"]) == 3
    assert one == other
    assert one["steps"] == 9
    assert one["per_step"] == [2]
    np.testing.assert_allclose(one["logs"], one["expected"], rtol=1e-5)


@pytest.mark.workers
@pytest.mark.slow
def test_logs_that_are_no_metrics(starter, tmp_path):
    """The last step's are exact, even if batches differ in size."""
    finished = starter.run([SCRIPT, "tensors", tmp_path], 2, tmp_path)
    assert finished.codes == [0, 0]
    for tensors in finished.findings:
        for name in ("even", "uneven"):
            logs = tensors[name]
            assert logs["steps"] == 3
            actual = [logs["errors"], logs["first"]]
            np.testing.assert_allclose(actual, tensors[f"expected {name}"], rtol=1e-5)


@pytest.mark.workers
@pytest.mark.slow
def test_workers_stop_together(findings):
    one, other = (finding["stops"] for finding in findings)
    assert one == other
    assert one["all"]["steps"] == 3  # at once, as all decide alike
    for name, step in (("one", 3), ("nan", 1)):
        assert step < one[name]["steps"] < step + 100, name
    assert one["last step"]["steps"] == 5  # the epoch's last, so with the epoch
    assert one["last step"]["epochs"] == 1
    for name in ("early", "epoch's end", "validation"):
        assert one[name]["epochs"] == 2, name


@pytest.mark.workers
@pytest.mark.slow
def test_statistics_are_the_mean_over_workers(findings):
    one, other = (finding["statistics"] for finding in findings)
    assert one["local"] != other["local"]
    mean = np.mean([one["local"], other["local"]], axis=0)
    for finding in (one, other):
        for name in ("validated", "averaged", "after"):
            np.testing.assert_allclose(finding[name], mean, rtol=1e-6, err_msg=name)
        for name in ("own loop", "saved", "before evaluation"):
            np.testing.assert_array_equal(finding[name], np.full(5, 0.5), err_msg=name)
        assert finding["collectives"] == 1


@pytest.mark.workers
@pytest.mark.slow
def test_a_process_has_one_strategy(findings):
    for finding in findings:
        assert finding["again"]["same"] == [True, True]
        assert "timeout_seconds=3.0" in finding["again"]["error"]


@pytest.mark.workers
@pytest.mark.slow
@pytest.mark.parametrize("name", ["arrays", "unequal"])
def test_statistics_if_a_workers_share_is_empty(findings, name):
    workers = [f["empty shares"][name] for f in findings]
    shares = [[np.reshape(b, [-1, 5]) for b in w["shares"]] for w in workers]
    assert {0, 1} <= {len(batch) for batches in shares for batch in batches}
    expected = moving_statistics(shares)
    for worker in workers:
        for key in ("eager", "traced"):
            np.testing.assert_allclose(worker[key], expected, rtol=1e-4, atol=1e-6)
        assert np.isfinite(worker["val_loss"])


class LastMean(keras.layers.Layer):
    """Stores the mean of its last batch in float64, and the number of calls."""

    def build(self, shape):
        zeros = {"initializer": "zeros", "trainable": False}
        self.seen = self.add_weight(shape=(2,), dtype="float64", **zeros)
        self.calls = self.add_weight(shape=(), dtype="int32", **zeros)

    def call(self, x, training=False):
        if training:
            self.seen.assign(tf.cast(tf.reduce_mean(x, axis=0), "float64"))
            self.calls.assign_add(1)
        return x


def make_model(strategy, extra=()):
    with strategy.scope():
        layers = [keras.layers.BatchNormalization(momentum=0.5), LastMean(), *extra]
        model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
        model.layers[-1].trainable = False
        model.compile(tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1)), "mse")
    return model


def replica_values(model):
    """Return `values[replica][variable]` of the non-trainable weights."""
    local = model.distribute_strategy.experimental_local_results
    columns = [[c.numpy() for c in local(v.value)] for v in model.non_trainable_weights]
    return list(zip(*columns, strict=True))


def test_statistics_of_replicas_in_one_process(strategies, tmp_path):
    strategy = tf_dgc.prepare(strategies[2])
    model = make_model(strategy)
    x = np.random.default_rng(0).normal([1, 5], 2, (32, 2)).astype("float32")
    y = np.zeros((32, 1), "float32")
    local = []

    class Recorder(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            local.append(replica_values(model))

    # 31 examples: one replica sees 16 of them, the other one 15.
    model.fit(x[:31], y[:31], batch_size=16, verbose=0, callbacks=[Recorder()])
    one, other = local[-1]
    assert not np.array_equal(one[0], other[0])
    for values in replica_values(model):
        for value, a, b in zip(values, one, other, strict=True):
            np.testing.assert_allclose(value, (16 * a + 15 * b) / 31, rtol=1e-6)
            assert value.dtype == a.dtype
    loss = model.evaluate(x, y, verbose=0)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    again = make_model(strategies[1])
    again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    assert again.evaluate(x, y, verbose=0) == pytest.approx(loss, rel=1e-5)


def test_variables_that_are_no_statistics_are_not_averaged(strategies):
    """Integer counters, random streams, frozen weights."""
    strategy = tf_dgc.prepare(strategies[2])
    with strategy.scope():
        tokens = keras.Input((2,))
        x = keras.layers.Dropout(0.5)(tokens)
        x = keras.layers.GaussianNoise(0.5)(x)
        x = LastMean()(x)
        model = keras.Model(tokens, keras.layers.Dense(1)(x))
    model.layers[-1].trainable = False
    variables = model.non_trainable_variables
    local = strategy.experimental_local_results
    for variable in variables:
        for i, copy in enumerate(local(variable.value)):
            copy.assign(tf.fill(copy.shape, tf.cast(2 * i, copy.dtype)))
    tf_dgc.average_statistics(model)
    changed = {
        v.path.split("/")[-1]: [float(np.mean(c.numpy())) for c in local(v.value)]
        for v in variables
        if [float(np.mean(c.numpy())) for c in local(v.value)] != [0.0, 2.0]
    }
    assert list(changed.values()) == [[1.0, 1.0]]
    assert len(variables) == 6


def test_average_of_one_worker_or_of_no_statistics_does_nothing(strategies):
    model = make_model(strategies[1])
    before = replica_values(model)
    tf_dgc.average_statistics(model)
    np.testing.assert_equal(replica_values(model), before)
    with tf_dgc.prepare(strategies[2]).scope():
        plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    tf_dgc.average_statistics(plain)


def moving_statistics(shares, start=None, momentum=0.5):
    """Return moving mean and variance over batches, computed by NumPy.

    A replica with an empty share of a batch keeps its statistics.

    Args:
        shares: `shares[replica][step]`, each `[examples, features]`.
        start: initial mean and variance of all replicas.
        momentum: weight of the previous value in the next one.
    """
    width = shares[0][0].shape[1]
    start = (np.zeros(width), np.ones(width)) if start is None else start
    total, seen = np.zeros((2, width)), 0
    for batches in shares:
        mean, variance = start
        for batch in filter(len, batches):
            mean = momentum * mean + (1 - momentum) * batch.mean(axis=0)
            variance = momentum * variance + (1 - momentum) * batch.var(axis=0)
        examples = sum(map(len, batches))
        total += examples * np.stack([mean, variance])
        seen += examples
    return total / seen


def shares_of(x, batch_size, replicas):
    """Return the shares into which `fit` divides arrays, for `moving_statistics`."""
    batches = [x[i : i + batch_size] for i in range(0, len(x), batch_size)]
    return list(zip(*(np.array_split(b, replicas) for b in batches), strict=True))


class Minimum(keras.layers.Layer):
    """Stores the minimum of its last batch, which is infinite if that is empty."""

    def build(self, shape):
        zeros = {"initializer": "zeros", "trainable": False}
        self.minimum = self.add_weight(shape=(), **zeros)
        self.steps = self.add_weight(shape=(), **zeros)

    def call(self, x, training=False):
        if training:
            self.minimum.assign(tf.reduce_min(x))
            self.steps.assign_add(1.0)
        return x


class Table(keras.layers.Layer):
    """Has a constant non-trainable weight."""

    def build(self, shape):
        self.table = self.add_weight(
            shape=(50,), initializer="random_normal", trainable=False
        )

    def call(self, x):
        return x


def make_normalized(strategy, optimizer=None, layers=(), **settings):
    optimizer = optimizer or (
        lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1), 0.5)
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.BatchNormalization(momentum=0.5),
                *layers,
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer(), "mse", **settings)
    return model


def statistics_of(normalization):
    """Return moving mean and variance of each replica."""
    means, variances = (
        [copy.numpy() for copy in variable.value.values]
        for variable in (normalization.moving_mean, normalization.moving_variance)
    )
    return [np.stack(pair) for pair in zip(means, variances, strict=True)]


def examples(number):
    x = np.random.default_rng(0).normal([1, 5, -3], 2, (number, 3)).astype("float32")
    return x, x.mean(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("replicas", "settings"),
    [
        (2, {}),
        (4, {}),
        (2, {"steps_per_execution": 3}),
        (2, {"run_eagerly": True}),
        (2, {"optimizer": lambda: tf_dgc.local_sgd(keras.optimizers.SGD(0.1), 2)}),
    ],
    ids=["two", "four", "several steps at once", "eager", "local steps"],
)
def test_statistics_if_a_share_is_empty(strategies, replicas, settings):
    """An empty share changes nothing; others are weighted by their examples."""
    model = make_normalized(tf_dgc.prepare(strategies[replicas]), **settings)
    x, y = examples(18)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    expected = moving_statistics(shares_of(x, 8, replicas))
    for copy in statistics_of(model.layers[0]):
        np.testing.assert_allclose(copy, expected, rtol=1e-5, atol=1e-6)


def test_statistics_count_examples_since_the_last_mean(strategies):
    """Also after a call of `train_on_batch`."""
    model = make_normalized(tf_dgc.prepare(strategies[2]))
    x, y = examples(9)
    model.train_on_batch(x, y)
    for batch in (slice(0, 8), slice(8, 9)):
        (start, _) = statistics_of(model.layers[0])
        one = x[:1], y[:1]
        history = model.fit(
            x[batch], y[batch], shuffle=False, verbose=0, validation_data=one
        ).history
        expected = moving_statistics(shares_of(x[batch], 8, 2), start)
        for copy in statistics_of(model.layers[0]):
            np.testing.assert_allclose(copy, expected, rtol=1e-5, atol=1e-6)
    error = np.mean((model.predict(x[:1], verbose=0) - y[:1]) ** 2)
    assert history["val_loss"] == pytest.approx([error], rel=1e-4)


@pytest.mark.slow
def test_statistics_of_other_layers_if_a_share_is_empty(strategies):
    """Synchronized and masked normalization, and custom layers."""
    synchronized = keras.layers.BatchNormalization(momentum=0.5, synchronized=True)
    masked = keras.layers.BatchNormalization(momentum=0.5)
    pool = keras.layers.GlobalAveragePooling1D()
    minimum = Minimum()
    table = Table()
    with tf_dgc.prepare(strategies[2]).scope():
        inputs = keras.Input((3,))
        steps = keras.layers.Masking()(keras.layers.Reshape((3, 1))(inputs))
        outputs = [synchronized(inputs), table(minimum(inputs)), pool(masked(steps))]
        outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(outputs))
        model = keras.Model(inputs, outputs)
        model.compile(tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1), 0.5), "mse")
    before = table.table.numpy()
    x, y = examples(5)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    model.fit(
        x[:3], y[:3], shuffle=False, verbose=0
    )  # the replicas have different weights
    shares = shares_of(x, 4, 2)
    start = moving_statistics([[x[:4], x[4:]]])
    expected = moving_statistics([[x[:3]]], start)
    for copy in statistics_of(synchronized):
        np.testing.assert_allclose(copy, expected, rtol=1e-5, atol=1e-5)
    features = [[batch.reshape(-1, 1) for batch in batches] for batches in shares]
    start = moving_statistics(features)
    features = [[batch.reshape(-1, 1)] for batch in (x[:2], x[2:3])]
    expected = moving_statistics(features, start)
    for copy in statistics_of(masked):
        np.testing.assert_allclose(copy, expected, rtol=1e-5, atol=1e-5)
    expected_minimum = (2 * x[:2].min() + x[2].min()) / 3
    assert float(minimum.minimum.numpy()) == pytest.approx(expected_minimum, rel=1e-6)
    assert float(minimum.steps.numpy()) == 3
    np.testing.assert_array_equal(table.table.numpy(), before)


def test_statistics_of_a_custom_loop_leave_out_nonfinite_values(strategies):
    strategy = tf_dgc.prepare(strategies[2])
    model = make_normalized(strategy)
    normalization = model.layers[0]
    x, _ = examples(5)
    step = tf.function(
        lambda batch: strategy.run(lambda b: model(b, training=True), args=(batch,))
    )
    for batch in strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(x).batch(4)
    ):
        step(batch)
    finite, nonfinite = statistics_of(normalization)
    assert np.isfinite(finite).all()
    assert np.isnan(nonfinite).all()
    with pytest.warns(RuntimeWarning, match="hold NaN or Inf, and are left out"):
        tf_dgc.average_statistics(model)
    for copy in statistics_of(normalization):
        np.testing.assert_array_equal(copy, finite)
