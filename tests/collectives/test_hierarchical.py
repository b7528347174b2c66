"""Two levels: the same bits everywhere, nothing lost, few bytes between machines."""

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


def simulate(groups, kind, mine, record=None):
    exchange = Hierarchical(groups)
    steps = [
        getattr(exchange, kind)(tf.constant(value), Rank(worker, len(mine)))
        for worker, value in enumerate(mine)
    ]
    return [outcome.numpy() for outcome in run_all(steps, record)]


@pytest.mark.parametrize(("name", "size"), in_turn(GROUPS, [13, 0, 1]))
def test_all_have_the_same(name, size):
    number = sum(map(len, GROUPS[name]))
    generator = np.random.default_rng(number)
    for dtype in ("float32", "float16", "float64", "int32"):
        vectors = generator.integers(-9, 9, size=(number, size)).astype(dtype)
        for total in simulate(GROUPS[name], "sum", vectors):
            assert total.dtype == dtype
            np.testing.assert_array_equal(total, vectors.sum(axis=0))
    words = generator.integers(-9, 9, size=(number, size)).astype("int32")
    for everyone in simulate(GROUPS[name], "gather", words):
        np.testing.assert_array_equal(everyone, words)


def traffic(record, groups, worker=0):
    """Return the bytes that a worker sends: all, and those that leave its machine."""
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
@pytest.mark.parametrize("kind", ["sum", "gather"])
def test_costs_what_it_says(name, kind):
    groups = GROUPS[name]
    number, inside = sum(map(len, groups)), len(groups[0])
    record = [[] for _ in range(number)]
    simulate(groups, kind, np.ones([number, 840], "int32"), record)
    cost = getattr(Hierarchical(groups), f"cost_of_{kind}")(3360, number)
    total, outside = traffic(record, groups)
    assert total == cost.sent
    machines = number // inside
    share = 2 / machines / inside if kind == "sum" else 1
    assert outside == (machines - 1) * share * 3360


def test_where_machines_are_not_known_each_worker_is_one():
    vectors = np.arange(6, dtype="float32").reshape(3, 2)
    for total in simulate(None, "sum", vectors):
        np.testing.assert_array_equal(total, vectors.sum(axis=0))


@pytest.mark.parametrize(
    "groups",
    [[], [[]], [[0, 1], [1, 2]], [[1, 2]], [[0, 1], [3, 4]], "all", [0, 1], 3, [["a"]]],
)
def test_groups_that_are_no_partition(groups):
    with pytest.raises(ValueError, match=r"every worker from 0 on.*Received"):
        Hierarchical(groups)


def test_groups_of_unequal_sizes(strategies):
    with pytest.raises(ValueError, match=r"of one size.*Received"):
        Hierarchical([[0, 1], [2]])
    with pytest.raises(ValueError, match=r"as many workers on each.*'b': 1"):
        Hierarchical().resolve(["a", "b", "a"])


def test_groups_of_other_workers(strategies):
    """Refused when the optimizer is made; one worker alone exchanges nothing."""
    exchange = Hierarchical([[0, 1], [2, 3]])

    def make():
        return tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1), collective=exchange)

    assert make().collective is exchange
    with strategies[2].scope(), pytest.raises(ValueError, match="but there are 2"):
        make()


def test_hosts_say_who_is_inside(strategies):
    hosts = ["a", "b", "a", "b"]
    assert Hierarchical().resolve(hosts).groups == [[0, 2], [1, 3]]
    assert Hierarchical([[0, 1]]).resolve(["a", "b"]).groups == [[0, 1]]
    assert workers.hosts(strategies[3]) == [""] * 3
    assert workers.hosts(strategies[1]) == [""]


class OfTasks:
    """A strategy as far as hosts are concerned: two replicas in each process."""

    num_replicas_in_sync = 6

    class cluster_resolver:
        @staticmethod
        def cluster_spec():
            jobs = {"worker": ["[::1]:3", "b:1"], "chief": ["b:2"], "ps": ["c:1"]}
            return tf.train.ClusterSpec(jobs)


def test_hosts_of_a_cluster():
    assert workers.hosts(OfTasks) == ["b", "b", "[::1]", "[::1]", "b", "b"]


@pytest.mark.parametrize("length", [5, 9])
@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_flag_is_added(length, finite, again):
    body = [tf.range(length - buffer.HEADER_WORDS)]
    words = buffer.add_header(7, length, body, tf.constant(True))
    words = buffer.add_nonfinite_flag(words, tf.constant(finite))
    if again:
        words = buffer.add_nonfinite_flag(words, tf.constant(False))
    expected = buffer.add_header(7, length, body, tf.constant(finite and not again))
    np.testing.assert_array_equal(words, expected)


