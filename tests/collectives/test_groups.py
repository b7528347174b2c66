"""What all communicators can do: sums, gathers, swaps, spreads and broadcasts.

Of all workers, of groups and of pairs; in the simulation and under a strategy alike.
"""

import functools

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


def simulated(strategies, number, program):
    return run_all([program(worker, number) for worker in range(number)])


def traced(strategies, number, program):
    # What AutoGraph makes of the package would run, of which coverage knows nothing.
    as_it_is = functools.partial(tf.function, autograph=False)
    return _distributed(strategies[number], program, as_it_is)


def eager(strategies, number, program):
    return _distributed(strategies[number], program, lambda step: step)


def _distributed(strategy, program, wrap):
    def replica():
        number = strategy.num_replicas_in_sync
        context = tf.distribute.get_replica_context()
        worker = int(tf.get_static_value(context.replica_id_in_sync_group))
        outcome, _ = Communicator(strategy).run(program(worker, number))
        return outcome

    # A list of each, as a strategy takes tuples and lists apart.
    found = wrap(lambda: strategy.run(replica))()
    return [
        tf.nest.pack_sequence_as(found, of_worker)
        for of_worker in zip(
            *map(strategy.experimental_local_results, tf.nest.flatten(found)),
            strict=True,
        )
    ]


@pytest.fixture(
    params=[simulated, traced, pytest.param(eager, marks=pytest.mark.slow)],
)
def run(request, strategies):
    def check(number, program):
        return tf.nest.map_structure(
            lambda x: x.numpy(), request.param(strategies, number, program)
        )

    return check


def numbers(worker, *shape, dtype=tf.int32):
    found = 100 * worker + np.arange(np.prod(shape)).reshape(shape)
    return tf.constant(found, dtype)


@pytest.mark.parametrize("number", rows([1, 2, 3, 4], [1, 3]))
def test_of_all(run, number):
    def program(worker, n):
        mine = numbers(worker, 2, 3)
        total, gathered = yield [AllReduce(mine), AllGather(numbers(worker, 4))]
        source = n - 1
        spread, told = yield [
            AllToAll(tf.stack([mine + 1000 * i for i in range(n)])),
            Broadcast(mine, source),
        ]
        return [total, gathered, spread, told]

    alone = [numbers(w, 2, 3).numpy() for w in range(number)]
    for worker, found in enumerate(run(number, program)):
        np.testing.assert_array_equal(found[0], sum(alone))
        np.testing.assert_array_equal(
            found[1], [numbers(w, 4).numpy() for w in range(number)]
        )
        np.testing.assert_array_equal(found[2], [a + 1000 * worker for a in alone])
        np.testing.assert_array_equal(found[3], alone[-1])


GROUPS = [
    [(0, 2), (1,), (0, 2)],
    [(0, 3), (1, 2), (1, 2), (0, 3)],
    [(0, 1, 3), (0, 1, 3), (2,), (0, 1, 3)],
]


@pytest.mark.parametrize("groups", rows(GROUPS, GROUPS[1:]), ids=str)
def test_of_groups(run, groups):
    def program(worker, n):
        group = groups[worker]
        mine = numbers(worker, 5, dtype=tf.float32)
        total, gathered = yield [
            AllReduce(mine, group),
            AllGather(numbers(worker, 2), group),
        ]
        dense, sparse = yield [
            DenseOrSparse(dense, mine, numbers(worker, 3), group=group)
            for dense in (True, False)
        ]
        rows = tf.stack([numbers(worker, 2) + 1000 * i for i in group])
        spread, told = yield [AllToAll(rows, group), Broadcast(mine, group[-1], group)]
        # What a group does once more, with the same shapes.
        (again,) = yield [AllReduce(total, group)]
        return [total, gathered, dense.total, sparse.buffers, spread, told, again]

    for worker, found in enumerate(run(len(groups), program)):
        group = groups[worker]
        vectors = [numbers(w, 5).numpy() for w in group]
        pairs = np.array([numbers(w, 2).numpy() for w in group])
        np.testing.assert_array_equal(found[0], sum(vectors))
        np.testing.assert_array_equal(found[1], pairs)
        np.testing.assert_array_equal(found[2], sum(vectors))
        np.testing.assert_array_equal(found[3], [numbers(w, 3).numpy() for w in group])
        np.testing.assert_array_equal(found[4], pairs + 1000 * worker)
        np.testing.assert_array_equal(found[5], vectors[-1])
        np.testing.assert_array_equal(found[6], len(group) * sum(vectors))


