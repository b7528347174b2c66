"""Ok-Topk against its algorithm in plain NumPy, and what must hold of it."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer
from selection import rows

import tf_dgc
from tf_dgc.codecs import wire
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.codecs.value_types import encode
from tf_dgc.codecs.wire import Selection
from tf_dgc.collectives.requests import Form, Gather, Spread, Sum
from tf_dgc.exchanges import OkTopK, Place
from tf_dgc.testing.communicator import run_all

MIXED = Form(
    [
        Tensor("a", (60,), tf.float32, False),
        Tensor("b", (5,), tf.float32, True),
        Tensor("c", (40,), tf.float64, False),
        Tensor("d", (3,), tf.float64, True),
        Tensor("e", (9,), tf.float32, False),
    ],
    [13, 5, 7, 3, 1],
)
ONE = Form([Tensor("a", (300,), tf.float32, False)], [40])
FEW = Form([Tensor("a", (30,), tf.float32, False)], [3])
SINGLE = Form([Tensor("a", (4,), tf.float32, False)], [1])
MANY = Form([Tensor(str(i), (7 + i,), tf.float32, False) for i in range(20)], [2] * 20)
ALL = Form([Tensor("a", (24,), tf.float32, False)], [24])
FORMS = {
    "mixed": MIXED,
    "one": ONE,
    "few": FEW,
    "single": SINGLE,
    "many": MANY,
    "all": ALL,
}


def anywhere(rng, tensor, k, worker):
    return rng.choice(tensor.size, k, replace=False)


def at_the_front(rng, tensor, k, worker):
    """All in one region, if regions were of equal sizes."""
    return rng.choice(min(tensor.size, k + 2), k, replace=False)


def apart(rng, tensor, k, worker):
    """Each worker's in a corner of its own, so that there is no room for most."""
    return (worker * k + np.arange(k)) % tensor.size


