"""What is damaged, or of another program, is refused, in whatever round it comes."""

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

FORM = BufferLayout([TensorSpec("a", (60,), tf.float32, False)], [4])
OTHER = BufferLayout([TensorSpec("a", (61,), tf.float32, False)], [4])  # as many words
WRONG = 1
CASES = [
    *itertools.product(
        ["ring", "tree", "butterfly", "star", "gtopk", "oktopk", "twoway"], range(2, 9)
    ),
    *[("hierarchical", number) for number in (4, 6)],
]
SOME = rows(CASES, [(name, 5 if name != "hierarchical" else 4) for name, _ in CASES])


def make(name, number):
    if name == "hierarchical":
        half = number // 2
        return collectives.Hierarchical([[*range(half)], [*range(half, number)]])
    return collectives.get(name)


def words_of(worker, form=FORM):
    rng = np.random.default_rng(worker)
    positions = np.sort(rng.choice(60, 4, replace=False)).astype("int32")
    values = encode_values(tf.constant([1.0, 3.0, -2.0, 1.0 + worker]), "float32")
    selection = buffer.SelectedEntries(tf.constant(positions), values)
    return buffer.encode_sparse(*form, [selection], tf.constant(True))


def damage(values):
    """Return words of which one bit is another, in the last of them."""
    wrong = np.array(values)
    wrong[..., -1] ^= 4
    return tf.constant(wrong)


def rounds_of(exchange, words, form, place):
    """Run the rounds of a worker; return what is read of them, or why it is refused."""
    try:
        if exchange.drops_entries:
            merged = yield from exchange.merge(words, form, place)
            buffers = merged.words[tf.newaxis]
        else:
            buffers = yield from exchange.gather(words, place)
        _, ((positions, values),) = buffer.read_buffers(buffers, *form)
    except tf.errors.InvalidArgumentError as error:
        return error.message
    return positions.numpy().tolist(), values.numpy().tolist()


def run(name, number, forms=None, wrap=lambda worker, step: step):
    steps = []
    for worker, form in enumerate(forms or [FORM] * number):
        asked = words_of(worker, form), form, Rank(worker, number)
        steps.append(wrap(worker, rounds_of(make(name, number), *asked)))
    return run_all(steps)


@pytest.mark.parametrize(("name", "number"), SOME)
def test_all_refuse_a_foreign_worker(name, number):
    """As it refuses them; and say which one it is, where buffers are not merged."""
    forms = [OTHER if worker == WRONG else FORM for worker in range(number)]
    assert words_of(0, OTHER).shape == words_of(0).shape
    found = run(name, number, forms)
    assert all(isinstance(message, str) for message in found), found
    if not make(name, number).drops_entries:
        del found[WRONG]
        assert all(f"worker {WRONG}" in message for message in found), found
        assert len(set(found)) == 1


class Late:
    """Damages what a worker sends in one round.

    Args:
        number: number of the round; those in which it sends no words do not count.
    """

    def __init__(self, number):
        self._left = number
        self.kind = None

    def wrap(self, worker, step):
        return self._run(step) if worker == WRONG else step

    def _run(self, step):
        replies = None
        try:
            while True:
                replies = yield [self._change(m) for m in step.send(replies)]
        except StopIteration as end:
            return end.value

    def _change(self, message):
        sends = isinstance(message, SendRecv | AllGather | AllToAll)
        sends |= isinstance(message, Broadcast) and message.source == WRONG
        if not sends or message[0].dtype != tf.int32 or not tf.size(message[0]):
            return message
        self._left -= 1
        if self._left != -1:
            return message
        self.kind = type(message)
        return message._replace(**{message._fields[0]: damage(message[0])})


@pytest.mark.parametrize(("name", "number"), SOME)
def test_damage_in_any_round(name, number):
    """Who gets it refuses it; whoever does not has what all have otherwise.

    On the way to all it is all that refuse.
    """
    expected = run(name, number)
    assert all(found == expected[0] for found in expected)
    for late in map(Late, itertools.count()):
        found = run(name, number, wrap=late.wrap)
        if late.kind is None:
            break
        refused = [isinstance(one, str) for one in found]
        assert any(refused), late.kind
        for one, refuses in zip(found, refused, strict=True):
            assert refuses or one == expected[0]
