"""Collective algorithms: equal results on all workers, at the stated cost."""

import functools
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
OWN = ALL[1:]  # whose rounds are known here
NUMBERS = range(1, 9)


def simulate(exchange, kind, mine, record=None):
    rounds = [
        getattr(exchange, kind)(tf.constant(value), Rank(worker, len(mine)))
        for worker, value in enumerate(mine)
    ]
    return [outcome.numpy() for outcome in run_all(rounds, record)]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("exchange", ALL, ids=str)
@pytest.mark.parametrize("size", rows([0, 1, 13], [13]))
def test_all_have_the_same(exchange, number, size):
    generator = np.random.default_rng(number)
    vectors = generator.normal(size=(number, size)).astype("float32")
    sums = simulate(exchange, "sum", vectors)
    assert len({total.tobytes() for total in sums}) == 1
    np.testing.assert_allclose(sums[0], vectors.sum(axis=0), atol=1e-5)
    words = generator.integers(-9, 9, size=(number, size)).astype("int32")
    np.testing.assert_array_equal(simulate(exchange, "sum", words)[0], sum(words))
    for everyone in simulate(exchange, "gather", words):
        np.testing.assert_array_equal(everyone, words)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ALL, ids=str)
def test_numbers_of_every_type(strategies, exchange):
    """Dense sums are of any of these; TensorFlow's own collectives do not move all."""
    dtypes = [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32]

    @tf.function(autograph=False)
    def step():
        def replica():
            communicator = Communicator(strategies[4], exchange)
            worker = tf.distribute.get_replica_context().replica_id_in_sync_group
            mine = [tf.cast(tf.range(9) + worker, dtype) for dtype in dtypes]
            sums = [communicator.answer(AllReduce(values)) for values in mine]
            return [tf.cast(values, tf.float64) for values in sums]

        return strategies[4].run(replica)

    total = sum(np.arange(9) + worker for worker in range(4))
    for sums in step():
        for found in strategies[4].experimental_local_results(sums):
            np.testing.assert_array_equal(found, total)


def test_what_is_made_from_a_ring_goes_its_own_way(strategies):
    """As the one in the docs: a communicator does not take it for the default."""
    asked = []

    class Counting(collectives.Ring):
        def sum(self, values, place):
            asked.append(place.worker)
            return (yield from super().sum(values, place))

    @tf.function(autograph=False)
    def step():
        def replica():
            communicator = Communicator(strategies[2], Counting())
            return communicator.answer(AllReduce(tf.ones([3])))

        return strategies[2].run(replica)

    for total in strategies[2].experimental_local_results(step()):
        np.testing.assert_array_equal(total, [2, 2, 2])
    assert asked == [0, 1]


@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_one_in_the_docs(number):
    text = (ROOT / "docs" / "collectives.md").read_text().split("## Writing one")[1]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    names = {"tf_dgc": tf_dgc}
    exec(code, names)
    vectors = np.arange(3 * number, dtype="float32").reshape(number, 3)
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
    """Return the bytes that wait for each other, of messages between two workers.

    Both have to be there for one to begin, and it takes as long as it has bytes.
    """
    waiting = [list(messages) for messages in record]
    over = [0] * len(record)

    def partner(worker):
        if not waiting[worker]:
            return None
        message = waiting[worker][0]
        ends = getattr(message, "group", None)
        return sum(ends) - worker if ends else message.partner

    while any(waiting):
        worker, other = next(
            (w, p)
            for w in range(len(record))
            if (p := partner(w)) is not None and partner(p) == w
        )
        message = waiting[worker].pop(0)
        waiting[other].pop(0)
        size = message.values.dtype.size * int(tf.size(message.values))
        over[worker] = over[other] = max(over[worker], over[other]) + size
    return max(over)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("exchange", OWN, ids=str)
@pytest.mark.parametrize("kind", ["sum", "gather"])
def test_costs_what_it_says(exchange, number, kind):
    size = 8 * 3 * 5 * 7  # what all numbers of workers and servers divide
    mine = np.ones([number, size], "int32")
    record = [[] for _ in mine]
    simulate(exchange, kind, mine, record)
    sent, received = traffic(record)
    cost = getattr(exchange, f"cost_of_{kind}")(4 * size, number)
    assert sent.max() == cost.sent
    assert received.max() == cost.received
    assert sent.sum() == received.sum()
    # Of trees whose parts are of different sizes it is nearly that.
    assert cost.path == pytest.approx(longest_path(record), rel=0.05)