def the_same(rng, tensor, k, worker):
    return np.arange(k) * (tensor.size // k)


def draw(form, place, rng, worker):
    """Return positions and values of each tensor; whole numbers, so sums are exact."""
    found = []
    for tensor, k in zip(*form, strict=True):
        where = np.arange(k) if tensor.exempt else place(rng, tensor, k, worker)
        values = rng.choice([-9, -5, -3, -2, -1, 1, 2, 4, 7, 8], k)
        found.append(
            (np.sort(where).astype("int32"), values.astype(tensor.dtype.name))
        )
    return found


def as_words(form, found, finite=True):
    selections = [
        Selection(
            None if t.exempt else tf.constant(where),
            encode(tf.constant(v), t.value_type),
        )
        for t, (where, v) in zip(form.layout, found, strict=True)
    ]
    return wire.encode(*form, selections, tf.constant(finite))


def cut(found, room):
    """Return the largest of a dictionary of values by position."""
    order = sorted(found, key=lambda p: (-abs(found[p]), p))[:room]
    return {p: found[p] for p in order}


class Reference:
    """The algorithm as the class says it, by dictionaries of tensor and position."""

    def __init__(self, form, workers, slack):
        self.sparse = [i for i, t in enumerate(form.layout) if not t.exempt]
        self.form, self.number = form, len(workers)
        self.have = [
            {(i, p): v for i in self.sparse for p, v in zip(*w[i], strict=True)}
            for w in workers
        ]
        order = [sorted(have) for have in self.have]
        total = len(order[0])
        ranks = [i * total // self.number for i in range(self.number + 1)]
        self.starts = [self.start(order, rank) for rank in ranks[:-1]]
        share = [
            [sum(a <= r < b and e[0] == i for r, e in enumerate(order[0])) for i in
             self.sparse]
            for a, b in zip(ranks, ranks[1:], strict=False)
        ]
        self.rooms = [
            {
                i: min(form.counts[i], math.ceil((1 + slack) * n))
                for i, n in zip(self.sparse, of_region, strict=True)
            }
            for of_region in share
        ]

    def start(self, order, rank):
        tensor = order[0][rank][0]
        if rank == 0 or order[0][rank - 1][0] != tensor:
            return tensor, 0
        return tensor, sum(entries[rank][1] for entries in order) // self.number

    def owner(self, place):
        return max(i for i, start in enumerate(self.starts) if start <= place)

    def cut(self, owner, found):
        return self.of_tensors(found, self.rooms[owner])

    def of_tensors(self, found, rooms):
        kept = {}
        for i in self.sparse:
            kept.update(cut({p: v for p, v in found.items() if p[0] == i}, rooms[i]))
        return kept

    def run(self):
        """Return the result, and which of each worker's entries are in it."""
        sent = [{} for _ in self.have]
        gathered = {}
        for owner in range(self.number):
            sums = {}
            for mine, have in zip(sent, self.have, strict=True):
                here = {p: v for p, v in have.items() if self.owner(p) == owner}
                message = self.cut(owner, here)
                mine.update(message)
                for p, v in message.items():
                    sums[p] = sums.get(p, 0) + v
            gathered.update(self.cut(owner, sums))
        result = self.of_tensors(gathered, self.form.counts)
        kept = [
            [p in mine and p in result for p in sorted(have)]
            for mine, have in zip(sent, self.have, strict=True)
        ]
        for i in self.sparse:
            free = (p for p in range(self.form.layout[i].size) if (i, p) not in result)
            while sum(place[0] == i for place in result) < self.form.counts[i]:
                result[i, next(free)] = 0
        return result, kept


def run(form, words, exchange=None, record=None):
    number = len(words)
    exchange = exchange or OkTopK()
    return run_all(
        [exchange.merge(w, form, Place(i, number)) for i, w in enumerate(words)], record
    )


@pytest.mark.parametrize("place", [anywhere, at_the_front, apart, the_same])
@pytest.mark.parametrize(
    ("number", "form"),
    rows(
        [(n, form) for form in FORMS for n in range(1, 9)],
        [(8, form) for form in FORMS] + [(n, "mixed") for n in range(1, 8)],
    ),
)
def test_is_the_algorithm(number, form, place):
    form = FORMS[form]
    rng = np.random.default_rng(number)
    workers = [draw(form, place, rng, w) for w in range(number)]
    words = [as_words(form, w, finite=i != number - 2) for i, w in enumerate(workers)]
    slack = rng.choice([0.0, 0.25, 2.0])
    outcomes = run(form, words, OkTopK(slack))
    expected, kept = Reference(form, workers, slack).run()
    flag, found = wire.read(outcomes[0][0][tf.newaxis], *form)
    assert flag[0] == (number > 1)
    for i, (where, values) in enumerate(found):
        if where is None:
            np.testing.assert_array_equal(values[0], sum(w[i][1] for w in workers))
            continue
        mine = dict(zip(where[0].numpy(), values[0].numpy(), strict=True))
        assert mine == {p: v for (t, p), v in expected.items() if t == i}
    assert len({words.numpy().tobytes() for words, _ in outcomes}) == 1
    for (_, delivered), mine in zip(outcomes, kept, strict=True):
        assert delivered.numpy().tolist() == mine


@pytest.mark.parametrize("place", [anywhere, at_the_front, apart, the_same])
@pytest.mark.parametrize("number", rows(range(1, 9), [3, 8]))
@pytest.mark.parametrize("form", rows(FORMS, ["mixed", "single"]))
def test_nothing_is_lost_or_there_twice(form, number, place):
    """Each entry is in the sum, or goes back to who sent it."""
    form = FORMS[form]
    rng = np.random.default_rng(7 * number)
    workers = [draw(form, place, rng, w) for w in range(number)]
    outcomes = run(form, [as_words(form, w) for w in workers])
    _, found = wire.read(outcomes[0][0][tf.newaxis], *form)
    for i, tensor in enumerate(form.layout):
        if tensor.exempt:
            continue
        before = [i for i, t in enumerate(form.layout) if not t.exempt].index(i)
        first = sum(
            form.counts[j]
            for j in [j for j, t in enumerate(form.layout) if not t.exempt][:before]
        )
        total = np.zeros(tensor.size)
        where, values = (x[0].numpy() for x in found[i])
        total[where] = values
        for (_, delivered), mine in zip(outcomes, workers, strict=True):
            at, sent = mine[i]
            there = delivered[first : first + len(at)].numpy()
            total[at[there]] -= sent[there]
        np.testing.assert_array_equal(total, 0)
