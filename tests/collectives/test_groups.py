"""Collectives of all workers, groups and pairs, in the simulation and in a strategy."""

import numpy as np
import pytest
import tensorflow as tf
from selection import rows

from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    DenseOrSparse,
    SendRecv,
)
from tf_dgc.multiworker import chunks, cross_device
from tf_dgc.testing import run_all


def run_simulated(strategies, num_workers, program):
    return run_all([program(worker, num_workers) for worker in range(num_workers)])


def run_traced(strategies, num_workers, program):
    return _run_distributed(strategies[num_workers], program, traced=True)


def run_eager(strategies, num_workers, program):
    return _run_distributed(strategies[num_workers], program, traced=False)


def _run_distributed(strategy, program, traced):
    def replica():
        num_workers = strategy.num_replicas_in_sync
        context = tf.distribute.get_replica_context()
        worker = int(tf.get_static_value(context.replica_id_in_sync_group))
        outcome, _ = Communicator(strategy).run(program(worker, num_workers))
        return outcome

    def step():
        return strategy.run(replica)

    if traced:  # without AutoGraph, whose code coverage cannot see
        step = tf.function(step, autograph=False)
    # A strategy unpacks tuples and lists, so each worker's result is packed again.
    per_replica = step()
    local_values = map(
        strategy.experimental_local_results, tf.nest.flatten(per_replica)
    )
    return [
        tf.nest.pack_sequence_as(per_replica, values)
        for values in zip(*local_values, strict=True)
    ]


@pytest.fixture(
    params=[run_simulated, run_traced, pytest.param(run_eager, marks=pytest.mark.slow)],
)
def run(request, strategies):
    def check(num_workers, program):
        return tf.nest.map_structure(
            lambda x: x.numpy(), request.param(strategies, num_workers, program)
        )

    return check


def make_values(worker, *shape, dtype=tf.int32):
    values = 100 * worker + np.arange(np.prod(shape)).reshape(shape)
    return tf.constant(values, dtype)


@pytest.mark.parametrize("num_workers", rows([1, 2, 3, 4], [1, 3]))
def test_collectives_of_all_workers(run, num_workers):
    def program(worker, n):
        values = make_values(worker, 2, 3)
        total, gathered = yield [AllReduce(values), AllGather(make_values(worker, 4))]
        source = n - 1
        exchanged, broadcast = yield [
            AllToAll(tf.stack([values + 1000 * i for i in range(n)])),
            Broadcast(values, source),
        ]
        return [total, gathered, exchanged, broadcast]

    inputs = [make_values(w, 2, 3).numpy() for w in range(num_workers)]
    for worker, results in enumerate(run(num_workers, program)):
        np.testing.assert_array_equal(results[0], sum(inputs))
        np.testing.assert_array_equal(
            results[1], [make_values(w, 4).numpy() for w in range(num_workers)]
        )
        np.testing.assert_array_equal(results[2], [a + 1000 * worker for a in inputs])
        np.testing.assert_array_equal(results[3], inputs[-1])


GROUPS = [
    [(0, 2), (1,), (0, 2)],
    [(0, 3), (1, 2), (1, 2), (0, 3)],
    [(0, 1, 3), (0, 1, 3), (2,), (0, 1, 3)],
]


@pytest.mark.parametrize("groups", rows(GROUPS, GROUPS[1:]), ids=str)
def test_collectives_of_groups(run, groups):
    def program(worker, n):
        group = groups[worker]
        values = make_values(worker, 5, dtype=tf.float32)
        total, gathered = yield [
            AllReduce(values, group),
            AllGather(make_values(worker, 2), group),
        ]
        dense, sparse = yield [
            DenseOrSparse(dense, values, make_values(worker, 3), group=group)
            for dense in (True, False)
        ]
        rows = tf.stack([make_values(worker, 2) + 1000 * i for i in group])
        exchanged, broadcast = yield [
            AllToAll(rows, group),
            Broadcast(values, group[-1], group),
        ]
        # The same collective of the same group again.
        (again,) = yield [AllReduce(total, group)]
        return [
            total,
            gathered,
            dense.total,
            sparse.buffers,
            exchanged,
            broadcast,
            again,
        ]

    for worker, results in enumerate(run(len(groups), program)):
        group = groups[worker]
        vectors = [make_values(w, 5).numpy() for w in group]
        pairs = np.array([make_values(w, 2).numpy() for w in group])
        np.testing.assert_array_equal(results[0], sum(vectors))
        np.testing.assert_array_equal(results[1], pairs)
        np.testing.assert_array_equal(results[2], sum(vectors))
        np.testing.assert_array_equal(
            results[3], [make_values(w, 3).numpy() for w in group]
        )
        np.testing.assert_array_equal(results[4], pairs + 1000 * worker)
        np.testing.assert_array_equal(results[5], vectors[-1])
        np.testing.assert_array_equal(results[6], len(group) * sum(vectors))


@pytest.mark.parametrize("dtype", rows(["float16", "float64", "int64"], ["float16"]))
def test_send_recv_of_other_dtypes(run, dtype):
    """With another partner, and twice with the same one."""

    def program(worker, n):
        values = make_values(worker, 3, 2, dtype=dtype)
        (values,) = yield [SendRecv(values, worker ^ 1)]
        (values,) = yield [SendRecv(values + 1, worker ^ 1)]
        (values,) = yield [SendRecv(values, worker ^ 2)]
        return values

    for worker, result in enumerate(run(4, program)):
        expected = make_values(worker ^ 2, 3, 2, dtype=dtype) + 1
        np.testing.assert_array_equal(result, expected)
        assert result.dtype == dtype


