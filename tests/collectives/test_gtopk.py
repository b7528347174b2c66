"""gTop-k against a NumPy reference, and damaged buffers."""

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
from tf_dgc.collectives import GTopK, Rank, sparse_merge
from tf_dgc.collectives.requests import BufferLayout
from tf_dgc.testing import run_all

LAYOUT = BufferLayout(
    [
        TensorSpec("a", (60,), tf.float32, False),
        TensorSpec("b", (5,), tf.float32, True),
        TensorSpec("c", (40,), tf.float64, False),
    ],
    [6, 5, 3],
)


def make_entries(rng):
    """Return positions and values of each tensor; sums of the values are exact."""
    entries = []
    for tensor, k in zip(*LAYOUT, strict=True):
        positions = np.sort(rng.choice(tensor.size, k, replace=False)).astype("int32")
        values = rng.choice([-9, -5, -3, -2, -1, 1, 2, 4, 7, 8], k)
        entries.append((positions, values.astype(tensor.dtype.name)))
    return entries


def encode(entries, finite=True):
    selections = [
        SelectedEntries(
            None if t.uncompressed else tf.constant(positions),
            encode_values(tf.constant(values), t.value_type),
        )
        for t, (positions, values) in zip(LAYOUT.tensors, entries, strict=True)
    ]
    return buffer.encode_sparse(*LAYOUT, selections, tf.constant(finite))


def reference(workers):
    """Run the algorithm of `GTopK` with a dictionary per worker and tensor.

    Returns:
        The merged tensors, and for each worker whether its entries were delivered.
    """
    merged = []
    delivered = [[] for _ in workers]
    for i, (tensor, k) in enumerate(zip(*LAYOUT, strict=True)):
        entries = [dict(zip(*worker[i], strict=True)) for worker in workers]
        is_kept = [dict.fromkeys(of_worker, True) for of_worker in entries]
        merged.append(
            merge_all(entries, is_kept, tensor.size if tensor.uncompressed else k)
        )
        if not tensor.uncompressed:
            for flags, flags_of_tensor in zip(delivered, is_kept, strict=True):
                flags += [flags_of_tensor[p] for p in sorted(flags_of_tensor)]
    return merged, delivered


def merge_all(entries, is_kept, k):
    """Return the merged entries; update `is_kept` for each worker's entries."""
    core = 2 ** (len(entries).bit_length() - 1)
    groups = [{w} for w in range(len(entries))]
    rounds = [[(extra - core, extra) for extra in range(core, len(entries))]]
    for bit in range(core.bit_length() - 1):
        rounds.append([(a, a | 1 << bit) for a in range(core) if not a >> bit & 1])
    for pairs in rounds:
        for a, b in pairs:
            total = dict(entries[a])
            for p, v in entries[b].items():
                total[p] = total.get(p, 0) + v
            order = sorted(total, key=lambda p, total=total: (-abs(total[p]), p))[:k]
            entries[a] = entries[b] = {p: total[p] for p in order}
            groups[a] = groups[b] = groups[a] | groups[b]
            for w in groups[a]:
                is_kept[w].update(
                    {p: is_kept[w][p] and p in entries[a] for p in is_kept[w]}
                )
    return entries[0]


@pytest.mark.parametrize("seed", rows(range(8), [0, 1]))
@pytest.mark.parametrize("num_workers", range(1, 9))
def test_equals_the_reference(num_workers, seed):
    rng = np.random.default_rng(seed)
    workers = [make_entries(rng) for _ in range(num_workers)]
    steps = [
        GTopK().merge(
            encode(entries, finite=w != num_workers - 2), LAYOUT, Rank(w, num_workers)
        )
        for w, entries in enumerate(workers)
    ]
    record = [[] for _ in workers]
    outcomes = run_all(steps, record)
    expected, expected_delivered = reference(workers)
    flag, tensors = buffer.read_buffers(outcomes[0][0][tf.newaxis], *LAYOUT)
    assert flag[0] == (num_workers > 1)
    for (positions, values), total in zip(tensors, expected, strict=True):
        indices = np.arange(5) if positions is None else positions[0].numpy()
        assert dict(zip(indices, values[0].numpy(), strict=True)) == total
    assert len({words.numpy().tobytes() for words, *_ in outcomes}) == 1
    for (_, delivered, _), flags in zip(outcomes, expected_delivered, strict=True):
        assert delivered.numpy().tolist() == flags
    cost = GTopK().cost_of_merge(1, num_workers)
    assert max(map(len, record)) == cost.rounds


