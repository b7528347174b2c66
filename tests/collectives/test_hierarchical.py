"""Hierarchical collectives: equal results, no lost entries, few bytes per machine."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer
from selection import in_turn, rows

import tf_dgc
from tf_dgc.codecs import buffer
from tf_dgc.collectives import Hierarchical, Rank
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.requests import AllGather, AllToAll
from tf_dgc.compressors import num_sent
from tf_dgc.multiworker import workers
from tf_dgc.testing import run_all

GROUPS = {
    "2x2": [[0, 1], [2, 3]],
    "2x2 across": [[0, 2], [1, 3]],
    "2x3": [[0, 1, 2], [3, 4, 5]],
    "3x2": [[0, 5], [1, 4], [2, 3]],
    "1x4": [[0, 1, 2, 3]],
    "4x1": [[0], [1], [2], [3]],
    "1x1": [[0]],
}
SHAPES = [(40, 50), (9,), (61, 33)]
SPARSITY = 0.97


def simulate(groups, operation, values, record=None):
    algorithm = Hierarchical(groups)
    steps = [
        getattr(algorithm, operation)(tf.constant(value), Rank(worker, len(values)))
        for worker, value in enumerate(values)
    ]
    return [outcome.numpy() for outcome in run_all(steps, record)]


@pytest.mark.parametrize(("name", "size"), in_turn(GROUPS, [13, 0, 1]))
def test_all_workers_get_the_same_result(name, size):
    num_workers = sum(map(len, GROUPS[name]))
    rng = np.random.default_rng(num_workers)
    for dtype in ("float32", "float16", "float64", "int32"):
        vectors = rng.integers(-9, 9, size=(num_workers, size)).astype(dtype)
        for total in simulate(GROUPS[name], "sum", vectors):
            assert total.dtype == dtype
            np.testing.assert_array_equal(total, vectors.sum(axis=0))
    words = rng.integers(-9, 9, size=(num_workers, size)).astype("int32")
    for gathered in simulate(GROUPS[name], "gather", words):
        np.testing.assert_array_equal(gathered, words)


def traffic(record, groups, worker=0):
    """Return the bytes that a worker sends, in total and to other machines."""
    (machine,) = [group for group in groups if worker in group]
    total = outside = 0
    for message in record[worker]:
        values, group = message[0], message.group
        size = values.dtype.size * int(tf.size(values))
        others = len(group) - 1
        if isinstance(message, AllGather):
            sent = others * size
        elif isinstance(message, AllToAll):
            sent = size * others / len(group)
        else:
            sent = 2 * size * others / len(group)
        total += sent
        outside += 0 if set(group) <= set(machine) else sent
    return total, outside


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("operation", ["sum", "gather"])
def test_bytes_equal_the_stated_cost(name, operation):
    groups = GROUPS[name]
    num_workers, node_size = sum(map(len, groups)), len(groups[0])
    record = [[] for _ in range(num_workers)]
    simulate(groups, operation, np.ones([num_workers, 840], "int32"), record)
    cost = getattr(Hierarchical(groups), f"cost_of_{operation}")(3360, num_workers)
    total, outside = traffic(record, groups)
    assert total == cost.sent
    machines = num_workers // node_size
    share = 2 / machines / node_size if operation == "sum" else 1
    assert outside == (machines - 1) * share * 3360


def test_without_groups_each_worker_is_a_machine():
    vectors = np.arange(6, dtype="float32").reshape(3, 2)
    for total in simulate(None, "sum", vectors):
        np.testing.assert_array_equal(total, vectors.sum(axis=0))


@pytest.mark.parametrize(
    "groups",
    [[], [[]], [[0, 1], [1, 2]], [[1, 2]], [[0, 1], [3, 4]], "all", [0, 1], 3, [["a"]]],
)
def test_groups_that_are_no_partition_raise(groups):
    with pytest.raises(ValueError, match=r"every worker from 0 on.*Received"):
        Hierarchical(groups)


def test_groups_of_unequal_sizes_raise(strategies):
    with pytest.raises(ValueError, match=r"of one size.*Received"):
        Hierarchical([[0, 1], [2]])
    with pytest.raises(ValueError, match=r"as many workers on each.*'b': 1"):
        Hierarchical().resolve(["a", "b", "a"])


def test_groups_of_another_number_of_workers_raise(strategies):
    """When the optimizer is created, unless there is only one worker."""
    algorithm = Hierarchical([[0, 1], [2, 3]])

    def make_optimizer():
        return tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1), collective=algorithm)

    assert make_optimizer().collective is algorithm
    with strategies[2].scope(), pytest.raises(ValueError, match="but there are 2"):
        make_optimizer()


def test_groups_follow_from_the_hosts(strategies):
    hosts = ["a", "b", "a", "b"]
    assert Hierarchical().resolve(hosts).groups == [[0, 2], [1, 3]]
    assert Hierarchical([[0, 1]]).resolve(["a", "b"]).groups == [[0, 1]]
    assert workers.hosts(strategies[3]) == [""] * 3
    assert workers.hosts(strategies[1]) == [""]


class TwoReplicasPerTask:
    """The parts of a strategy that tell hosts: two replicas in each process."""

    num_replicas_in_sync = 6

    class cluster_resolver:
        @staticmethod
        def cluster_spec():
            jobs = {"worker": ["[::1]:3", "b:1"], "chief": ["b:2"], "ps": ["c:1"]}
            return tf.train.ClusterSpec(jobs)


def test_hosts_of_a_cluster():
    assert workers.hosts(TwoReplicasPerTask) == ["b", "b", "[::1]", "[::1]", "b", "b"]


@pytest.mark.parametrize("length", [5, 9])
@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_nonfinite_flag_is_added(length, finite, twice):
    body = [tf.range(length - buffer.HEADER_WORDS)]
    words = buffer.add_header(7, length, body, tf.constant(True))
    words = buffer.add_nonfinite_flag(words, tf.constant(finite))
    if twice:
        words = buffer.add_nonfinite_flag(words, tf.constant(False))
    expected = buffer.add_header(7, length, body, tf.constant(finite and not twice))
    np.testing.assert_array_equal(words, expected)


def make_trainer(strategies, groups, sgd, traced=True, **settings):
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=s).astype("float32") for s in SHAPES]
    num_workers = sum(map(len, groups)) if groups else 4
    algorithm = Hierarchical(groups) if groups else "ring"
    settings = {"sparsity": SPARSITY, "collective": algorithm, **settings}
    return Trainer(
        strategies[num_workers],
        lambda: tf_dgc.DGCOptimizer(sgd(), **settings),
        weights,
        traced=traced,
    )


def integer_gradients(rng, num_workers):
    """Return gradients whose sums are exact, `[worker][tensor]`."""
    return [
        [rng.integers(-64, 64, size=s).astype("float32") for s in SHAPES]
        for _ in range(num_workers)
    ]


class Reference:
    """`Hierarchical` in NumPy: each worker compresses a shard of the node's sum."""

    def __init__(self, groups, momentum):
        self.groups, self.momentum = groups, momentum
        node_size = len(groups[0])
        self.residual = [
            [
                [np.zeros(-(-np.prod(s) // node_size) * node_size) for s in SHAPES]
                for _ in g
            ]
            for g in groups
        ]
        self.velocity = [[[r.copy() for r in w] for w in m] for m in self.residual]

    def step(self, gradients):
        """Return the sums that all workers apply."""
        totals = [np.zeros(int(np.prod(s))) for s in SHAPES]
        for machine, group in enumerate(self.groups):
            for i, shape in enumerate(SHAPES):
                size = int(np.prod(shape))
                if len(shape) == 1:  # uncompressed
                    totals[i] += sum(gradients[w][i] for w in group)
                    continue
                node_sum = sum(gradients[w][i].ravel() for w in group)
                totals[i] += self._machine(machine, i, node_sum)[:size]
        return totals

    def _machine(self, machine, i, node_sum):
        width = len(self.residual[machine][0][i]) // len(self.groups[machine])
        k = num_sent(width, SPARSITY)
        sent = np.zeros_like(self.residual[machine][0][i])
        padded = np.concatenate([node_sum, np.zeros(len(sent) - len(node_sum))])
        for rank in range(len(self.groups[machine])):
            shard = slice(rank * width, (rank + 1) * width)
            velocity = self.velocity[machine][rank][i]
            residual = self.residual[machine][rank][i]
            velocity[shard] = self.momentum * velocity[shard] + padded[shard]
            residual[shard] += velocity[shard]
            selected = (
                shard.start + np.argsort(-np.abs(residual[shard]), kind="stable")[:k]
            )
            sent[selected] += residual[selected]
            residual[selected] = velocity[selected] = 0
        return sent


@pytest.mark.parametrize(
    ("name", "mode"),
    in_turn(["2x2 across", "2x2", "1x4", "4x1"], ["eager", "traced"], ["2x2 across"]),
)
def test_equals_the_reference(strategies, name, mode):
    """The gradients have no ties, which would be broken at random."""
    groups = GROUPS[name]
    sgd = lambda: keras.optimizers.SGD(0.25, momentum=0.5)  # noqa: E731
    trainer = make_trainer(
        strategies,
        groups,
        sgd,
        traced=mode == "traced",
        corrections=tf_dgc.Corrections(factor_masking=True),
    )
    reference = Reference(groups, 0.5)
    weights = [w.astype("float64").ravel() for w in trainer.weights()]
    rng = np.random.default_rng(0)
    momentum = np.zeros(9)
    for _ in range(3):
        gradients = [
            [rng.normal(size=s).astype("float32") for s in SHAPES] for _ in range(4)
        ]
        trainer.step(gradients)
        totals = reference.step(gradients)
        momentum = totals[1] = 0.5 * momentum + totals[1]
        weights = [w - 0.25 * t for w, t in zip(weights, totals, strict=True)]
        for actual, expected in zip(trainer.weights(), weights, strict=True):
            np.testing.assert_allclose(actual.ravel(), expected, atol=1e-5)
    for copies in trainer.replica_weights():
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
    residuals = trainer.local(trainer.optimizer.residual)
    for machine, group in enumerate(groups):
        for rank, worker in enumerate(group):
            for i in (0, 2):
                actual = residuals[worker][i].ravel()
                expected = 0.25 * reference.residual[machine][rank][i]
                np.testing.assert_allclose(actual, expected[: len(actual)], atol=1e-5)


@pytest.mark.parametrize(
    "uncompressed_dtype", rows([None, "bfloat16"], [None]), ids=str
)
def test_no_entries_are_lost(strategies, uncompressed_dtype):
    """Updates and residuals add up; a worker's NaN costs only its own gradient."""
    sgd = lambda: keras.optimizers.SGD(0.25)  # noqa: E731
    settings = {
        "uncompressed_dtype": uncompressed_dtype,
        "diagnostics": tf_dgc.Diagnostics(check_every=2),
    }
    trainer = make_trainer(strategies, GROUPS["2x2"], sgd, None, **settings)
    rng = np.random.default_rng(0)
    before = trainer.weights()
    total = [np.zeros(s) for s in SHAPES]
    for step in range(3):
        gradients = integer_gradients(rng, 4)
        finite = gradients
        if step == 1:
            gradients[2][1][4] = np.nan
            finite = gradients[:2] + gradients[3:]
        trainer.step(gradients)
        total = [t + sum(g[i] for g in finite) for i, t in enumerate(total)]
    assert trainer.optimizer.stats.nonfinite == 1
    residuals = trainer.local(trainer.optimizer.residual)
    for i, (old, new) in enumerate(zip(before, trainer.weights(), strict=True)):
        residual = sum(worker[i] for worker in residuals)
        np.testing.assert_allclose(old - new, 0.25 * total[i] - residual, atol=2e-4)
    second_shard = residuals[1][0].ravel()
    assert not second_shard[:1000].any()
    assert second_shard[1000:].any()


def test_several_dtypes_and_sparse_gradients(strategies):
    """With the gradient of an embedding, and no uncompressed tensor."""
    dtypes = {(30, 40): "float32", (20, 30): "float64", (25, 40): "float16"}
    weights = [np.zeros(shape, dtype) for shape, dtype in dtypes.items()]
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer(
            keras.optimizers.SGD(1.0),
            SPARSITY,
            collective=Hierarchical([[0, 1]]),
            min_compress_size=1,
        ),
        weights,
        traced=False,
    )
    rng = np.random.default_rng(0)
    dense = [
        [rng.integers(-8, 8, size=s).astype(d) for s, d in dtypes.items()]
        for _ in range(2)
    ]
    rows = [tf.IndexedSlices(g[0][[3, 7]], [3, 7], (30, 40)) for g in dense]
    total = [sum(g[i].astype("float64") for g in dense) for i in range(3)]
    total[0][[i for i in range(30) if i not in (3, 7)]] = 0

    def replica():
        worker = tf.distribute.get_replica_context().replica_id_in_sync_group
        worker = int(tf.get_static_value(worker))
        gradients = [rows[worker], *map(tf.constant, dense[worker][1:])]
        trainer.optimizer.apply(gradients)

    strategies[2].run(replica)
    residuals = trainer.local(trainer.optimizer.residual)
    for i, change in enumerate(trainer.weights()):
        assert np.any(change)
        residual = sum(worker[i] for worker in residuals)
        np.testing.assert_array_equal(residual - change, total[i])


@pytest.mark.slow
def test_resumes_with_other_groups(strategies):
    """From 2 x 2 workers to 3 x 1 and 1 x 2: the new workers share the residual."""
    sgd = lambda: keras.optimizers.SGD(0.25)  # noqa: E731
    trainer = make_trainer(strategies, GROUPS["2x2"], sgd, False)
    rng = np.random.default_rng(0)
    trainer.step(integer_gradients(rng, 4))
    for groups in ([[0], [1], [2]], [[0, 1]]):
        before = sum_of_residuals(trainer)
        saved = trainer.save()
        trainer = make_trainer(strategies, groups, sgd, False)
        trainer.load(saved)
        for actual, expected in zip(sum_of_residuals(trainer), before, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)
        weights = trainer.weights()
        gradients = integer_gradients(rng, len(groups) * len(groups[0]))
        trainer.step(gradients)
        for i, (old, new) in enumerate(zip(weights, trainer.weights(), strict=True)):
            total = before[i] + 0.25 * sum(g[i] for g in gradients)
            residual = sum_of_residuals(trainer)[i]
            np.testing.assert_allclose(old - new, total - residual, atol=1e-3)


def sum_of_residuals(trainer):
    """Return the sum of all workers' residuals for each tensor."""
    residuals = trainer.local(trainer.optimizer.residual)
    return [sum(tensor) for tensor in zip(*residuals, strict=True)]


def test_machine_sends_as_much_as_one_worker(strategies):
    sgd = lambda: keras.optimizers.SGD(0.25)  # noqa: E731
    sent = []
    for groups in (GROUPS["2x2"], None):
        trainer = make_trainer(
            strategies,
            groups,
            sgd,
            False,
            diagnostics=tf_dgc.Diagnostics(check_every=None),
        )
        trainer.step(integer_gradients(np.random.default_rng(0), 4))
        stats = trainer.optimizer.stats
        sent.append((stats.entries_per_step - 9, stats.bytes_per_step))
    assert 2 * sent[0][0] == pytest.approx(sent[1][0], abs=2)
    assert sent[0][1] < 0.7 * sent[1][1]


@pytest.mark.slow
def test_schedule_that_starts_dense(strategies):
    """Dense steps equal those of a ring, because all sums are exact."""
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([2], [0.0, SPARSITY])
    sgd = lambda: keras.optimizers.SGD(0.25, momentum=0.5)  # noqa: E731
    trainers = [
        make_trainer(strategies, groups, sgd, sparsity=schedule)
        for groups in (GROUPS["2x2"], None)
    ]
    rng = np.random.default_rng(0)
    for step in range(3):
        gradients = integer_gradients(rng, 4)
        if step == 1:
            gradients[3][0][0, 0] = np.inf
        for trainer in trainers:
            trainer.step(gradients)
        if step < 2:
            for actual, expected in zip(*(t.weights() for t in trainers), strict=True):
                np.testing.assert_array_equal(actual, expected)
    assert [t.optimizer.stats.steps for t in trainers] == [3, 3]
    assert [t.optimizer.stats.nonfinite for t in trainers] == [1, 1]
    assert trainers[0].optimizer.stats.entries_per_step < 100


@pytest.mark.slow
def test_other_methods_run_on_two_levels(strategies):
    """Their sums and gathers have two levels, without an intra-node reduce."""
    rng = np.random.default_rng(0)
    weights = [np.zeros(s, "float32") for s in SHAPES]
    for method in ("float16", "two_bit"):
        trainers = [
            Trainer(
                strategies[4],
                lambda e=e, m=method: tf_dgc.CompressedOptimizer(
                    keras.optimizers.SGD(0.5), m, collective=e
                ),
                weights,
                traced=False,
            )
            for e in ("ring", Hierarchical(GROUPS["2x2"]))
        ]
        gradients = integer_gradients(rng, 4)
        for trainer in trainers:
            trainer.step(gradients)
        for actual, expected in zip(*(t.weights() for t in trainers), strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_node_workers(strategies):
    node_workers = []

    def replica():
        node_workers.append(Communicator(strategies[2], Hierarchical()).node_workers())
        node_workers.append(
            Communicator(strategies[2], Hierarchical([[0], [1]])).node_workers()
        )
        node_workers.append(Communicator(strategies[2]).node_workers())

    strategies[2].run(replica)
    assert node_workers == [(0, 1), (0,), (0,), (0, 1), (1,), (0,)]
    assert Communicator(strategies[1], Hierarchical()).node_workers() == (0,)


def test_corrected_adam_raises():
    for make_optimizer in (
        lambda **s: tf_dgc.DGCOptimizer("adam", collective="hierarchical", **s),
        lambda **s: tf_dgc.CompressedOptimizer("adam", collective="hierarchical", **s),
    ):
        with pytest.raises(ValueError, match="Use `SGD` with momentum as the inner"):
            make_optimizer()
        make_optimizer(corrections=tf_dgc.Corrections(adam=False))
