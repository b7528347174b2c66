"""Damaged buffers and buffers of another model are refused, in any round."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from selection import rows

from tf_dgc import collectives
from tf_dgc.codecs import buffer
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.codecs.value_types import encode_values
from tf_dgc.collectives import Rank
from tf_dgc.collectives.requests import (
    AllGather,
    AllToAll,
    Broadcast,
    BufferLayout,
    SendRecv,
)
from tf_dgc.testing import run_all

LAYOUT = BufferLayout([TensorSpec("a", (60,), tf.float32, False)], [4])
# Another layout, whose buffers have the same size.
OTHER_LAYOUT = BufferLayout([TensorSpec("a", (61,), tf.float32, False)], [4])
FAULTY_WORKER = 1
CASES = [
    *itertools.product(
        ["ring", "tree", "butterfly", "star", "gtopk", "oktopk", "twoway"], range(2, 9)
    ),
    *[("hierarchical", number) for number in (4, 6)],
]
ROWS = rows(CASES, [(name, 5 if name != "hierarchical" else 4) for name, _ in CASES])


def get_algorithm(name, num_workers):
    if name == "hierarchical":
        half = num_workers // 2
        return collectives.Hierarchical([[*range(half)], [*range(half, num_workers)]])
    return collectives.get(name)


def words_of(worker, layout=LAYOUT):
    rng = np.random.default_rng(worker)
    positions = np.sort(rng.choice(60, 4, replace=False)).astype("int32")
    values = encode_values(tf.constant([1.0, 3.0, -2.0, 1.0 + worker]), "float32")
    selection = buffer.SelectedEntries(tf.constant(positions), values)
    return buffer.encode_sparse(*layout, [selection], tf.constant(True))


def damage(values):
    """Return a copy with one bit flipped in the last word."""
    damaged = np.array(values)
    damaged[..., -1] ^= 4
    return tf.constant(damaged)


def rounds_of(algorithm, words, layout, rank):
    """Run a worker's rounds; return the entries it reads, or the error message."""
    try:
        if algorithm.drops_entries:
            merged = yield from algorithm.merge(words, layout, rank)
            buffers = merged.words[tf.newaxis]
        else:
            buffers = yield from algorithm.gather(words, rank)
        _, ((positions, values),) = buffer.read_buffers(buffers, *layout)
    except tf.errors.InvalidArgumentError as error:
        return error.message
    return positions.numpy().tolist(), values.numpy().tolist()


def run(name, num_workers, layouts=None, wrap=lambda worker, step: step):
    steps = []
    for worker, layout in enumerate(layouts or [LAYOUT] * num_workers):
        step = rounds_of(
            get_algorithm(name, num_workers),
            words_of(worker, layout),
            layout,
            Rank(worker, num_workers),
        )
        steps.append(wrap(worker, step))
    return run_all(steps)


@pytest.mark.parametrize(("name", "num_workers"), ROWS)
def test_all_workers_refuse_another_layout(name, num_workers):
    """Their errors name the worker, unless the algorithm merges buffers."""
    layouts = [
        OTHER_LAYOUT if worker == FAULTY_WORKER else LAYOUT
        for worker in range(num_workers)
    ]
    assert words_of(0, OTHER_LAYOUT).shape == words_of(0).shape
    results = run(name, num_workers, layouts)
    assert all(isinstance(message, str) for message in results), results
    if not get_algorithm(name, num_workers).drops_entries:
        del results[FAULTY_WORKER]
        assert all(f"worker {FAULTY_WORKER}" in message for message in results), results
        assert len(set(results)) == 1


class DamagedRound:
    """Damages the words that a worker sends in one round.

    Args:
        index: index of the round; rounds in which it sends no words do not count.
    """

    def __init__(self, index):
        self._rounds_left = index
        self.damaged_type = None

    def wrap(self, worker, step):
        return self._run(step) if worker == FAULTY_WORKER else step

    def _run(self, step):
        replies = None
        try:
            while True:
                replies = yield [self._change(m) for m in step.send(replies)]
        except StopIteration as end:
            return end.value

    def _change(self, message):
        sends = isinstance(message, SendRecv | AllGather | AllToAll)
        sends |= isinstance(message, Broadcast) and message.source == FAULTY_WORKER
        if not sends or message[0].dtype != tf.int32 or not tf.size(message[0]):
            return message
        self._rounds_left -= 1
        if self._rounds_left != -1:
            return message
        self.damaged_type = type(message)
        return message._replace(**{message._fields[0]: damage(message[0])})


@pytest.mark.parametrize(("name", "num_workers"), ROWS)
def test_damaged_round_is_refused(name, num_workers):
    """Receivers refuse it; workers that do not receive it get the usual result."""
    expected = run(name, num_workers)
    assert all(result == expected[0] for result in expected)
    for index in itertools.count():
        damaged_round = DamagedRound(index)
        results = run(name, num_workers, wrap=damaged_round.wrap)
        if damaged_round.damaged_type is None:
            break
        is_refused = [isinstance(result, str) for result in results]
        assert any(is_refused), damaged_round.damaged_type
        for result, refused in zip(results, is_refused, strict=True):
            assert refused or result == expected[0]