@pytest.mark.skipif(native_library.load_library().library is None, reason="not built")
@pytest.mark.parametrize("seed", range(5))
def test_native_merge_is_the_same(seed):
    rng = np.random.default_rng(seed)
    pair = [encode(make_entries(rng), finite) for finite in (True, seed != 3)]
    native = sparse_merge.merge_buffers(*pair, LAYOUT)
    reference = sparse_merge.merge_buffers_with_tensorflow(*pair, LAYOUT)
    for actual, expected in zip(native, reference, strict=True):
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(
        native[0], sparse_merge.merge_buffers(*pair[::-1], LAYOUT)[0]
    )


def check_refused(words, damaged):
    """Check that `words` equal `damaged` but for the checksum, and cannot be read."""
    np.testing.assert_array_equal(np.delete(words, 4), np.delete(damaged, 4))
    with pytest.raises(tf.errors.InvalidArgumentError):
        buffer.read_buffers(words[tf.newaxis], *LAYOUT)


def test_merge_under_another_layout_is_refused():
    """The merging worker has another model than the others."""
    words = encode(make_entries(np.random.default_rng(0)))
    layout = BufferLayout(
        [LAYOUT.tensors[0]._replace(shape=(61,)), *LAYOUT.tensors[1:]], LAYOUT.counts
    )
    for merge in (
        sparse_merge.merge_buffers,
        sparse_merge.merge_buffers_with_tensorflow,
    ):
        merged, _ = merge(words, words, layout)
        check_refused(merged, words)


@pytest.mark.parametrize(
    "merge", [sparse_merge.merge_buffers, sparse_merge.merge_buffers_with_tensorflow]
)
@pytest.mark.parametrize("word", [0, 1, 3, 4, 7, -1])
def test_merge_with_a_damaged_buffer_is_refused(merge, word):
    rng = np.random.default_rng(0)
    intact, damaged = (encode(make_entries(rng)).numpy() for _ in range(2))
    damaged[word] ^= 4
    for pair in ((intact, damaged), (damaged, intact), (damaged, damaged)):
        words, places = merge(*map(tf.constant, pair), LAYOUT)
        check_refused(words, damaged)
        np.testing.assert_array_equal(places, [-1] * 9)
        again, _ = merge(words, tf.constant(intact), LAYOUT)
        np.testing.assert_array_equal(again, words)
    with pytest.raises(tf.errors.InvalidArgumentError):
        buffer.read_buffers(tf.constant(damaged)[tf.newaxis], *LAYOUT)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", range(2, 8))
def test_all_workers_refuse_a_damaged_buffer(num_workers):
    """Each worker in turn sends it."""
    rng = np.random.default_rng(0)
    for faulty_worker in range(num_workers):
        workers = [encode(make_entries(rng)).numpy() for _ in range(num_workers)]
        workers[faulty_worker][-1] ^= 4
        steps = [
            GTopK().merge(tf.constant(words), LAYOUT, Rank(w, num_workers))
            for w, words in enumerate(workers)
        ]
        for words, delivered, _ in run_all(steps):
            assert not np.any(delivered)
            with pytest.raises(tf.errors.InvalidArgumentError):
                buffer.read_buffers(words[tf.newaxis], *LAYOUT)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda sgd: tf_dgc.CompressedOptimizer(sgd, "two_bit", collective="gtopk"),
        lambda sgd: tf_dgc.CompressedOptimizer(
            sgd, "top_k", error_feedback=False, collective="gtopk"
        ),
        lambda sgd: tf_dgc.DGCOptimizer(sgd, value_dtype="sign", collective="gtopk"),
        lambda sgd: tf_dgc.DGCOptimizer(sgd, 0.0, collective="gtopk"),
        lambda sgd: tf_dgc.DGCOptimizer(
            sgd, uncompressed_dtype="bfloat16", collective="gtopk"
        ),
    ],
)
def test_unsupported_settings_raise(make_optimizer):
    with pytest.raises(ValueError, match="on the way"):
        make_optimizer(keras.optimizers.SGD(0.1))