@pytest.mark.parametrize("exchange", OWN, ids=str)
def test_rounds(exchange):
    """As many as it says: of the worker that has most of them."""
    for number in NUMBERS:
        place = Rank(0, number)
        for kind, shape in [("sum", [840]), ("gather", [840])]:
            values = tf.ones(shape, tf.int32)
            step, rounds = getattr(exchange, kind)(values, place), 0
            try:
                asked = next(step)
                while True:
                    rounds += bool(asked)
                    asked = step.send([m.values for m in asked])
            except StopIteration:
                pass
            cost = getattr(exchange, f"cost_of_{kind}")(1, number)
            assert rounds == cost.rounds


@pytest.mark.parametrize(
    ("exchange", "number"),
    in_turn(OWN, [3, 2, 4]),
)
@pytest.mark.parametrize("mode", rows(["traced", "eager"], ["traced"]))
def test_under_a_strategy(strategies, exchange, number, mode):
    """What is summed or gathered, as is decided when it runs."""
    as_it_is = functools.partial(tf.function, autograph=False)
    wrap = {"traced": as_it_is, "eager": lambda function: function}[mode]
    strategy = strategies[number]
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(number, 37)).astype("float32")
    words = generator.integers(-9, 9, size=(number, 5)).astype("int32")
    local = strategy.experimental_local_results

    @wrap
    def step(dense):
        def replica():
            communicator = Communicator(strategy, exchange)
            context = tf.distribute.get_replica_context()
            worker = context.replica_id_in_sync_group
            mine = tf.gather(vectors, worker), tf.gather(words, worker)
            return tuple(communicator.answer(DenseOrSparse(dense, *mine)))[:2]

        return strategy.run(replica)

    totals, _ = map(local, step(tf.constant(True)))
    assert len({total.numpy().tobytes() for total in totals}) == 1
    np.testing.assert_allclose(totals[0], vectors.sum(axis=0), atol=1e-5)
    _, buffers = map(local, step(tf.constant(False)))
    for everyone in buffers:
        np.testing.assert_array_equal(everyone, words)


SETTINGS = {
    "fused, by a schedule": lambda exchange: tf_dgc.DGCOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.5),
        tf_dgc.schedules.PiecewiseConstantSparsity([1], [0.0, 0.97]),
        collective=exchange,
        diagnostics=tf_dgc.Diagnostics(check_every=1),
    ),
    "composed, of two rounds": lambda exchange: tf_dgc.CompressedOptimizer(
        keras.optimizers.SGD(0.5), "scale_com", collective=exchange
    ),
    "by the engine": lambda exchange: tf_dgc.CompressedOptimizer(
        keras.optimizers.SGD(0.5),
        "two_bit",
        collective=exchange,
        diagnostics=tf_dgc.Diagnostics(check_every=2),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "exchange"),
    in_turn(
        SETTINGS, [collectives.Butterfly(), collectives.Tree(), collectives.Star(2)]
    ),
)
def test_an_optimizer_steps_alike(strategies, settings, exchange):
    """To the last bit, as all of these numbers add up exactly."""
    rng = np.random.default_rng(0)
    weights = [np.zeros((40, 50), "float32"), np.zeros(7, "float32")]
    trainers = [
        Trainer(strategies[3], lambda e=e: SETTINGS[settings](e), weights)
        for e in ("ring", exchange)
    ]
    for _ in range(3):
        gradients = [
            [rng.integers(-9, 9, size=w.shape).astype("float32") for w in weights]
            for _ in range(3)
        ]
        for trainer in trainers:
            trainer.step(gradients)
        ours, stock = (trainer.state() for trainer in trainers)
        for (path, copies), expected in zip(ours.items(), stock.values(), strict=True):
            np.testing.assert_array_equal(copies, expected, err_msg=path)


def test_a_config(strategies):
    with strategies[2].scope():
        sgd = keras.optimizers.SGD(0.5)
        optimizer = tf_dgc.DGCOptimizer(sgd, collective=collectives.Star(2))
        again = tf_dgc.DGCOptimizer.from_config(optimizer.get_config())
    assert repr(again.collective) == "Star(shards=2)"


@pytest.mark.parametrize("name", collectives.names())
def test_found_by_name_and_saved(name):
    found = collectives.get(name)
    assert found.name == name
    assert type(found).from_config(found.get_config()).get_config() == (
        found.get_config()
    )
    assert collectives.get(found) is found


@pytest.mark.parametrize("wrong", ["circle", 3, None])
def test_no_exchange(wrong):
    with pytest.raises(ValueError, match=r"must be one of 'ring'.*Received"):
        collectives.get(wrong)


@pytest.mark.parametrize("shards", [0, -1, 1.5, "all"])
def test_no_number_of_servers(shards):
    with pytest.raises(ValueError, match=r"1 or more\. Received"):
        collectives.Star(shards)
