"""Collective algorithms: equal results on all workers, at the stated cost."""

import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer
from selection import in_turn, rows

import tf_dgc
from tf_dgc import collectives
from tf_dgc.collectives.algorithm import Rank
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.requests import AllReduce, Broadcast, DenseOrSparse, SendRecv
from tf_dgc.testing import run_all

ROOT = pathlib.Path(__file__).parents[2]
ALL = [
    collectives.Ring(),
    collectives.Tree(),
    collectives.Butterfly(),
    collectives.Star(),
    collectives.Star(shards=2),
    collectives.Star(shards=8),
]
COUNTED = ALL[1:]  # the ring is TensorFlow's own collective
NUMS_WORKERS = range(1, 9)


def simulate(algorithm, operation, values, record=None):
    rounds = [
        getattr(algorithm, operation)(tf.constant(value), Rank(worker, len(values)))
        for worker, value in enumerate(values)
    ]
    return [outcome.numpy() for outcome in run_all(rounds, record)]


@pytest.mark.parametrize("num_workers", NUMS_WORKERS)
@pytest.mark.parametrize("algorithm", ALL, ids=str)
@pytest.mark.parametrize("size", rows([0, 1, 13], [13]))
def test_all_workers_get_the_same_result(algorithm, num_workers, size):
    rng = np.random.default_rng(num_workers)
    vectors = rng.normal(size=(num_workers, size)).astype("float32")
    sums = simulate(algorithm, "sum", vectors)
    assert len({total.tobytes() for total in sums}) == 1
    np.testing.assert_allclose(sums[0], vectors.sum(axis=0), atol=1e-5)
    words = rng.integers(-9, 9, size=(num_workers, size)).astype("int32")
    np.testing.assert_array_equal(simulate(algorithm, "sum", words)[0], sum(words))
    for gathered in simulate(algorithm, "gather", words):
        np.testing.assert_array_equal(gathered, words)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALL, ids=str)
def test_sums_of_every_dtype(strategies, algorithm):
    """TensorFlow's own collectives do not support all of them."""
    dtypes = [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32]

    @tf.function(autograph=False)
    def step():
        def replica():
            communicator = Communicator(strategies[4], algorithm)
            worker = tf.distribute.get_replica_context().replica_id_in_sync_group
            tensors = [tf.cast(tf.range(9) + worker, dtype) for dtype in dtypes]
            sums = [communicator.answer(AllReduce(values)) for values in tensors]
            return [tf.cast(values, tf.float64) for values in sums]

        return strategies[4].run(replica)

    total = sum(np.arange(9) + worker for worker in range(4))
    for sums in step():
        for local_sum in strategies[4].experimental_local_results(sums):
            np.testing.assert_array_equal(local_sum, total)


def test_subclass_of_ring_is_not_taken_for_a_ring(strategies):
    workers = []

    class Counting(collectives.Ring):
        def sum(self, values, rank):
            workers.append(rank.worker)
            return (yield from super().sum(values, rank))

    @tf.function(autograph=False)
    def step():
        def replica():
            communicator = Communicator(strategies[2], Counting())
            return communicator.answer(AllReduce(tf.ones([3])))

        return strategies[2].run(replica)

    for total in strategies[2].experimental_local_results(step()):
        np.testing.assert_array_equal(total, [2, 2, 2])
    assert workers == [0, 1]


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_example_in_the_docs(num_workers):
    text = (ROOT / "docs/research/collectives.md").read_text()
    section = text.split("## Writing an algorithm")[1]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    names = {"tf_dgc": tf_dgc}
    exec(code, names)
    vectors = np.arange(3 * num_workers, dtype="float32").reshape(num_workers, 3)
    for total in simulate(names["Line"](), "sum", vectors):
        np.testing.assert_array_equal(total, sum(vectors))


def traffic(record):
    """Return the bytes that each worker sends and receives."""
    sent, received = np.zeros((2, len(record)), int)
    for worker, messages in enumerate(record):
        for message in messages:
            size = message.values.dtype.size * int(tf.size(message.values))
            if isinstance(message, SendRecv):
                sent[worker] += size
                received[worker] += size
            else:
                assert isinstance(message, Broadcast)
                assert len(message.group) == 2
                target = sent if message.source == worker else received
                target[worker] += size
    return sent, received


def longest_path(record):
    """Return the bytes on the longest chain of messages that wait for each other.

    A message between two workers begins when both are ready, and takes as long as
    it has bytes.
    """
    waiting = [list(messages) for messages in record]
    finished = [0] * len(record)

    def partner(worker):
        if not waiting[worker]:
            return None
        message = waiting[worker][0]
        group = getattr(message, "group", None)
        return sum(group) - worker if group else message.partner

    while any(waiting):
        worker, other = next(
            (w, p)
            for w in range(len(record))
            if (p := partner(w)) is not None and partner(p) == w
        )
        message = waiting[worker].pop(0)
        waiting[other].pop(0)
        size = message.values.dtype.size * int(tf.size(message.values))
        finished[worker] = finished[other] = (
            max(finished[worker], finished[other]) + size
        )
    return max(finished)


