"""Ok-Topk against its algorithm in plain NumPy, and what must hold of it."""

import itertools
import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from selection import rows

import tf_dgc
from tf_dgc import native_library
from tf_dgc.codecs import buffer
from tf_dgc.codecs.buffer import SelectedEntries
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.codecs.value_types import encode_values
from tf_dgc.collectives import OkTopK, Rank, TwoWay
from tf_dgc.collectives.regions import Regions
from tf_dgc.collectives.requests import AllGather, AllToAll, Broadcast, BufferLayout
from tf_dgc.compressors import num_sent
from tf_dgc.testing import run_all

NOT_THERE = native_library.NativeLibrary(None, "", False, {})
MIXED = BufferLayout(
    [
        TensorSpec("a", (60,), tf.float32, False),
        TensorSpec("b", (5,), tf.float32, True),
        TensorSpec("c", (40,), tf.float64, False),
        TensorSpec("d", (3,), tf.float64, True),
        TensorSpec("e", (9,), tf.float32, False),
    ],
    [13, 5, 7, 3, 1],
)
ONE = BufferLayout([TensorSpec("a", (300,), tf.float32, False)], [40])
FEW = BufferLayout([TensorSpec("a", (30,), tf.float32, False)], [3])
SINGLE = BufferLayout([TensorSpec("a", (4,), tf.float32, False)], [1])
MANY = BufferLayout(
    [TensorSpec(str(i), (7 + i,), tf.float32, False) for i in range(20)], [2] * 20
)
ALL = BufferLayout([TensorSpec("a", (24,), tf.float32, False)], [24])
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


PLACES = {f.__name__: f for f in (anywhere, at_the_front, apart, the_same)}


def keys(form, place, rng, worker):
    """Return positions and values of each tensor; whole numbers, so sums are exact."""
    found = []
    for tensor, k in zip(*form, strict=True):
        where = np.arange(k) if tensor.uncompressed else place(rng, tensor, k, worker)
        values = rng.choice([-9, -5, -3, -2, -1, 1, 2, 4, 7, 8], k)
        found.append((np.sort(where).astype("int32"), values.astype(tensor.dtype.name)))
    return found


def as_words(form, found, finite=True):
    selections = [
        SelectedEntries(
            None if t.uncompressed else tf.constant(where),
            encode_values(tf.constant(v), t.value_type),
        )
        for t, (where, v) in zip(form.tensors, found, strict=True)
    ]
    return buffer.encode_sparse(*form, selections, tf.constant(finite))


def cut(found, room):
    """Return the largest of a dictionary of values by position."""
    order = sorted(found, key=lambda p: (-abs(found[p]), p))[:room]
    return {p: found[p] for p in order}


class Reference:
    """The algorithm as the class says it, by dictionaries of tensor and position."""

    def __init__(self, form, workers, slack):
        self.sparse = [i for i, t in enumerate(form.tensors) if not t.uncompressed]
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
            [
                sum(a <= r < b and e[0] == i for r, e in enumerate(order[0]))
                for i in self.sparse
            ]
            for a, b in itertools.pairwise(ranks)
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
            free = (p for p in range(self.form.tensors[i].size) if (i, p) not in result)
            while sum(place[0] == i for place in result) < self.form.counts[i]:
                result[i, next(free)] = 0
        return result, kept


def run(form, words, collective=None, record=None):
    number = len(words)
    algorithm = collective or OkTopK()
    return run_all(
        [algorithm.merge(w, form, Rank(i, number)) for i, w in enumerate(words)], record
    )


@pytest.mark.parametrize(
    ("number", "form", "place"),
    rows(
        [(n, form, place) for n in range(1, 9) for form in FORMS for place in PLACES],
        [(n, "mixed", list(PLACES)[n % 4]) for n in range(1, 9)]
        + [(8, form, "apart") for form in FORMS]
        + [(5, form, "the_same") for form in FORMS],
    ),
)
def test_is_the_algorithm(number, form, place):
    form, place = FORMS[form], PLACES[place]
    rng = np.random.default_rng(number)
    workers = [keys(form, place, rng, w) for w in range(number)]
    words = [as_words(form, w, finite=i != number - 2) for i, w in enumerate(workers)]
    slack = rng.choice([0.0, 0.25, 2.0])
    outcomes = run(form, words, OkTopK(slack))
    expected, kept = Reference(form, workers, slack).run()
    flag, found = buffer.read_buffers(outcomes[0][0][tf.newaxis], *form)
    assert flag[0] == (number > 1)
    for i, (where, values) in enumerate(found):
        if where is None:
            np.testing.assert_array_equal(values[0], sum(w[i][1] for w in workers))
            continue
        mine = dict(zip(where[0].numpy(), values[0].numpy(), strict=True))
        assert mine == {p: v for (t, p), v in expected.items() if t == i}
    assert len({words.numpy().tobytes() for words, *_ in outcomes}) == 1
    for (_, delivered, _), mine in zip(outcomes, kept, strict=True):
        assert delivered.numpy().tolist() == mine
    check_conservation(form, workers, outcomes)


