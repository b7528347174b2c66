"""Ok-Topk against a NumPy reference, its cost, and damaged messages."""

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

NO_LIBRARY = native_library.NativeLibrary(None, "", False, {})
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
LAYOUTS = {
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
    """Put all entries into the first region, if regions had equal sizes."""
    return rng.choice(min(tensor.size, k + 2), k, replace=False)


def apart(rng, tensor, k, worker):
    """Put each worker's entries elsewhere, so that most of them are dropped."""
    return (worker * k + np.arange(k)) % tensor.size


def the_same(rng, tensor, k, worker):
    return np.arange(k) * (tensor.size // k)


PLACEMENTS = {f.__name__: f for f in (anywhere, at_the_front, apart, the_same)}


def make_entries(layout, placement, rng, worker):
    """Return positions and values of each tensor; sums of the values are exact."""
    entries = []
    for tensor, k in zip(*layout, strict=True):
        positions = (
            np.arange(k) if tensor.uncompressed else placement(rng, tensor, k, worker)
        )
        values = rng.choice([-9, -5, -3, -2, -1, 1, 2, 4, 7, 8], k)
        entries.append(
            (np.sort(positions).astype("int32"), values.astype(tensor.dtype.name))
        )
    return entries


def encode(layout, entries, finite=True):
    selections = [
        SelectedEntries(
            None if t.uncompressed else tf.constant(positions),
            encode_values(tf.constant(values), t.value_type),
        )
        for t, (positions, values) in zip(layout.tensors, entries, strict=True)
    ]
    return buffer.encode_sparse(*layout, selections, tf.constant(finite))


def largest(entries, count):
    """Return the entries with the largest values, as `{position: value}`."""
    order = sorted(entries, key=lambda p: (-abs(entries[p]), p))[:count]
    return {p: entries[p] for p in order}


class Reference:
    """`OkTopK` with dictionaries whose keys are tensor and position."""

    def __init__(self, layout, workers, slack):
        self.sparse = [i for i, t in enumerate(layout.tensors) if not t.uncompressed]
        self.layout, self.num_workers = layout, len(workers)
        self.entries = [
            {(i, p): v for i in self.sparse for p, v in zip(*w[i], strict=True)}
            for w in workers
        ]
        order = [sorted(entries) for entries in self.entries]
        total = len(order[0])
        bounds = [i * total // self.num_workers for i in range(self.num_workers + 1)]
        self.starts = [self.start(order, bound) for bound in bounds[:-1]]
        counts = [
            [
                sum(a <= r < b and e[0] == i for r, e in enumerate(order[0]))
                for i in self.sparse
            ]
            for a, b in itertools.pairwise(bounds)
        ]
        self.capacities = [
            {
                i: min(layout.counts[i], math.ceil((1 + slack) * n))
                for i, n in zip(self.sparse, region_counts, strict=True)
            }
            for region_counts in counts
        ]

    def start(self, order, rank):
        tensor = order[0][rank][0]
        if rank == 0 or order[0][rank - 1][0] != tensor:
            return tensor, 0
        return tensor, sum(entries[rank][1] for entries in order) // self.num_workers

    def owner(self, entry):
        return max(i for i, start in enumerate(self.starts) if start <= entry)

    def largest_of_region(self, owner, entries):
        return self.largest_of_tensors(entries, self.capacities[owner])

    def largest_of_tensors(self, entries, capacities):
        result = {}
        for i in self.sparse:
            of_tensor = {p: v for p, v in entries.items() if p[0] == i}
            result.update(largest(of_tensor, capacities[i]))
        return result

    def run(self):
        """Return the result, and for each worker whether its entries are in it."""
        sent = [{} for _ in self.entries]
        gathered = {}
        for owner in range(self.num_workers):
            sums = {}
            for sent_by_worker, entries in zip(sent, self.entries, strict=True):
                in_region = {p: v for p, v in entries.items() if self.owner(p) == owner}
                message = self.largest_of_region(owner, in_region)
                sent_by_worker.update(message)
                for p, v in message.items():
                    sums[p] = sums.get(p, 0) + v
            gathered.update(self.largest_of_region(owner, sums))
        result = self.largest_of_tensors(gathered, self.layout.counts)
        delivered = [
            [p in sent_by_worker and p in result for p in sorted(entries)]
            for sent_by_worker, entries in zip(sent, self.entries, strict=True)
        ]
        for i in self.sparse:
            size = self.layout.tensors[i].size
            free = (p for p in range(size) if (i, p) not in result)
            while sum(entry[0] == i for entry in result) < self.layout.counts[i]:
                result[i, next(free)] = 0
        return result, delivered


def run(layout, words, algorithm=None, record=None):
    algorithm = algorithm or OkTopK()
    steps = [
        algorithm.merge(w, layout, Rank(i, len(words))) for i, w in enumerate(words)
    ]
    return run_all(steps, record)


@pytest.mark.parametrize(
    ("num_workers", "layout", "placement"),
    rows(
        [
            (n, layout, placement)
            for n in range(1, 9)
            for layout in LAYOUTS
            for placement in PLACEMENTS
        ],
        [(n, "mixed", list(PLACEMENTS)[n % 4]) for n in range(1, 9)]
        + [(8, layout, "apart") for layout in LAYOUTS]
        + [(5, layout, "the_same") for layout in LAYOUTS],
    ),
)
def test_equals_the_reference(num_workers, layout, placement):
    layout, placement = LAYOUTS[layout], PLACEMENTS[placement]
    rng = np.random.default_rng(num_workers)
    workers = [make_entries(layout, placement, rng, w) for w in range(num_workers)]
    words = [
        encode(layout, w, finite=i != num_workers - 2) for i, w in enumerate(workers)
    ]
    slack = rng.choice([0.0, 0.25, 2.0])
    outcomes = run(layout, words, OkTopK(slack))
    expected, expected_delivered = Reference(layout, workers, slack).run()
    flag, tensors = buffer.read_buffers(outcomes[0][0][tf.newaxis], *layout)
    assert flag[0] == (num_workers > 1)
    for i, (positions, values) in enumerate(tensors):
        if positions is None:
            np.testing.assert_array_equal(values[0], sum(w[i][1] for w in workers))
            continue
        entries = dict(zip(positions[0].numpy(), values[0].numpy(), strict=True))
        assert entries == {p: v for (t, p), v in expected.items() if t == i}
    assert len({words.numpy().tobytes() for words, *_ in outcomes}) == 1
    for (_, actual, _), delivered in zip(outcomes, expected_delivered, strict=True):
        assert actual.numpy().tolist() == delivered
    check_conservation(layout, workers, outcomes)


def check_conservation(layout, workers, outcomes):
    """Check that each entry is in the sum or returns to its sender, bit for bit."""
    _, tensors = buffer.read_buffers(outcomes[0][0][tf.newaxis], *layout)
    offset = 0
    for tensor, k, entries, (positions, values) in zip(
        *layout, zip(*workers, strict=True), tensors, strict=True
    ):
        if tensor.uncompressed:
            continue
        total = np.zeros(tensor.size)
        total[positions[0]] = values[0]
        for (sent_positions, sent), (_, delivered, _) in zip(
            entries, outcomes, strict=True
        ):
            is_delivered = delivered[offset : offset + k].numpy()
            total[sent_positions[is_delivered]] -= sent[is_delivered]
        np.testing.assert_array_equal(total, 0)
        offset += k


@pytest.mark.skipif(native_library.load_library().library is None, reason="not built")
@pytest.mark.parametrize("seed", rows(range(6), [0, 1]))
def test_native_merge_is_the_same(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    layout = list(LAYOUTS.values())[seed]
    num_workers = [3, 4, 8, 2, 7, 5][seed]
    workers = [
        make_entries(layout, list(PLACEMENTS.values())[seed % 4], rng, w)
        for w in range(num_workers)
    ]
    for worker in workers:
        for _, values in worker:
            values *= rng.normal(size=values.shape).astype(values.dtype)
    words = [encode(layout, w) for w in workers]
    native = run(layout, words, TwoWay())
    monkeypatch.setattr(native_library, "load_library", lambda: NO_LIBRARY)
    outcomes = tf.nest.flatten(run(layout, words, TwoWay()))
    for actual, expected in zip(tf.nest.flatten(native), outcomes, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("path", rows(["native", "operations"], ["native"]))
def test_traced(monkeypatch, path, static):
    """Counts may come from a schedule; messages are then slightly longer."""
    if path == "operations":
        monkeypatch.setattr(native_library, "load_library", lambda: NO_LIBRARY)
    rng = np.random.default_rng(0)
    workers = [make_entries(MIXED, anywhere, rng, w) for w in range(3)]
    words = [encode(MIXED, w) for w in workers]

    @tf.function(autograph=False)
    def step(counts, *words):
        counts = MIXED.counts if static else tf.unstack(counts)
        return run(BufferLayout(MIXED.tensors, counts), words)

    outcomes = step(tf.constant(MIXED.counts), *words)
    for outcome, eager_outcome in zip(outcomes, run(MIXED, words), strict=True):
        for actual, expected in zip(outcome[:2], eager_outcome[:2], strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("path", ["native", "operations"])
@pytest.mark.parametrize("num_workers", [2, 5])
def test_damaged_message_to_an_owner_is_refused_by_all(monkeypatch, path, num_workers):
    check_damage(
        monkeypatch, path, num_workers, AllToAll, "has received|that it has received"
    )


@pytest.mark.parametrize("path", ["native", "operations"])
def test_damaged_message_to_all_is_refused(monkeypatch, path):
    check_damage(monkeypatch, path, 3, AllGather, "worker 1")


def check_damage(monkeypatch, path, num_workers, request_type, message):
    if path == "operations":
        monkeypatch.setattr(native_library, "load_library", lambda: NO_LIBRARY)
    rng = np.random.default_rng(0)
    words = [
        encode(ONE, make_entries(ONE, anywhere, rng, w)) for w in range(num_workers)
    ]
    steps = [
        run_with_damage(w, i, num_workers, request_type) for i, w in enumerate(words)
    ]
    for outcome in run_all(steps):
        assert isinstance(outcome, tf.errors.InvalidArgumentError)
        assert re.search(message, outcome.message)


def run_with_damage(words, worker, num_workers, request_type):
    """Run a worker's rounds, with damaged requests of worker 1; return the error."""
    rounds = OkTopK().merge(words, ONE, Rank(worker, num_workers))
    requests = next(rounds)
    while True:
        if worker == 1 and requests and isinstance(requests[0], request_type):
            values = requests[0][0].numpy()
            values[..., 7] ^= 4
            requests = [request_type(tf.constant(values))]
        try:
            requests = rounds.send((yield requests))
        except tf.errors.InvalidArgumentError as error:
            return error


def traffic(record, num_workers):
    """Return the bytes that worker 0 sends; a gather goes around a ring."""
    total = 0
    for message in record:
        size = message[0].dtype.size * int(tf.size(message[0]))
        if isinstance(message, Broadcast) and message.source != 0:
            continue
        share = {AllToAll: (num_workers - 1) / num_workers, AllGather: num_workers - 1}
        total += share.get(type(message), 1) * size
    return total


@pytest.mark.parametrize("num_workers", range(1, 9))
@pytest.mark.parametrize("sparsity", [0.99, 0.999])
def test_bytes_equal_the_stated_cost(num_workers, sparsity):
    """At most 1.5 times as many bytes as an all-reduce of the buffer."""
    size = 2_000_000
    layout = BufferLayout(
        [TensorSpec("a", (size,), tf.float32, False)], [num_sent(size, sparsity)]
    )
    rng = np.random.default_rng(0)
    words = [
        encode(layout, make_entries(layout, anywhere, rng, w))
        for w in range(num_workers)
    ]
    record = [[] for _ in words]
    run(layout, words, record=record)
    payload = 4 * int(tf.size(words[0]))
    sent = traffic(record[0], num_workers)
    assert sent <= 1.5 * 2 * (num_workers - 1) / num_workers * payload
    cost = OkTopK().cost_of_merge(payload, num_workers)
    np.testing.assert_allclose(sent, cost.sent, rtol=0.02, atol=1)
    assert cost.received == cost.sent
    if num_workers == 8:
        assert sent <= 0.4 * (num_workers - 1) * payload


def test_result_has_the_largest_sums_of_similar_workers():
    layout = BufferLayout([TensorSpec("a", (100_000,), tf.float32, False)], [4000])
    rng = np.random.default_rng(0)
    workers = [make_entries(layout, anywhere, rng, w) for w in range(8)]
    sums = np.zeros(100_000)
    for ((positions, values),) in workers:
        sums[positions] += values
    (words, *_), *_ = run(layout, [encode(layout, w) for w in workers])
    _, ((_, values),) = buffer.read_buffers(words[tf.newaxis], *layout)
    largest = np.sort(np.abs(sums))[-4000:]
    np.testing.assert_array_equal(np.sort(np.abs(values[0])), largest)


def test_unsupported_method_raises():
    sgd = keras.optimizers.SGD(0.1)
    with pytest.raises(ValueError, match=r"Use `DGCOptimizer` or `TopK` with it"):
        tf_dgc.CompressedOptimizer(sgd, "two_bit", collective="oktopk")


@pytest.mark.slow
def test_two_way_owners_keep_dropped_sums():
    """Every delivered entry is in the result or in its owner's remainder."""
    rng = np.random.default_rng(0)
    for num_workers, placement in itertools.product([1, 2, 5, 8], PLACEMENTS.values()):
        workers = [make_entries(MIXED, placement, rng, w) for w in range(num_workers)]
        words = [encode(MIXED, w) for w in workers]
        outcomes = run(MIXED, words, TwoWay())
        one_way_outcomes = run(MIXED, words)  # only remainders differ
        assert (
            len({o.words.numpy().tobytes() for o in [*outcomes, *one_way_outcomes]})
            == 1
        )
        sizes = [60, 40, 9]
        tensors = buffer.read_buffers(outcomes[0].words[tf.newaxis], *MIXED)[1][::2]
        total = np.zeros(sum(sizes))
        for (positions, values), offset in zip(tensors, [0, 60, 100], strict=True):
            total[positions[0] + offset] += values[0]
        for outcome in outcomes:
            total[outcome.remainder.positions] += outcome.remainder.values
            assert np.all(np.diff(outcome.remainder.positions) > 0)
        for outcome, worker in zip(outcomes, workers, strict=True):
            positions = [
                w + b for (w, _), b in zip(worker[::2], [0, 60, 100], strict=True)
            ]
            sent = np.concatenate([v for _, v in worker[::2]])
            is_delivered = outcome.delivered.numpy()
            total[np.concatenate(positions)[is_delivered]] -= sent[is_delivered]
        np.testing.assert_array_equal(total, 0)


def test_too_large_tensor_raises():
    layout = BufferLayout([TensorSpec("a", (2**31 - 5,), tf.float32, False)], [100])
    with pytest.raises(ValueError, match=r"such as `gtopk`\. Received: 2147483643"):
        Regions(layout, 4, 0.25)


@pytest.mark.parametrize("slack", [1e16, 1e18, 1e308])
def test_large_slack_allows_all_entries(slack):
    layout = BufferLayout([TensorSpec("a", (100, 100), tf.float32, False)], [1000])
    np.testing.assert_array_equal(Regions(layout, 3, slack).rooms, 3 * [[1000]])


@pytest.mark.parametrize("slack", [-0.1, math.inf, math.nan])
def test_invalid_slack_raises(slack):
    with pytest.raises(ValueError, match="finite number, 0 or more, "):
        OkTopK(slack)
