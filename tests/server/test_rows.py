"""Rows of embedding tables: encoding, updates on a server, training, errors."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from selection import rows
from serving import ServerGroup, leave_at_end, run_together

import tf_dgc
from tf_dgc.server import (
    embedding_rows,
    embedding_tables,
    messages,
    model,
    model_spec,
    pulls,
)
from tf_dgc.server.embedding_rows import TableRows

VOCABULARY, WIDTH = 50, 6


def make_slices(ids, seed=0, dtype="float32"):
    values = np.random.default_rng(seed).normal(size=[len(ids), WIDTH]).astype(dtype)
    shape = tf.constant([VOCABULARY, WIDTH], tf.int64)
    return tf.IndexedSlices(tf.constant(values), tf.constant(ids, tf.int64), shape)


def make_table(dtype="float32", shape=(VOCABULARY, WIDTH), seed=1):
    value = np.random.default_rng(seed).normal(size=shape)
    return keras.Variable(value, dtype=dtype, name="table")


# --- on the wire ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", rows(["float32", "float64", "bfloat16"], ["float32"]))
def test_rows_round_trip(dtype):
    table = make_table(dtype)
    spec = embedding_rows.table_spec(table)
    gradient = make_slices([3, 7, 49])
    scale = tf.constant(2.0, tf.float64)
    words = embedding_rows.encode_rows(
        [spec, spec], [gradient, make_slices([])], [scale, scale]
    ).numpy()
    assert len(words) == 2 + 3 * (1 + spec.row_words)
    (received_rows, empty_rows), rest = embedding_rows.read_rows(
        [spec, spec], np.append(words, np.int32([1, 2]))
    )
    np.testing.assert_array_equal(received_rows.ids, [3, 7, 49])
    np.testing.assert_array_equal(received_rows.values, 2 * gradient.values.numpy())
    assert len(empty_rows.ids) == 0
    assert rest.tolist() == [1, 2]


def test_rows_that_are_not_finite_are_not_sent():
    spec = embedding_rows.table_spec(make_table())
    words = embedding_rows.encode_rows(
        [spec], [make_slices([3])], [tf.constant(np.nan, tf.float64)]
    )
    assert words.numpy().tolist() == [0]


@pytest.mark.parametrize(
    "words",
    [[], [-1], [51], [1, 3], [2, 3, 3], [2, 4, 3], [1, -1], [1, 50]],
    ids=["no words", "negative", "too many", "cut", "twice", "order", "below", "above"],
)
def test_malformed_rows_raise(words):
    spec = embedding_rows.table_spec(make_table())
    if len(words) > 1:
        words = [*words, *[0] * (2 if words == [1, 3] else 12)]  # values
    with pytest.raises(ValueError, match=r"rows"):
        embedding_rows.read_rows([spec], np.array(words, np.int32))


# --- on a server ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer_class",
    [keras.optimizers.SGD, keras.optimizers.Adagrad],
    ids=["sgd", "adagrad"],
)
def test_rows_are_updated_like_in_keras(optimizer_class):
    """Bit-equal to a dense gradient that is zero elsewhere."""
    table, dense_table = make_table(), make_table()
    optimizer, dense_optimizer = optimizer_class(0.1), optimizer_class(0.1)
    optimizer.build([table])
    dense_optimizer.build([dense_table])
    tables = embedding_tables.EmbeddingTables([table], optimizer)
    for step in range(3):
        gradient = make_slices([1, 4 + step, 30], step)
        table_rows = TableRows(tf.cast(gradient.indices, tf.int32), gradient.values)
        tables.update([table_rows], tf.convert_to_tensor(optimizer.learning_rate))
        dense_optimizer.apply([tf.convert_to_tensor(gradient)], [dense_table])
    np.testing.assert_array_equal(table.numpy(), dense_table.numpy())


def test_pull_returns_the_rows_that_changed_since_the_last():
    table, worker_table = make_table(), make_table()
    specs = [embedding_rows.table_spec(table)]
    tables = embedding_tables.EmbeddingTables(
        [table], build_optimizer(keras.optimizers.SGD(0.1), table)
    )
    for worker in range(2):
        tables.reset(worker, 0)
    for clock, ids in enumerate([[1, 2], [2, 40], []], 1):
        gradient = make_slices(ids, clock)
        table_rows = TableRows(
            gradient.indices.numpy().astype(np.int32), gradient.values
        )
        tables.update([table_rows], tf.constant(0.1))
        tables.record([table_rows], clock)
        words = tables.pull(0, clock)
        assert words[0] == len(ids)
        embedding_rows.assign_rows(specs, [worker_table], tf.constant(words))
        np.testing.assert_array_equal(worker_table.numpy(), table.numpy())
    assert tables.pull(1, 3)[:4].tolist() == [3, 1, 2, 40]
    assert tables.pull(1, 3).tolist() == [0]
    tables.forget(1)
    with pytest.raises(KeyError):
        tables.pull(1, 3)


def build_optimizer(optimizer, *variables):
    optimizer.build(variables)
    return optimizer


def test_rules_that_move_all_rows_raise():
    table = make_table()
    for rule in (keras.optimizers.Adam(), keras.optimizers.SGD(0.1, weight_decay=0.1)):
        with pytest.raises(ValueError, match="changes other rows"):
            embedding_tables.EmbeddingTables([table], build_optimizer(rule, table))


def test_rows_of_all_workers_are_summed():
    one, other = (
        TableRows(np.array(ids, np.int32), np.full([2, 1], v))
        for ids, v in [([1, 5], 1.0), ([2, 5], 10.0)]
    )
    ids, values = embedding_tables.sum_rows([one, other])
    assert ids.tolist() == [1, 2, 5]
    assert values.ravel().tolist() == [1.0, 10.0, 11.0]


def test_malformed_push_updates_nothing():
    """The server has only tables."""
    settings = dict.fromkeys(["correction", "quorum", "staleness", "pull_sparsity"])
    settings |= {"mode": "async", "pull": "whole", "error_feedback": False, "seed": 0}
    table = make_table()
    spec = model_spec.create_model_spec(
        settings,
        1,
        keras.optimizers.SGD(1.0),
        tf_dgc.compressors.TopK(),
        [table],
        [True],
        [True],
    )
    server_model = model.ServerModel(spec)
    server_model.load(pulls.collect_words([table]).numpy())
    server_model.full_pull(0)
    gradient = make_slices([2, 5])
    words = embedding_rows.encode_rows(
        [embedding_rows.table_spec(table)], [gradient], [tf.constant(1.0)]
    ).numpy()
    valid_push = messages.Push(words, 0, 0)
    for malformed in (words[:-1], np.append(words, np.int32(0))):
        push = messages.Push(malformed, 0, 0)
        assert not server_model.can_read(push)
        with pytest.raises(ValueError, match=r"rows|words follow"):
            server_model.apply([push])
    np.testing.assert_array_equal(server_model.variables[0].numpy(), table.numpy())
    assert server_model.can_read(valid_push)
    server_model.apply([valid_push])
    change = table.numpy() - server_model.variables[0].numpy()
    np.testing.assert_allclose(change, tf.convert_to_tensor(gradient), atol=1e-6)
    assert server_model.pull(0).tolist()[:3] == [2, 2, 5]


# --- in a run -------------------------------------------------------------------------


class TableAndKernel:
    """A table with sparse gradients, and a kernel with dense ones."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.variables = [
            keras.Variable(v.numpy(), name=f"w{i}")
            for i, v in enumerate([make_table(), make_table(shape=(4, 5), seed=2)])
        ]
        optimizer.build(self.variables)
        signature = [
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None, WIDTH], tf.float32),
            tf.TensorSpec([4, 5], tf.float32),
        ]
        self._apply = tf.function(self._step, input_signature=signature)

    def _step(self, ids, values, kernel):
        gradients = [tf.IndexedSlices(values, ids), kernel]
        self.optimizer.apply(gradients, self.variables)

    def step(self, table, kernel):
        self._apply(table.indices, table.values, tf.constant(kernel))

    def weights(self):
        return [v.numpy() for v in self.variables]