def check_conservation(form, workers, outcomes):
    """Each entry is in the sum, or goes back to who sent it: to the last bit."""
    _, found = buffer.read_buffers(outcomes[0][0][tf.newaxis], *form)
    first = 0
    for tensor, k, mine, (where, values) in zip(
        *form, zip(*workers, strict=True), found, strict=True
    ):
        if tensor.uncompressed:
            continue
        total = np.zeros(tensor.size)
        total[where[0]] = values[0]
        for (at, sent), (_, delivered, _) in zip(mine, outcomes, strict=True):
            there = delivered[first : first + k].numpy()
            total[at[there]] -= sent[there]
        np.testing.assert_array_equal(total, 0)
        first += k


@pytest.mark.skipif(native_library.load_library().library is None, reason="not built")
@pytest.mark.parametrize("seed", rows(range(6), [0, 1]))
def test_natively_it_is_the_same(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    form = list(FORMS.values())[seed]
    number = [3, 4, 8, 2, 7, 5][seed]
    workers = [
        keys(form, list(PLACES.values())[seed % 4], rng, w) for w in range(number)
    ]
    for worker in workers:
        for _, values in worker:
            values *= rng.normal(size=values.shape).astype(values.dtype)
    words = [as_words(form, w) for w in workers]
    native = run(form, words, TwoWay())
    monkeypatch.setattr(native_library, "load_library", lambda: NOT_THERE)
    outcomes = tf.nest.flatten(run(form, words, TwoWay()))
    for ours, theirs in zip(tf.nest.flatten(native), outcomes, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("path", rows(["native", "operations"], ["native"]))
def test_traced(monkeypatch, path, known):
    """Also where the sparsity is scheduled; messages are a little longer then."""
    if path == "operations":
        monkeypatch.setattr(native_library, "load_library", lambda: NOT_THERE)
    rng = np.random.default_rng(0)
    workers = [keys(MIXED, anywhere, rng, w) for w in range(3)]
    words = [as_words(MIXED, w) for w in workers]

    @tf.function(autograph=False)
    def step(counts, *words):
        counts = MIXED.counts if known else tf.unstack(counts)
        return run(BufferLayout(MIXED.tensors, counts), words)

    found = step(tf.constant(MIXED.counts), *words)
    for ours, theirs in zip(found, run(MIXED, words), strict=True):
        for one, other in zip(ours[:2], theirs[:2], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("path", ["native", "operations"])
@pytest.mark.parametrize("number", [2, 5])
def test_damage_on_the_way_to_an_owner_is_refused_by_all(monkeypatch, path, number):
    check_damage(
        monkeypatch, path, number, AllToAll, "has received|that it has received"
    )


@pytest.mark.parametrize("path", ["native", "operations"])
def test_damage_on_the_way_to_all_is_refused(monkeypatch, path):
    check_damage(monkeypatch, path, 3, AllGather, "worker 1")


def check_damage(monkeypatch, path, number, kind, said):
    if path == "operations":
        monkeypatch.setattr(native_library, "load_library", lambda: NOT_THERE)
    rng = np.random.default_rng(0)
    words = [as_words(ONE, keys(ONE, anywhere, rng, w)) for w in range(number)]
    steps = [damaged(w, i, number, kind) for i, w in enumerate(words)]
    for outcome in run_all(steps):
        assert isinstance(outcome, tf.errors.InvalidArgumentError)
        assert re.search(said, outcome.message)


def damaged(words, worker, number, kind):
    """Run the rounds, in which worker 1 sends what is damaged; return the error."""
    rounds = OkTopK().merge(words, ONE, Rank(worker, number))
    asked = next(rounds)
    while True:
        if worker == 1 and asked and isinstance(asked[0], kind):
            wrong = asked[0][0].numpy()
            wrong[..., 7] ^= 4
            asked = [kind(tf.constant(wrong))]
        try:
            asked = rounds.send((yield asked))
        except tf.errors.InvalidArgumentError as error:
            return error


def traffic(record, number):
    """Return the bytes that worker 0 sends; what all gather goes around a ring."""
    total = 0
    for message in record:
        size = message[0].dtype.size * int(tf.size(message[0]))
        if isinstance(message, Broadcast) and message.source != 0:
            continue
        share = {AllToAll: (number - 1) / number, AllGather: number - 1}
        total += share.get(type(message), 1) * size
    return total


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("sparsity", [0.99, 0.999])
def test_costs_what_it_says(number, sparsity):
    """Two thirds more than twice the share of others at most; the gather has N - 1."""
    size = 2_000_000
    form = BufferLayout(
        [TensorSpec("a", (size,), tf.float32, False)], [num_sent(size, sparsity)]
    )
    rng = np.random.default_rng(0)
    words = [as_words(form, keys(form, anywhere, rng, w)) for w in range(number)]
    record = [[] for _ in words]
    run(form, words, record=record)
    payload = 4 * int(tf.size(words[0]))
    sent = traffic(record[0], number)
    assert sent <= 1.5 * 2 * (number - 1) / number * payload
    cost = OkTopK().cost_of_merge(payload, number)
    np.testing.assert_allclose(sent, cost.sent, rtol=0.02, atol=1)
    assert cost.received == cost.sent
    if number == 8:
        assert sent <= 0.4 * (number - 1) * payload


def test_there_is_room_for_workers_that_are_alike():
    """So what comes of it are the largest of all sums."""
    form = BufferLayout([TensorSpec("a", (100_000,), tf.float32, False)], [4000])
    rng = np.random.default_rng(0)
    workers = [keys(form, anywhere, rng, w) for w in range(8)]
    sums = np.zeros(100_000)
    for ((where, values),) in workers:
        sums[where] += values
    (words, *_), *_ = run(form, [as_words(form, w) for w in workers])
    _, ((_, found),) = buffer.read_buffers(words[tf.newaxis], *form)
    largest = np.sort(np.abs(sums))[-4000:]
    np.testing.assert_array_equal(np.sort(np.abs(found[0])), largest)


def test_what_it_cannot_sum():
    sgd = keras.optimizers.SGD(0.1)
    with pytest.raises(ValueError, match=r"It needs `DGCOptimizer`, or `TopK`"):
        tf_dgc.CompressedOptimizer(sgd, "two_bit", collective="oktopk")


@pytest.mark.slow
def test_two_way_owners_keep_what_they_do_not_send_on():
    """What has left a worker is in the result, or with the owner of its region."""
    rng = np.random.default_rng(0)
    for number, place in itertools.product([1, 2, 5, 8], PLACES.values()):
        workers = [keys(MIXED, place, rng, w) for w in range(number)]
        words = [as_words(MIXED, w) for w in workers]
        outcomes = run(MIXED, words, TwoWay())
        same = run(MIXED, words)  # but for who keeps the rest
        assert len({o.words.numpy().tobytes() for o in [*outcomes, *same]}) == 1
        sizes = [60, 40, 9]
        found = buffer.read_buffers(outcomes[0].words[tf.newaxis], *MIXED)[1][::2]
        total = np.zeros(sum(sizes))
        for (where, values), base in zip(found, [0, 60, 100], strict=True):
            total[where[0] + base] += values[0]
        for outcome in outcomes:
            total[outcome.remainder.positions] += outcome.remainder.values
            assert np.all(np.diff(outcome.remainder.positions) > 0)
        for outcome, worker in zip(outcomes, workers, strict=True):
            where = [w + b for (w, _), b in zip(worker[::2], [0, 60, 100], strict=True)]
            sent = np.concatenate([v for _, v in worker[::2]])
            there = outcome.delivered.numpy()
            total[np.concatenate(where)[there]] -= sent[there]
        np.testing.assert_array_equal(total, 0)


def test_too_many_places():
    form = BufferLayout([TensorSpec("a", (2**31 - 5,), tf.float32, False)], [100])
    with pytest.raises(ValueError, match=r"such as `gtopk`\. Received: 2147483643"):
        Regions(form, 4, 0.25)


@pytest.mark.parametrize("slack", [1e16, 1e18, 1e308])
def test_any_room_is_all_there_is(slack):
    form = BufferLayout([TensorSpec("a", (100, 100), tf.float32, False)], [1000])
    np.testing.assert_array_equal(Regions(form, 3, slack).rooms, 3 * [[1000]])


@pytest.mark.parametrize("slack", [-0.1, math.inf, math.nan])
def test_no_share_of_room(slack):
    with pytest.raises(ValueError, match="finite number, 0 or more, "):
        OkTopK(slack)