def test_repeated_broadcasts(run):
    """In both directions at once, repeatedly, with the same keys."""

    def program(worker, n):
        pair = (worker & ~1, worker | 1)
        results = []
        sent = make_values(worker, 1000)
        for _ in range(5):
            received = yield [Broadcast(sent, source, pair) for source in pair]
            results += received
            sent = received[0] + received[1]  # does not wait for its own broadcast
            sent += worker
        return tf.stack(results)

    for worker, results in enumerate(run(4, program)):
        pair = (worker & ~1, worker | 1)
        values = {w: make_values(w, 1000).numpy() for w in pair}
        for i in range(5):
            for j, source in enumerate(pair):
                np.testing.assert_array_equal(results[2 * i + j], values[source])
            total = sum(values.values())
            values = {w: total + w for w in pair}


def test_large_tensors_are_sent_in_chunks(run, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 16)
    for function in (
        chunks.chunked_all_reduce,
        chunks.chunked_all_gather,
        chunks.chunked_all_to_all,
    ):
        monkeypatch.setitem(function.__kwdefaults__, "size", 16)

    def program(worker, n):
        values, partner = make_values(worker, 13), worker ^ 1
        group = (worker & ~1, worker | 1)
        (received,) = yield [SendRecv(values, partner)]
        (exchanged,) = yield [AllToAll(tf.stack([values, -values]), group)]
        (broadcast,) = yield [Broadcast(values, group[1], group)]
        return [received, exchanged, broadcast]

    for worker, results in enumerate(run(4, program)):
        low, high = worker & ~1, worker | 1
        np.testing.assert_array_equal(results[0], make_values(worker ^ 1, 13))
        sign = 1 if worker == low else -1
        expected = [sign * make_values(w, 13).numpy() for w in (low, high)]
        np.testing.assert_array_equal(results[1], expected)
        np.testing.assert_array_equal(results[2], make_values(high, 13))


def test_empty_tensors(run):
    def program(worker, n):
        empty = tf.zeros([0], tf.int32)
        results = yield [
            AllReduce(empty),
            AllGather(empty),
            SendRecv(empty, worker ^ 1),
            AllToAll(tf.zeros([2, 0], tf.int32)),
            Broadcast(empty, 1),
        ]
        return list(results)

    for results in run(2, program):
        assert [x.shape for x in results] == [(0,), (2, 0), (0,), (2, 0), (0,)]


def test_lengths_known_only_at_run_time(strategies):
    """A schedule of the sparsity needs such lengths."""
    strategy = strategies[2]

    @tf.function(autograph=False)
    def step(length):
        def replica():
            context = tf.distribute.get_replica_context()
            worker = int(tf.get_static_value(context.replica_id_in_sync_group))
            values = tf.range(length) + 100 * worker

            def program():
                (received,) = yield [SendRecv(values, 1 - worker)]
                (broadcast,) = yield [Broadcast(values, 1)]
                return received, broadcast

            return Communicator(strategy).run(program())[0]

        return strategy.run(replica)

    for length in (3, 5):
        received, broadcast = step(tf.constant(length))
        for worker in range(2):
            expected = np.arange(length) + 100 * (1 - worker)
            local = strategy.experimental_local_results
            np.testing.assert_array_equal(local(received)[worker], expected)
            np.testing.assert_array_equal(
                local(broadcast)[worker], np.arange(length) + 100
            )


def test_keys_and_counts(strategies):
    """Steps need no new keys, and workers count by group."""
    strategy = strategies[3]
    hook = cross_device.cross_device_ops(strategy)

    @tf.function(autograph=False)
    def step():
        def replica():
            context = tf.distribute.get_replica_context()
            worker = int(tf.get_static_value(context.replica_id_in_sync_group))
            group = (0, 2) if worker != 1 else (1,)
            values = make_values(worker, 17)
            return Communicator(strategy).answer(AllReduce(values, group))

        return strategy.run(replica)

    step()
    keys = hook.num_keys
    for _ in range(3):
        step()
    assert hook.num_keys == keys
    # All workers are replicas in one process, which waits for no other process.
    assert list(hook.count()) == [None]


@pytest.mark.parametrize(
    ("collective", "error"),
    [
        (AllReduce(tf.ones([1]), (0, 7)), "must name workers in ascending order"),
        (AllReduce(tf.ones([1]), (1, 2)), "must name workers in ascending order"),
        (AllGather(tf.ones([1], tf.int32), (1, 0)), "must name workers in ascending"),
        (SendRecv(tf.ones([1]), 0), "by both workers of a pair"),
        (SendRecv(tf.ones([1]), 3), "by both workers of a pair"),
        (AllToAll(tf.ones([3, 2])), "a row for each of 2 workers"),
        (Broadcast(tf.ones([1]), 2), "must come from a worker of the group"),
    ],
)
def test_invalid_requests_raise(strategies, collective, error):
    strategy = strategies[2]

    def replica():
        context = tf.distribute.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            Communicator(strategy).answer(collective)

    with pytest.raises(ValueError, match=error):
        strategy.run(replica)