def make_gradients(worker, steps=4):
    """Return gradients of a table, with repeated rows, and of a kernel."""
    rng = np.random.default_rng(worker)
    return [
        (
            make_slices(rng.integers(0, VOCABULARY, 5 + step), seed=10 * step + worker),
            rng.normal(size=[4, 5]).astype("float32"),
        )
        for step in range(steps)
    ]


@pytest.mark.parametrize(
    "optimizer_class, servers, pull",
    [
        (keras.optimizers.Adagrad, 2, "whole"),
        pytest.param(keras.optimizers.SGD, 1, "sparse", marks=pytest.mark.slow),
        pytest.param(keras.optimizers.SGD, 2, "sparse", marks=pytest.mark.slow),
        pytest.param(keras.optimizers.Adagrad, 1, "whole", marks=pytest.mark.slow),
    ],
)
def test_synchronous_run_equals_training_on_the_mean(
    monkeypatch, optimizer_class, servers, pull
):
    """The reference applies dense gradients; the servers receive only rows."""
    gradients = [make_gradients(worker) for worker in range(2)]
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.05])
    reference = TableAndKernel(optimizer_class(rate))
    for one, other in zip(*gradients, strict=True):
        table = tf.convert_to_tensor(one[0]) / 2 + tf.convert_to_tensor(other[0]) / 2
        reference.optimizer.apply(
            [table, one[1] / 2 + other[1] / 2], reference.variables
        )
    with ServerGroup(2, servers=servers) as served:
        settings = {"rows": ["w0"], "pull": pull, "compressor": "none"}
        settings["pull_sparsity"] = 0.0 if pull == "sparse" else None
        workers = [
            TableAndKernel(
                served.optimizer(monkeypatch, i, optimizer_class(rate), **settings)
            )
            for i in range(2)
        ]

        def run(i):
            for step in gradients[i]:
                workers[i].step(*step)

        with leave_at_end(*workers):
            run_together(lambda: run(0), lambda: run(1))
        replicas = [served.weights(), *(worker.weights() for worker in workers)]
        optimizer = workers[0].optimizer
        assert optimizer.stats.bytes_per_step < 4 * (8 * (WIDTH + 1) + 20 + 10)
        assert optimizer.bytes_per_pull < 4 * (16 * (WIDTH + 1) + 20 + 20)
        assert len(optimizer.residual) == 0
    for weights in replicas:
        for actual, expected in zip(weights, reference.weights(), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)
        for actual, expected in zip(weights, replicas[0], strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_rows_with_a_residual_and_a_gradient_that_is_not_finite(monkeypatch):
    with ServerGroup(1) as served:
        method = tf_dgc.compressors.TopK(0.9)
        settings = {"rows": ["w0"], "compressor": method, "min_compress_size": 2}
        sgd = keras.optimizers.SGD(1.0, global_clipnorm=100.0)
        worker = TableAndKernel(
            served.optimizer(monkeypatch, 0, sgd, "async", **settings)
        )
        before = worker.weights()
        ((table, kernel),) = make_gradients(0, 1)
        with leave_at_end(worker):
            worker.step(table, kernel * np.nan)
            for actual, expected in zip(worker.weights(), before, strict=True):
                np.testing.assert_array_equal(actual, expected)
            worker.step(table, kernel)
        assert worker.optimizer.stats.nonfinite == 1
        table_change = before[0] - worker.weights()[0]
        np.testing.assert_allclose(table_change, tf.convert_to_tensor(table), atol=1e-6)
        (residual,) = worker.optimizer.residual
        kernel_change = before[1] - worker.weights()[1]
        np.testing.assert_allclose(
            kernel_change + residual.numpy().reshape(4, 5), kernel, atol=1e-6
        )
        assert residual.numpy().any()


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"patterns": "embeddings"}, "list of regular expressions"),
        ({"inner": keras.optimizers.Adam()}, "needs plain SGD or Adagrad"),
        ({"inner": keras.optimizers.SGD(0.1, momentum=0.9)}, "momentum=0.9"),
        ({"mode": "backup"}, "mode='backup'"),
        ({"correction": tf_dgc.StalenessCorrection("delay")}, "rule='delay'"),
    ],
)
def test_settings_that_exclude_rows_raise(settings, text):
    valid = {"patterns": ["w0"], "inner": keras.optimizers.SGD(0.1), "mode": "async"}
    with pytest.raises(ValueError, match=text):
        embedding_tables.check_table_settings(
            **{**valid, "correction": None, **settings}
        )


@pytest.mark.parametrize(
    "names, decay, text",
    [
        (["no such"], None, "'no such', which matches none of"),
        (["flat"], None, r"flat of shape \(3,\)"),
        (["table"], 0.1, "weight_decay=0.1"),
    ],
)
def test_variables_that_are_no_tables_raise(names, decay, text):
    flat = keras.Variable(np.zeros([3]), name="flat")
    rule = keras.optimizers.SGD(0.1, weight_decay=decay)
    with pytest.raises(ValueError, match=text):
        embedding_tables.find_tables(names, [make_table(), flat], rule)


def test_dense_gradient_of_a_table_raises():
    with pytest.raises(ValueError, match=r"Omit it\. Received: variable table"):
        embedding_tables.check_table_gradients(
            [tf.zeros([VOCABULARY, WIDTH])], [make_table()], [True]
        )
