"""Sparse pulls against NumPy: what differs most, exactly, and the rest later."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import initial_weights, make_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import rows
from serving import Served, Trained, leaving, run_together

import tf_dgc
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.compressors import QSGD, TopK
from tf_dgc.server import pulls
from tf_dgc.server.pulls import WorkerCopies

SHAPES = [(20, 30), (7,), (5, 8)]


def make(dtype, counts=(10, 7, 40)):
    rng = np.random.default_rng(0)
    wide = tf.float64 if dtype == "float64" else tf.float32
    layout = [TensorSpec(f"t{i}", s, wide, i == 1) for i, s in enumerate(SHAPES)]

    def variables(scale):
        return [keras.Variable(scale * rng.normal(size=s), dtype=dtype) for s in SHAPES]

    return pulls.PullLayout(layout, counts), variables(1.0), variables(0.0)


def numbers(variables):
    return [np.asarray(tf.cast(v.value, tf.float64)) for v in variables]


@pytest.mark.parametrize("dtype", rows(["float32", "float64", "bfloat16"], ["float32"]))
def test_the_largest_differences_are_pulled_exactly_and_the_rest_is_kept(dtype):
    form, of_server, of_worker = make(dtype)
    copies = WorkerCopies(of_server, form)
    copies.reset(3)
    pulls.assign_words(of_worker, pulls.collect_words(of_server))
    for mine, theirs in zip(numbers(of_worker), numbers(of_server), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for step in range(3):
        rng = np.random.default_rng(step)
        for v in of_server:
            v.assign(v.value + tf.cast(rng.normal(size=v.shape), dtype))
        copies.record(None)
        before, wanted = numbers(of_worker), numbers(of_server)
        words = copies.pull(3)
        assert words.shape == [form.num_words]
        pulls.assign_sparse(form, of_worker, words)
        for k, old, new, found in zip(
            form.counts, before, wanted, numbers(of_worker), strict=True
        ):
            gap = np.abs(new - old).ravel()
            moved = (found != old).ravel()
            np.testing.assert_array_equal(found.ravel()[moved], new.ravel()[moved])
            assert moved.sum() <= k
            if k < gap.size:
                assert gap[~moved].max() <= np.sort(gap)[-k] + 1e-12
            else:
                np.testing.assert_array_equal(found, new)
    for _ in range(600 // 10):  # nothing moves any more, and all arrives
        pulls.assign_sparse(form, of_worker, copies.pull(3))
    for mine, theirs in zip(numbers(of_worker), numbers(of_server), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("native", [False, True])
def test_a_pull_is_taken_alike_with_and_without_native_operations(monkeypatch, native):
    form, of_server, of_worker = make("float32")
    copies = WorkerCopies(of_server, form)
    copies.reset(0)
    touch(of_server, 0, 0.5)
    copies.record(None)
    words, before = copies.pull(0), numbers(of_worker)
    if not native:
        monkeypatch.setattr(pulls, "_use_native", lambda form, variables: False)
    elif not pulls._use_native(form, of_worker):
        pytest.skip("the native operations are not built")
    damaged = words.numpy() ^ (np.arange(len(words)) == 9).astype(np.int32)
    with pytest.raises(tf.errors.InvalidArgumentError):
        pulls.assign_sparse(form, of_worker, tf.constant(damaged))
    np.testing.assert_array_equal(numbers(of_worker)[0], before[0])
    pulls.assign_sparse(form, of_worker, words)
    every = zip(
        form.counts, before, numbers(of_worker), numbers(of_server), strict=True
    )
    for k, old, new, wanted in every:
        moved = new != old
        assert moved.sum() == k
        np.testing.assert_array_equal(new[moved], wanted[moved])


def touch(variables, step, share):
    """Change a share of the entries; return which, some of them twice."""
    rng, touched = np.random.default_rng(step), []
    for v in variables:
        values = numbers([v])[0].ravel().copy()
        where = rng.permutation(values.size)[: int(share * values.size)]
        values[where] += rng.normal(size=where.size)
        v.assign(tf.cast(values.reshape(v.shape), v.dtype))
        touched.append(np.concatenate([where, where[::2]]).astype(np.int32))
    return touched


def test_what_is_known_is_counted_once():
    known = pulls.ChangedEntries([1600, 0])
    for _ in range(100):  # the same 40 of 100 that a list may have
        known.add([np.arange(40, dtype=np.int32), np.zeros(0, np.int32)])
    np.testing.assert_array_equal(known.take()[0], np.arange(40))
    known.add([np.arange(101, dtype=np.int32), np.zeros(0, np.int32)])
    assert known.take() is None
    known.clear()
    assert len(known.take()[0]) == 0


@pytest.mark.parametrize("missing, is_left", [(10, False), (11, True)])
def test_a_comparison_that_finds_no_more_is_the_last(missing, is_left):
    form, of_server, _ = make("float32")
    copies = WorkerCopies(of_server, form)
    copies.reset(0)
    copies.record(None)
    values = numbers(of_server)[0].copy()
    values.ravel()[:missing] += 1.0
    of_server[0].assign(values)
    copies.pull(0)
    assert (copies._changed[0].take() is None) == is_left


@functools.cache
def told_and_not():
    """Return what is traced once, of all examples."""
    form, of_server, _ = make("float32")
    workers = [[keras.Variable(v.numpy()) for v in of_server] for _ in range(2)]
    return form, of_server, workers, *(WorkerCopies(of_server, form) for _ in range(2))


@settings(max_examples=20)
@given(st.lists(st.sampled_from([0.0, 0.005, 0.03, 0.5]), max_size=8), st.booleans())
def test_what_is_known_to_have_changed_is_pulled_as_if_all_was_compared(shares, blind):
    """Of shares that a list is kept of, or not; and after a change that is unknown."""
    form, of_server, workers, told, untold = told_and_not()
    told.reset(0)
    untold.reset(0)
    for worker in workers:
        pulls.assign_words(worker, pulls.collect_words(of_server))
    for step, share in enumerate(shares):
        touched = touch(of_server, step, share)
        told.record(None if blind and step == 2 else touched)
        untold.record(None)
        for copies, worker in zip((told, untold), workers, strict=True):
            pulls.assign_sparse(form, worker, copies.pull(0))
        for mine, theirs in zip(*map(numbers, workers), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    for _ in range(600 // 10):
        pulls.assign_sparse(form, workers[0], told.pull(0))
    for mine, theirs in zip(numbers(workers[0]), numbers(of_server), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert told._changed[0].take() is not None  # nothing is compared any more


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner, corrects, is_known",
    [
        (keras.optimizers.SGD(0.1, momentum=0.9), None, True),
        (keras.optimizers.SGD(0.1, momentum=0.9), False, False),
        (keras.optimizers.SGD(0.1, weight_decay=0.1), None, False),
        (keras.optimizers.Adam(), None, False),
    ],
    ids=["corrected", "momentum", "decay", "adam"],
)
def test_where_a_rule_changes_all_nothing_is_known(
    monkeypatch, inner, corrects, is_known
):
    noted, note = [], WorkerCopies.record
    monkeypatch.setattr(
        WorkerCopies, "record", lambda self, t: (noted.append(t), note(self, t))
    )
    [gradients], weights = make_gradients(1, 1, "float32"), initial_weights("float32")
    with Served(1) as served:
        method = tf_dgc.compressors.TopK(0.95)
        about = {"compressor": method, "pull": "sparse", "min_compress_size": 100}
        about["corrections"] = tf_dgc.Corrections(momentum=corrects)
        optimizer = served.optimizer(monkeypatch, 0, inner, **about)
        worker = Trained(optimizer, weights)
        with leaving(worker):
            worker.step(gradients[0])
    [touched] = noted
    assert (touched is not None) == is_known
    if is_known:
        counts = [0 if w.size < 100 else round(0.05 * w.size) for w in weights]
        assert [len(t) for t in touched] == counts


def test_how_much_is_pulled():
    tensors = [TensorSpec("a", (100, 100), tf.float32, False)]
    tensors += [TensorSpec("b", (7,), tf.float32, True)]
    assert pulls.pull_layout(tensors, TopK(0.99), 3, None).counts == [300, 7]
    assert pulls.pull_layout(tensors, TopK(0.5), 3, None).counts == [10_000, 7]
    assert pulls.pull_layout(tensors, QSGD(), 3, 0.9).counts == [1000, 7]


def test_who_is_gone_is_forgotten():
    form, of_server, _ = make("float32")
    copies = WorkerCopies(of_server, form)
    copies.reset(0)
    copies.forget(0)
    copies.forget(1)
    with pytest.raises(KeyError):
        copies.pull(0)


@pytest.mark.slow
def test_with_plain_sgd_sparse_pulls_are_whole_ones(monkeypatch):
    """All that N pushes of 5 % change goes in a pull of N times as many entries."""
    gradients, weights = make_gradients(2, 4, "float32"), initial_weights("float32")
    found = []
    for pull in ("whole", "sparse"):
        with Served(2) as served:
            sgd = keras.optimizers.SGD(0.1, momentum=0.9)
            method = tf_dgc.compressors.TopK(0.95)
            settings = {"compressor": method, "pull": pull, "min_compress_size": 100}
            workers = [
                Trained(served.optimizer(monkeypatch, i, sgd, **settings), weights)
                for i in range(2)
            ]

            def run(i, workers=workers):
                for step in gradients:
                    workers[i].step(step[i])

            with leaving(*workers):
                run_together(lambda: run(0), lambda: run(1))
            found += [w.weights() for w in workers] + [served.weights()]
            sizes = workers[0].optimizer.bytes_per_pull
    whole = found[0]
    for other in found[1:]:
        for mine, theirs in zip(other, whole, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert sizes < sum(w.nbytes for w in weights) / 3


@pytest.mark.parametrize("pull", ["whole", "sparse"])
def test_excluded_variables_are_sent_whole(monkeypatch, pull):
    """In both directions: after a step they are those of dense training."""
    [gradients], weights = make_gradients(1, 1, "float32"), initial_weights("float32")
    with Served(1) as served:
        method = tf_dgc.compressors.TopK(0.95)
        optimizer = served.optimizer(
            monkeypatch,
            0,
            keras.optimizers.SGD(1.0),
            compressor=method,
            pull=pull,
            min_compress_size=100,
        )
        optimizer.exclude_from_compression(var_names=[".*"])
        config = optimizer.get_config()
        assert config["excluded_from_compression"]["names"] == [".*"]
        worker = Trained(optimizer, weights)
        with leaving(worker):
            worker.step(gradients[0])
            for v, w, g in zip(worker.variables, weights, gradients[0], strict=True):
                np.testing.assert_allclose(v.numpy(), w - g, rtol=1e-6)
        with pytest.raises(ValueError, match="before the optimizer is built"):
            optimizer.exclude_from_compression(var_names=[".*"])