@pytest.mark.parametrize("num_workers", NUMS_WORKERS)
@pytest.mark.parametrize("algorithm", COUNTED, ids=str)
@pytest.mark.parametrize("operation", ["sum", "gather"])
def test_bytes_equal_the_stated_cost(algorithm, num_workers, operation):
    size = 8 * 3 * 5 * 7  # divisible by all numbers of workers and servers
    values = np.ones([num_workers, size], "int32")
    record = [[] for _ in values]
    simulate(algorithm, operation, values, record)
    sent, received = traffic(record)
    cost = getattr(algorithm, f"cost_of_{operation}")(4 * size, num_workers)
    assert sent.max() == cost.sent
    assert received.max() == cost.received
    assert sent.sum() == received.sum()
    # Approximate for trees whose parts differ in size.
    assert cost.path == pytest.approx(longest_path(record), rel=0.05)


@pytest.mark.parametrize("algorithm", COUNTED, ids=str)
def test_rounds_equal_the_stated_cost(algorithm):
    """Counts the rounds of the first worker, which has most of them."""
    for num_workers in NUMS_WORKERS:
        rank = Rank(0, num_workers)
        for operation, shape in [("sum", [840]), ("gather", [840])]:
            values = tf.ones(shape, tf.int32)
            generator = getattr(algorithm, operation)(values, rank)
            rounds = 0
            try:
                requests = next(generator)
                while True:
                    rounds += bool(requests)
                    requests = generator.send([m.values for m in requests])
            except StopIteration:
                pass
            cost = getattr(algorithm, f"cost_of_{operation}")(1, num_workers)
            assert rounds == cost.rounds


@pytest.mark.parametrize(
    ("algorithm", "num_workers"),
    in_turn(COUNTED, [3, 2, 4]),
)
@pytest.mark.parametrize("mode", rows(["traced", "eager"], ["traced"]))
def test_under_a_strategy(strategies, algorithm, num_workers, mode):
    """A condition at run time chooses between sum and gather."""
    strategy = strategies[num_workers]
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(num_workers, 37)).astype("float32")
    words = rng.integers(-9, 9, size=(num_workers, 5)).astype("int32")
    local = strategy.experimental_local_results

    def step(dense):
        def replica():
            communicator = Communicator(strategy, algorithm)
            context = tf.distribute.get_replica_context()
            worker = context.replica_id_in_sync_group
            request = DenseOrSparse(
                dense, tf.gather(vectors, worker), tf.gather(words, worker)
            )
            return tuple(communicator.answer(request))[:2]

        return strategy.run(replica)

    if mode == "traced":
        step = tf.function(step, autograph=False)
    totals, _ = map(local, step(tf.constant(True)))
    assert len({total.numpy().tobytes() for total in totals}) == 1
    np.testing.assert_allclose(totals[0], vectors.sum(axis=0), atol=1e-5)
    _, buffers = map(local, step(tf.constant(False)))
    for gathered in buffers:
        np.testing.assert_array_equal(gathered, words)


SETTINGS = {
    "fused top-k with a schedule": lambda algorithm: tf_dgc.DGCOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.5),
        tf_dgc.schedules.PiecewiseConstantSparsity([1], [0.0, 0.97]),
        collective=algorithm,
        diagnostics=tf_dgc.Diagnostics(check_every=1),
    ),
    "TensorFlow operations with two rounds": lambda algorithm: (
        tf_dgc.CompressedOptimizer(
            keras.optimizers.SGD(0.5), "scale_com", collective=algorithm
        )
    ),
    "native engine": lambda algorithm: tf_dgc.CompressedOptimizer(
        keras.optimizers.SGD(0.5),
        "two_bit",
        collective=algorithm,
        diagnostics=tf_dgc.Diagnostics(check_every=2),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "algorithm"),
    in_turn(
        SETTINGS, [collectives.Butterfly(), collectives.Tree(), collectives.Star(2)]
    ),
)
def test_optimizer_takes_the_same_steps(strategies, settings, algorithm):
    """Bit-equal, because all sums of these numbers are exact."""
    rng = np.random.default_rng(0)
    weights = [np.zeros((40, 50), "float32"), np.zeros(7, "float32")]
    trainers = [
        Trainer(strategies[3], lambda e=e: SETTINGS[settings](e), weights)
        for e in ("ring", algorithm)
    ]
    for _ in range(3):
        gradients = [
            [rng.integers(-9, 9, size=w.shape).astype("float32") for w in weights]
            for _ in range(3)
        ]
        for trainer in trainers:
            trainer.step(gradients)
        ring_state, state = (trainer.state() for trainer in trainers)
        for (path, expected), copies in zip(
            ring_state.items(), state.values(), strict=True
        ):
            np.testing.assert_array_equal(copies, expected, err_msg=path)


def test_config_round_trip(strategies):
    with strategies[2].scope():
        sgd = keras.optimizers.SGD(0.5)
        optimizer = tf_dgc.DGCOptimizer(sgd, collective=collectives.Star(2))
        again = tf_dgc.DGCOptimizer.from_config(optimizer.get_config())
    assert repr(again.collective) == "Star(shards=2)"


@pytest.mark.parametrize("name", collectives.names())
def test_get_by_name_and_config(name):
    algorithm = collectives.get(name)
    assert algorithm.name == name
    assert type(algorithm).from_config(algorithm.get_config()).get_config() == (
        algorithm.get_config()
    )
    assert collectives.get(algorithm) is algorithm


@pytest.mark.parametrize("wrong", ["circle", 3, None])
def test_unknown_algorithm_raises(wrong):
    with pytest.raises(ValueError, match=r"must be one of 'ring'.*Received"):
        collectives.get(wrong)


@pytest.mark.parametrize("shards", [0, -1, 1.5, "all"])
def test_invalid_shards_raise(shards):
    with pytest.raises(ValueError, match=r"1 or more\. Received"):
        collectives.Star(shards)