def make_trainer(strategies, groups, sgd, traced=True, **settings):
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=s).astype("float32") for s in SHAPES]
    number = sum(map(len, groups)) if groups else 4
    exchange = Hierarchical(groups) if groups else "ring"
    settings = {"sparsity": SPARSITY, "collective": exchange, **settings}
    return Trainer(
        strategies[number],
        lambda: tf_dgc.DGCOptimizer(sgd(), **settings),
        weights,
        traced=traced,
    )


def whole_numbers(rng, number):
    """Return gradients that add up exactly, `[worker][tensor]`."""
    return [
        [rng.integers(-64, 64, size=s).astype("float32") for s in SHAPES]
        for _ in range(number)
    ]


class Reference:
    """What the class says in plain NumPy: machines are workers, each in shards."""

    def __init__(self, groups, momentum):
        self.groups, self.momentum = groups, momentum
        inside = len(groups[0])
        self.residual = [
            [[np.zeros(-(-np.prod(s) // inside) * inside) for s in SHAPES] for _ in g]
            for g in groups
        ]
        self.velocity = [[[r.copy() for r in w] for w in m] for m in self.residual]

    def step(self, gradients):
        """Return the sum that all workers apply."""
        totals = [np.zeros(int(np.prod(s))) for s in SHAPES]
        for at, group in enumerate(self.groups):
            for i, shape in enumerate(SHAPES):
                size = int(np.prod(shape))
                if len(shape) == 1:  # exempt
                    totals[i] += sum(gradients[w][i] for w in group)
                    continue
                added = sum(gradients[w][i].ravel() for w in group)
                totals[i] += self._machine(at, i, added)[:size]
        return totals

    def _machine(self, at, i, added):
        width = len(self.residual[at][0][i]) // len(self.groups[at])
        k = num_sent(width, SPARSITY)
        sent = np.zeros_like(self.residual[at][0][i])
        padded = np.concatenate([added, np.zeros(len(sent) - len(added))])
        for rank in range(len(self.groups[at])):
            own = slice(rank * width, (rank + 1) * width)
            velocity = self.velocity[at][rank][i]
            residual = self.residual[at][rank][i]
            velocity[own] = self.momentum * velocity[own] + padded[own]
            residual[own] += velocity[own]
            chosen = own.start + np.argsort(-np.abs(residual[own]), kind="stable")[:k]
            sent[chosen] += residual[chosen]
            residual[chosen] = velocity[chosen] = 0
        return sent


@pytest.mark.parametrize(
    ("name", "mode"),
    in_turn(["2x2 across", "2x2", "1x4", "4x1"], ["eager", "traced"], ["2x2 across"]),
)
def test_is_the_algorithm(strategies, name, mode):
    """With gradients without ties, as which of those is taken is drawn."""
    groups = GROUPS[name]
    sgd = lambda: keras.optimizers.SGD(0.25, momentum=0.5)  # noqa: E731
    trainer = make_trainer(
        *(strategies, groups, sgd),
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
        for ours, theirs in zip(trainer.weights(), weights, strict=True):
            np.testing.assert_allclose(ours.ravel(), theirs, atol=1e-5)
    for copies in trainer.replica_weights():
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
    residuals = trainer.local(trainer.optimizer.residual)
    for at, group in enumerate(groups):
        for rank, worker in enumerate(group):
            for i in (0, 2):
                ours = residuals[worker][i].ravel()
                theirs = 0.25 * reference.residual[at][rank][i]
                np.testing.assert_allclose(ours, theirs[: len(ours)], atol=1e-5)


@pytest.mark.parametrize(
    "uncompressed_dtype", rows([None, "bfloat16"], [None]), ids=str
)
def test_nothing_is_lost(strategies, uncompressed_dtype):
    """What was sent and what is kept add up; one worker's NaN costs its own part."""
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
        gradients = whole_numbers(rng, 4)
        finite = gradients
        if step == 1:
            gradients[2][1][4] = np.nan
            finite = gradients[:2] + gradients[3:]
        trainer.step(gradients)
        total = [t + sum(g[i] for g in finite) for i, t in enumerate(total)]
    assert trainer.optimizer.stats.nonfinite == 1
    residuals = trainer.local(trainer.optimizer.residual)
    for i, (old, new) in enumerate(zip(before, trainer.weights(), strict=True)):
        kept = sum(worker[i] for worker in residuals)
        np.testing.assert_allclose(old - new, 0.25 * total[i] - kept, atol=2e-4)
    rank = residuals[1][0].ravel()
    assert not rank[:1000].any()
    assert rank[1000:].any()


def test_of_several_types_and_rows(strategies):
    """Also of an embedding, whose gradient has some rows, and with no exempt tensor."""
    kinds = {(30, 40): "float32", (20, 30): "float64", (25, 40): "float16"}
    weights = [np.zeros(shape, dtype) for shape, dtype in kinds.items()]
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
        [rng.integers(-8, 8, size=s).astype(d) for s, d in kinds.items()]
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
    for i, moved in enumerate(trainer.weights()):
        assert np.any(moved)
        kept = sum(worker[i] for worker in residuals)
        np.testing.assert_array_equal(kept - moved, total[i])


@pytest.mark.slow
def test_other_workers_go_on(strategies):
    """From 2 x 2 to three alone, and back to 1 x 2: what waits is shared out."""
    sgd = lambda: keras.optimizers.SGD(0.25)  # noqa: E731
    trainer = make_trainer(strategies, GROUPS["2x2"], sgd, False)
    rng = np.random.default_rng(0)
    trainer.step(whole_numbers(rng, 4))
    for groups in ([[0], [1], [2]], [[0, 1]]):
        before = total_of(trainer)
        saved = trainer.save()
        trainer = make_trainer(strategies, groups, sgd, False)
        trainer.load(saved)
        for ours, theirs in zip(total_of(trainer), before, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)
        weights = trainer.weights()
        gradients = whole_numbers(rng, len(groups) * len(groups[0]))
        trainer.step(gradients)
        for i, (old, new) in enumerate(zip(weights, trainer.weights(), strict=True)):
            given = before[i] + 0.25 * sum(g[i] for g in gradients)
            kept = total_of(trainer)[i]
            np.testing.assert_allclose(old - new, given - kept, atol=1e-3)


def total_of(trainer):
    """Return what all workers together have not sent, of each tensor."""
    residuals = trainer.local(trainer.optimizer.residual)
    return [sum(of_tensor) for of_tensor in zip(*residuals, strict=True)]


def test_a_machine_sends_as_much_as_a_worker(strategies):
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
        trainer.step(whole_numbers(np.random.default_rng(0), 4))
        stats = trainer.optimizer.stats
        sent.append((stats.entries_per_step - 9, stats.bytes_per_step))
    assert 2 * sent[0][0] == pytest.approx(sent[1][0], abs=2)
    assert sent[0][1] < 0.7 * sent[1][1]


@pytest.mark.slow
def test_on_a_schedule_from_a_dense_step(strategies):
    """Dense steps are those of a ring, as all of these numbers add up exactly."""
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([2], [0.0, SPARSITY])
    sgd = lambda: keras.optimizers.SGD(0.25, momentum=0.5)  # noqa: E731
    pair = [
        make_trainer(strategies, groups, sgd, sparsity=schedule)
        for groups in (GROUPS["2x2"], None)
    ]
    rng = np.random.default_rng(0)
    for step in range(3):
        gradients = whole_numbers(rng, 4)
        if step == 1:
            gradients[3][0][0, 0] = np.inf
        for trainer in pair:
            trainer.step(gradients)
        if step < 2:
            for ours, theirs in zip(*(t.weights() for t in pair), strict=True):
                np.testing.assert_array_equal(ours, theirs)
    assert [t.optimizer.stats.steps for t in pair] == [3, 3]
    assert [t.optimizer.stats.nonfinite for t in pair] == [1, 1]
    assert pair[0].optimizer.stats.entries_per_step < 100


@pytest.mark.slow
def test_other_methods_take_two_levels(strategies):
    """Of sums and gathers; nothing is added up before."""
    rng = np.random.default_rng(0)
    weights = [np.zeros(s, "float32") for s in SHAPES]
    for method in ("float16", "two_bit"):
        pair = [
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
        gradients = whole_numbers(rng, 4)
        for trainer in pair:
            trainer.step(gradients)
        for ours, theirs in zip(*(t.weights() for t in pair), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_the_machine_of_a_worker(strategies):
    found = []

    def replica():
        found.append(Communicator(strategies[2], Hierarchical()).node_workers())
        found.append(
            Communicator(strategies[2], Hierarchical([[0], [1]])).node_workers()
        )
        found.append(Communicator(strategies[2]).node_workers())

    strategies[2].run(replica)
    assert found == [(0, 1), (0,), (0,), (0, 1), (1,), (0,)]
    assert Communicator(strategies[1], Hierarchical()).node_workers() == (0,)


def test_adam_is_not_corrected():
    for make in (
        lambda **s: tf_dgc.DGCOptimizer("adam", collective="hierarchical", **s),
        lambda **s: tf_dgc.CompressedOptimizer("adam", collective="hierarchical", **s),
    ):
        with pytest.raises(ValueError, match="Use `SGD` with momentum, or another"):
            make()
        make(corrections=tf_dgc.Corrections(adam=False))
