"""Sparse pulls against NumPy: the largest differences at once, the rest later."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import initial_weights, make_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import rows
from serving import ServerGroup, TracedTrainer, leave_at_end, run_together

import tf_dgc
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.compressors import QSGD, TopK
from tf_dgc.server import pulls
from tf_dgc.server.pulls import WorkerCopies

SHAPES = [(20, 30), (7,), (5, 8)]


def make_layout_and_variables(dtype, counts=(10, 7, 40)):
    rng = np.random.default_rng(0)
    wide = tf.float64 if dtype == "float64" else tf.float32
    specs = [TensorSpec(f"t{i}", s, wide, i == 1) for i, s in enumerate(SHAPES)]

    def variables(scale):
        return [keras.Variable(scale * rng.normal(size=s), dtype=dtype) for s in SHAPES]

    return pulls.PullLayout(specs, counts), variables(1.0), variables(0.0)


def to_numpy(variables):
    return [np.asarray(tf.cast(v.value, tf.float64)) for v in variables]


@pytest.mark.parametrize("dtype", rows(["float32", "float64", "bfloat16"], ["float32"]))
def test_largest_differences_are_pulled_exactly_and_the_rest_later(dtype):
    layout, server_variables, worker_variables = make_layout_and_variables(dtype)
    copies = WorkerCopies(server_variables, layout)
    copies.reset(3)
    pulls.assign_words(worker_variables, pulls.collect_words(server_variables))
    for actual, expected in zip(
        to_numpy(worker_variables), to_numpy(server_variables), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    for step in range(3):
        rng = np.random.default_rng(step)
        for v in server_variables:
            v.assign(v.value + tf.cast(rng.normal(size=v.shape), dtype))
        copies.record(None)
        before, target = to_numpy(worker_variables), to_numpy(server_variables)
        words = copies.pull(3)
        assert words.shape == [layout.num_words]
        pulls.assign_sparse(layout, worker_variables, words)
        for k, old, new, pulled in zip(
            layout.counts, before, target, to_numpy(worker_variables), strict=True
        ):
            difference = np.abs(new - old).ravel()
            is_pulled = (pulled != old).ravel()
            np.testing.assert_array_equal(
                pulled.ravel()[is_pulled], new.ravel()[is_pulled]
            )
            assert is_pulled.sum() <= k
            if k < difference.size:
                assert difference[~is_pulled].max() <= np.sort(difference)[-k] + 1e-12
            else:
                np.testing.assert_array_equal(pulled, new)
    for _ in range(600 // 10):  # the server's weights stay, and all differences arrive
        pulls.assign_sparse(layout, worker_variables, copies.pull(3))
    for actual, expected in zip(
        to_numpy(worker_variables), to_numpy(server_variables), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("native", [False, True])
def test_pull_is_the_same_with_and_without_native_operations(monkeypatch, native):
    layout, server_variables, worker_variables = make_layout_and_variables("float32")
    copies = WorkerCopies(server_variables, layout)
    copies.reset(0)
    change_entries(server_variables, 0, 0.5)
    copies.record(None)
    words, before = copies.pull(0), to_numpy(worker_variables)
    if not native:
        monkeypatch.setattr(pulls, "_use_native", lambda layout, variables: False)
    elif not pulls._use_native(layout, worker_variables):
        pytest.skip("the native operations are not built")
    damaged = words.numpy() ^ (np.arange(len(words)) == 9).astype(np.int32)
    with pytest.raises(tf.errors.InvalidArgumentError):
        pulls.assign_sparse(layout, worker_variables, tf.constant(damaged))
    np.testing.assert_array_equal(to_numpy(worker_variables)[0], before[0])
    pulls.assign_sparse(layout, worker_variables, words)
    after, target = to_numpy(worker_variables), to_numpy(server_variables)
    for k, old, new, expected in zip(layout.counts, before, after, target, strict=True):
        is_pulled = new != old
        assert is_pulled.sum() == k
        np.testing.assert_array_equal(new[is_pulled], expected[is_pulled])


def change_entries(variables, step, share):
    """Change a share of the entries; return their indices, half of them twice."""
    rng = np.random.default_rng(step)
    changed_entries = []
    for v in variables:
        values = to_numpy([v])[0].ravel().copy()
        indices = rng.permutation(values.size)[: int(share * values.size)]
        values[indices] += rng.normal(size=indices.size)
        v.assign(tf.cast(values.reshape(v.shape), v.dtype))
        changed_entries.append(np.concatenate([indices, indices[::2]]).astype(np.int32))
    return changed_entries


def test_changed_entries_are_counted_once():
    changes = pulls.ChangedEntries([1600, 0])
    for _ in range(100):  # the same 40 entries; a list holds up to 100
        changes.add([np.arange(40, dtype=np.int32), np.zeros(0, np.int32)])
    np.testing.assert_array_equal(changes.take()[0], np.arange(40))
    changes.add([np.arange(101, dtype=np.int32), np.zeros(0, np.int32)])
    assert changes.take() is None
    changes.clear()
    assert len(changes.take()[0]) == 0


@pytest.mark.parametrize("missing, compares_again", [(10, False), (11, True)])
def test_full_comparison_ends_when_all_differences_are_pulled(missing, compares_again):
    layout, server_variables, _ = make_layout_and_variables("float32")
    copies = WorkerCopies(server_variables, layout)
    copies.reset(0)
    copies.record(None)
    values = to_numpy(server_variables)[0].copy()
    values.ravel()[:missing] += 1.0
    server_variables[0].assign(values)
    copies.pull(0)
    assert (copies._changed[0].take() is None) == compares_again


@functools.cache
def tracking_and_comparing_copies():
    """Return a layout, variables and copies, which are traced once for all examples."""
    layout, server_variables, _ = make_layout_and_variables("float32")
    workers = [[keras.Variable(v.numpy()) for v in server_variables] for _ in range(2)]
    return (
        layout,
        server_variables,
        workers,
        *(WorkerCopies(server_variables, layout) for _ in range(2)),
    )


@settings(max_examples=20)
@given(st.lists(st.sampled_from([0.0, 0.005, 0.03, 0.5]), max_size=8), st.booleans())
def test_tracked_changes_are_pulled_like_compared_ones(shares, forgets):
    """With short and long lists of changed entries, and after an unknown change."""
    layout, server_variables, workers, tracking, comparing = (
        tracking_and_comparing_copies()
    )
    tracking.reset(0)
    comparing.reset(0)
    for worker in workers:
        pulls.assign_words(worker, pulls.collect_words(server_variables))
    for step, share in enumerate(shares):
        changed_entries = change_entries(server_variables, step, share)
        tracking.record(None if forgets and step == 2 else changed_entries)
        comparing.record(None)
        for copies, worker in zip((tracking, comparing), workers, strict=True):
            pulls.assign_sparse(layout, worker, copies.pull(0))
        for actual, expected in zip(*map(to_numpy, workers), strict=True):
            np.testing.assert_array_equal(actual, expected)
    for _ in range(600 // 10):
        pulls.assign_sparse(layout, workers[0], tracking.pull(0))
    for actual, expected in zip(
        to_numpy(workers[0]), to_numpy(server_variables), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    assert tracking._changed[0].take() is not None  # no full comparison any more


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner, corrects, is_tracked",
    [
        (keras.optimizers.SGD(0.1, momentum=0.9), None, True),
        (keras.optimizers.SGD(0.1, momentum=0.9), False, False),
        (keras.optimizers.SGD(0.1, weight_decay=0.1), None, False),
        (keras.optimizers.Adam(), None, False),
    ],
    ids=["corrected", "momentum", "decay", "adam"],
)
def test_changes_are_tracked_only_if_the_rule_changes_few_entries(
    monkeypatch, inner, corrects, is_tracked
):
    records = []
    stock_record = WorkerCopies.record

    def record(copies, changed_entries):
        records.append(changed_entries)
        stock_record(copies, changed_entries)

    monkeypatch.setattr(WorkerCopies, "record", record)
    [gradients], weights = make_gradients(1, 1, "float32"), initial_weights("float32")
    with ServerGroup(1) as served:
        method = tf_dgc.compressors.TopK(0.95)
        options = {"compressor": method, "pull": "sparse", "min_compress_size": 100}
        options["corrections"] = tf_dgc.Corrections(momentum=corrects)
        optimizer = served.optimizer(monkeypatch, 0, inner, **options)
        worker = TracedTrainer(optimizer, weights)
        with leave_at_end(worker):
            worker.step(gradients[0])
    [changed_entries] = records
    assert (changed_entries is not None) == is_tracked
    if is_tracked:
        counts = [0 if w.size < 100 else round(0.05 * w.size) for w in weights]
        assert [len(t) for t in changed_entries] == counts


def test_number_of_pulled_entries():
    tensors = [TensorSpec("a", (100, 100), tf.float32, False)]
    tensors += [TensorSpec("b", (7,), tf.float32, True)]
    assert pulls.pull_layout(tensors, TopK(0.99), 3, None).counts == [300, 7]
    assert pulls.pull_layout(tensors, TopK(0.5), 3, None).counts == [10_000, 7]
    assert pulls.pull_layout(tensors, QSGD(), 3, 0.9).counts == [1000, 7]


def test_pull_of_a_forgotten_worker_raises():
    layout, server_variables, _ = make_layout_and_variables("float32")
    copies = WorkerCopies(server_variables, layout)
    copies.reset(0)
    copies.forget(0)
    copies.forget(1)
    with pytest.raises(KeyError):
        copies.pull(0)


@pytest.mark.slow
def test_sparse_pulls_with_plain_sgd_equal_full_pulls(monkeypatch):
    """One sparse pull holds all entries that N pushes of 5 % change."""
    gradients, weights = make_gradients(2, 4, "float32"), initial_weights("float32")
    results = []
    for pull in ("whole", "sparse"):
        with ServerGroup(2) as served:
            sgd = keras.optimizers.SGD(0.1, momentum=0.9)
            method = tf_dgc.compressors.TopK(0.95)
            settings = {"compressor": method, "pull": pull, "min_compress_size": 100}
            workers = [
                TracedTrainer(
                    served.optimizer(monkeypatch, i, sgd, **settings), weights
                )
                for i in range(2)
            ]

            def run(i, workers=workers):
                for step in gradients:
                    workers[i].step(step[i])

            with leave_at_end(*workers):
                run_together(lambda: run(0), lambda: run(1))
            results += [w.weights() for w in workers] + [served.weights()]
            sizes = workers[0].optimizer.bytes_per_pull
    reference = results[0]
    for result in results[1:]:
        for actual, expected in zip(result, reference, strict=True):
            np.testing.assert_array_equal(actual, expected)
    assert sizes < sum(w.nbytes for w in weights) / 3


@pytest.mark.parametrize("pull", ["whole", "sparse"])
def test_excluded_variables_are_sent_whole(monkeypatch, pull):
    """In both directions: after a step they equal those of dense training."""
    [gradients], weights = make_gradients(1, 1, "float32"), initial_weights("float32")
    with ServerGroup(1) as served:
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
        worker = TracedTrainer(optimizer, weights)
        with leave_at_end(worker):
            worker.step(gradients[0])
            for v, w, g in zip(worker.variables, weights, gradients[0], strict=True):
                np.testing.assert_allclose(v.numpy(), w - g, rtol=1e-6)
        with pytest.raises(ValueError, match="before the optimizer is built"):
            optimizer.exclude_from_compression(var_names=[".*"])
