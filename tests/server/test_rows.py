"""Rows: how they travel, what a server does with them, and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from selection import rows as rows_of
from serving import Served, leaving, run_together

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


def slices(ids, seed=0, dtype="float32"):
    values = np.random.default_rng(seed).normal(size=[len(ids), WIDTH]).astype(dtype)
    shape = tf.constant([VOCABULARY, WIDTH], tf.int64)
    return tf.IndexedSlices(tf.constant(values), tf.constant(ids, tf.int64), shape)


def variable(dtype="float32", shape=(VOCABULARY, WIDTH), seed=1):
    value = np.random.default_rng(seed).normal(size=shape)
    return keras.Variable(value, dtype=dtype, name="table")


# --- on the wire ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", rows_of(["float32", "float64", "bfloat16"], ["float32"])
)
def test_rows_arrive_as_they_were(dtype):
    table = variable(dtype)
    form, given = embedding_rows.table_spec(table), slices([3, 7, 49])
    one, scale = tf.constant(2.0, tf.float64), tf.constant(2.0, tf.float64)
    words = embedding_rows.encode_rows(
        [form, form], [given, slices([])], [scale, one]
    ).numpy()
    assert len(words) == 2 + 3 * (1 + form.row_words)
    (some, none), rest = embedding_rows.read_rows(
        [form, form], np.append(words, np.int32([1, 2]))
    )
    np.testing.assert_array_equal(some.ids, [3, 7, 49])
    np.testing.assert_array_equal(some.values, 2 * given.values.numpy())
    assert len(none.ids) == 0
    assert rest.tolist() == [1, 2]


def test_nothing_is_sent_of_what_is_not_finite():
    form = embedding_rows.table_spec(variable())
    words = embedding_rows.encode_rows(
        [form], [slices([3])], [tf.constant(np.nan, tf.float64)]
    )
    assert words.numpy().tolist() == [0]


@pytest.mark.parametrize(
    "words",
    [[], [-1], [51], [1, 3], [2, 3, 3], [2, 4, 3], [1, -1], [1, 50]],
    ids=["no words", "negative", "too many", "cut", "twice", "order", "below", "above"],
)
def test_what_is_no_rows_is_refused(words):
    form = embedding_rows.table_spec(variable())
    filled = [*words, *[0] * (12 if len(words) > 1 else 0)][
        : None if words != [1, 3] else 4
    ]
    with pytest.raises(ValueError, match=r"rows"):
        embedding_rows.read_rows([form], np.array(filled, np.int32))


# --- on a server ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [keras.optimizers.SGD, keras.optimizers.Adagrad],
    ids=["sgd", "adagrad"],
)
def test_rows_are_updated_as_by_keras(make):
    """With the bits that a dense gradient of zeros elsewhere gives."""
    mine, theirs = variable(), variable()
    one, other = make(0.1), make(0.1)
    one.build([mine]), other.build([theirs])
    served = embedding_tables.EmbeddingTables([mine], one)
    for step in range(3):
        given = slices([1, 4 + step, 30], step)
        some = TableRows(tf.cast(given.indices, tf.int32), given.values)
        served.update([some], tf.convert_to_tensor(one.learning_rate))
        other.apply([tf.convert_to_tensor(given)], [theirs])
    np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


def test_a_worker_is_given_the_rows_that_have_changed_since():
    table, own = variable(), variable()
    forms = [embedding_rows.table_spec(table)]
    served = embedding_tables.EmbeddingTables(
        [table], build(keras.optimizers.SGD(0.1), table)
    )
    for worker in range(2):
        served.reset(worker, 0)
    for clock, ids in enumerate([[1, 2], [2, 40], []], 1):
        given = slices(ids, clock)
        some = TableRows(given.indices.numpy().astype(np.int32), given.values)
        served.update([some], tf.constant(0.1))
        served.record([some], clock)
        words = served.pull(0, clock)
        assert words[0] == len(ids)
        embedding_rows.assign_rows(forms, [own], tf.constant(words))
        np.testing.assert_array_equal(own.numpy(), table.numpy())
    assert served.pull(1, 3)[:4].tolist() == [3, 1, 2, 40]
    assert served.pull(1, 3).tolist() == [0]
    served.forget(1)
    with pytest.raises(KeyError):
        served.pull(1, 3)


def build(optimizer, *variables):
    optimizer.build(variables)
    return optimizer


def test_a_server_refuses_rules_that_move_all_rows():
    table = variable()
    for rule in (keras.optimizers.Adam(), keras.optimizers.SGD(0.1, weight_decay=0.1)):
        with pytest.raises(ValueError, match="changes other rows"):
            embedding_tables.EmbeddingTables([table], build(rule, table))


def test_pushes_are_added_up_worker_after_worker():
    one, other = (
        TableRows(np.array(ids, np.int32), np.full([2, 1], v))
        for ids, v in [([1, 5], 1.0), ([2, 5], 10.0)]
    )
    ids, values = embedding_tables.sum_rows([one, other])
    assert ids.tolist() == [1, 2, 5]
    assert values.ravel().tolist() == [1.0, 10.0, 11.0]


def test_a_push_that_is_no_rows_updates_nothing():
    """On a server that has tables alone."""
    settings = dict.fromkeys(["correction", "quorum", "staleness", "pull_sparsity"])
    settings |= {"mode": "async", "pull": "whole", "error_feedback": False, "seed": 0}
    given = settings, 1, keras.optimizers.SGD(1.0), tf_dgc.compressors.TopK()
    table = variable()
    served = model.ServerModel(
        model_spec.create_model_spec(*given, [table], [True], [True])
    )
    served.load(pulls.collect_words([table]).numpy())
    served.full_pull(0)
    some = slices([2, 5])
    words = embedding_rows.encode_rows(
        [embedding_rows.table_spec(table)], [some], [tf.constant(1.0)]
    ).numpy()
    sound = messages.Push(words, 0, 0)
    for wrong in (words[:-1], np.append(words, np.int32(0))):
        push = messages.Push(wrong, 0, 0)
        assert not served.can_read(push)
        with pytest.raises(ValueError, match=r"rows|words follow"):
            served.apply([push])
    np.testing.assert_array_equal(served.variables[0].numpy(), table.numpy())
    assert served.can_read(sound)
    served.apply([sound])
    moved = table.numpy() - served.variables[0].numpy()
    np.testing.assert_allclose(moved, tf.convert_to_tensor(some), atol=1e-6)
    assert served.pull(0).tolist()[:3] == [2, 2, 5]


# --- in a run -------------------------------------------------------------------------


class Looked:
    """A table and a kernel, whose gradients are of some rows, and of all entries."""

    def __init__(self, optimizer):
        self.optimizer, self.variables = (
            optimizer,
            [
                keras.Variable(v.numpy(), name=f"w{i}")
                for i, v in enumerate([variable(), variable(shape=(4, 5), seed=2)])
            ],
        )
        optimizer.build(self.variables)
        shapes = ([None], tf.int64), ([None, WIDTH], tf.float32), ([4, 5], tf.float32)
        signature = [tf.TensorSpec(*shape) for shape in shapes]
        self._apply = tf.function(self._step, input_signature=signature)

    def _step(self, ids, values, kernel):
        given = [tf.IndexedSlices(values, ids), kernel]
        self.optimizer.apply(given, self.variables)

    def step(self, given, kernel):
        self._apply(given.indices, given.values, tf.constant(kernel))

    def weights(self):
        return [v.numpy() for v in self.variables]


def batches(worker, steps=4):
    """Return gradients of a table, with rows that are twice there, and of a kernel."""
    rng = np.random.default_rng(worker)
    return [
        (
            slices(rng.integers(0, VOCABULARY, 5 + step), seed=10 * step + worker),
            rng.normal(size=[4, 5]).astype("float32"),
        )
        for step in range(steps)
    ]


@pytest.mark.parametrize(
    "make, servers, pull",
    [
        (keras.optimizers.Adagrad, 2, "whole"),
        pytest.param(keras.optimizers.SGD, 1, "sparse", marks=pytest.mark.slow),
        pytest.param(keras.optimizers.SGD, 2, "sparse", marks=pytest.mark.slow),
        pytest.param(keras.optimizers.Adagrad, 1, "whole", marks=pytest.mark.slow),
    ],
)
def test_a_synchronous_run_is_that_of_the_sum(monkeypatch, make, servers, pull):
    """By the inner optimizer alone, with dense gradients; only rows travel."""
    given = [batches(worker) for worker in range(2)]
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.05])
    alone = Looked(make(rate))
    for one, other in zip(*given, strict=True):
        table = tf.convert_to_tensor(one[0]) / 2 + tf.convert_to_tensor(other[0]) / 2
        alone.optimizer.apply([table, one[1] / 2 + other[1] / 2], alone.variables)
    with Served(2, servers=servers) as served:
        settings = {"rows": ["w0"], "pull": pull, "compressor": "none"}
        settings["pull_sparsity"] = 0.0 if pull == "sparse" else None
        workers = [
            Looked(served.optimizer(monkeypatch, i, make(rate), **settings))
            for i in range(2)
        ]

        def run(i):
            for step in given[i]:
                workers[i].step(*step)

        with leaving(*workers):
            run_together(lambda: run(0), lambda: run(1))
        every = [served.weights(), *(worker.weights() for worker in workers)]
        optimizer = workers[0].optimizer
        assert optimizer.stats.bytes_per_step < 4 * (8 * (WIDTH + 1) + 20 + 10)
        assert optimizer.bytes_per_pull < 4 * (16 * (WIDTH + 1) + 20 + 20)
        assert len(optimizer.residual) == 0
    for weights in every:
        for mine, theirs in zip(weights, alone.weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)
        for mine, theirs in zip(weights, every[0], strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_with_a_residual_beside_it_and_a_gradient_that_is_not_finite(monkeypatch):
    with Served(1) as served:
        method = tf_dgc.compressors.TopK(0.9)
        settings = {"rows": ["w0"], "compressor": method, "min_compress_size": 2}
        sgd = keras.optimizers.SGD(1.0, global_clipnorm=100.0)
        worker = Looked(served.optimizer(monkeypatch, 0, sgd, "async", **settings))
        before = worker.weights()
        ((given, kernel),) = batches(0, 1)
        with leaving(worker):
            worker.step(given, kernel * np.nan)
            for mine, theirs in zip(worker.weights(), before, strict=True):
                np.testing.assert_array_equal(mine, theirs)
            worker.step(given, kernel)
        assert worker.optimizer.stats.nonfinite == 1
        moved = before[0] - worker.weights()[0]
        np.testing.assert_allclose(moved, tf.convert_to_tensor(given), atol=1e-6)
        (residual,) = worker.optimizer.residual
        gone = before[1] - worker.weights()[1]
        np.testing.assert_allclose(
            gone + residual.numpy().reshape(4, 5), kernel, atol=1e-6
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
def test_settings_that_do_not_go_with_rows(settings, text):
    given = {"patterns": ["w0"], "inner": keras.optimizers.SGD(0.1), "mode": "async"}
    with pytest.raises(ValueError, match=text):
        embedding_tables.check_table_settings(
            **{**given, "correction": None, **settings}
        )


@pytest.mark.parametrize(
    "names, decay, text",
    [
        (["no such"], None, "'no such', which matches none of"),
        (["flat"], None, r"flat of shape \(3,\)"),
        (["table"], 0.1, "weight_decay=0.1"),
    ],
)
def test_variables_that_are_no_tables(names, decay, text):
    flat = keras.Variable(np.zeros([3]), name="flat")
    rule = keras.optimizers.SGD(0.1, weight_decay=decay)
    with pytest.raises(ValueError, match=text):
        embedding_tables.find_tables(names, [variable(), flat], rule)


def test_a_gradient_of_all_rows_is_refused():
    with pytest.raises(ValueError, match=r"Omit it\. Received: variable table"):
        embedding_tables.check_table_gradients(
            [tf.zeros([VOCABULARY, WIDTH])], [variable()], [True]
        )