@pytest.mark.parametrize("dtype", rows(["float16", "float64", "int64"], ["float16"]))
def test_swaps_of_other_types(run, dtype):
    """Each round with another partner, and twice with one."""

    def program(worker, n):
        mine = numbers(worker, 3, 2, dtype=dtype)
        (first,) = yield [SendRecv(mine, worker ^ 1)]
        (then,) = yield [SendRecv(first + 1, worker ^ 1)]
        (last,) = yield [SendRecv(then, worker ^ 2)]
        return last

    for worker, found in enumerate(run(4, program)):
        expected = numbers(worker ^ 2, 3, 2, dtype=dtype) + 1
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == dtype


def test_broadcasts_one_after_the_other(run):
    """Both directions at once, again and again, under the same keys."""

    def program(worker, n):
        pair = (worker & ~1, worker | 1)
        found = []
        mine = numbers(worker, 1000)
        for _ in range(5):
            told = yield [Broadcast(mine, source, pair) for source in pair]
            found += told
            mine = told[0] + told[1]  # which does not wait for what this one sent
            mine += worker
        return tf.stack(found)

    for worker, found in enumerate(run(4, program)):
        pair = (worker & ~1, worker | 1)
        values = {w: numbers(w, 1000).numpy() for w in pair}
        for i in range(5):
            for j, source in enumerate(pair):
                np.testing.assert_array_equal(found[2 * i + j], values[source])
            total = sum(values.values())
            values = {w: total + w for w in pair}


def test_what_is_large_goes_in_pieces(run, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 16)
    for function in (
        chunks.chunked_all_reduce,
        chunks.chunked_all_gather,
        chunks.chunked_all_to_all,
    ):
        monkeypatch.setitem(function.__kwdefaults__, "size", 16)

    def program(worker, n):
        mine, partner = numbers(worker, 13), worker ^ 1
        group = (worker & ~1, worker | 1)
        (swapped,) = yield [SendRecv(mine, partner)]
        (spread,) = yield [AllToAll(tf.stack([mine, -mine]), group)]
        (told,) = yield [Broadcast(mine, group[1], group)]
        return [swapped, spread, told]

    for worker, found in enumerate(run(4, program)):
        low, high = worker & ~1, worker | 1
        np.testing.assert_array_equal(found[0], numbers(worker ^ 1, 13))
        sign = 1 if worker == low else -1
        both = [sign * numbers(w, 13).numpy() for w in (low, high)]
        np.testing.assert_array_equal(found[1], both)
        np.testing.assert_array_equal(found[2], numbers(high, 13))


def test_nothing(run):
    def program(worker, n):
        none = tf.zeros([0], tf.int32)
        found = yield [
            AllReduce(none),
            AllGather(none),
            SendRecv(none, worker ^ 1),
            AllToAll(tf.zeros([2, 0], tf.int32)),
            Broadcast(none, 1),
        ]
        return list(found)

    for found in run(2, program):
        assert [x.shape for x in found] == [(0,), (2, 0), (0,), (2, 0), (0,)]


def test_lengths_that_are_known_when_it_runs(strategies):
    """As where the sparsity is scheduled."""
    strategy = strategies[2]

    @tf.function(autograph=False)
    def step(length):
        def replica():
            context = tf.distribute.get_replica_context()
            worker = int(tf.get_static_value(context.replica_id_in_sync_group))
            mine = tf.range(length) + 100 * worker

            def program():
                (swapped,) = yield [SendRecv(mine, 1 - worker)]
                (told,) = yield [Broadcast(mine, 1)]
                return swapped, told

            return Communicator(strategy).run(program())[0]

        return strategy.run(replica)

    for length in (3, 5):
        swapped, told = step(tf.constant(length))
        for worker in range(2):
            others = np.arange(length) + 100 * (1 - worker)
            local = strategy.experimental_local_results
            np.testing.assert_array_equal(local(swapped)[worker], others)
            np.testing.assert_array_equal(local(told)[worker], np.arange(length) + 100)


def test_keys_and_counts(strategies):
    """As many keys as kinds, however many steps; workers count by their groups."""
    strategy = strategies[3]
    hook = cross_device.cross_device_ops(strategy)

    @tf.function(autograph=False)
    def step():
        def replica():
            context = tf.distribute.get_replica_context()
            worker = int(tf.get_static_value(context.replica_id_in_sync_group))
            group = (0, 2) if worker != 1 else (1,)
            mine = numbers(worker, 17)
            return Communicator(strategy).answer(AllReduce(mine, group))

        return strategy.run(replica)

    step()
    keys = hook.num_keys
    for _ in range(3):
        step()
    assert hook.num_keys == keys
    # All of them are replicas of one process, which wait for no other.
    assert list(hook.count()) == [None]


@pytest.mark.parametrize(
    ("message", "said"),
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
def test_what_cannot_be(strategies, message, said):
    strategy = strategies[2]

    def replica():
        context = tf.distribute.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            Communicator(strategy).answer(message)

    with pytest.raises(ValueError, match=said):
        strategy.run(replica)
