"""gTop-k against its algorithm in plain NumPy, and what must hold of it."""

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

FORM = BufferLayout(
    [
        TensorSpec("a", (60,), tf.float32, False),
        TensorSpec("b", (5,), tf.float32, True),
        TensorSpec("c", (40,), tf.float64, False),
    ],
    [6, 5, 3],
)


def make_entries(rng):
    """Return positions and values of each tensor; whole numbers, so sums are exact."""
    found = []
    for tensor, k in zip(*FORM, strict=True):
        where = np.sort(rng.choice(tensor.size, k, replace=False)).astype("int32")
        values = rng.choice([-9, -5, -3, -2, -1, 1, 2, 4, 7, 8], k)
        found.append((where, values.astype(tensor.dtype.name)))
    return found


def as_words(found, finite=True):
    selections = [
        SelectedEntries(
            None if t.uncompressed else tf.constant(where),
            encode_values(tf.constant(v), t.value_type),
        )
        for t, (where, v) in zip(FORM.tensors, found, strict=True)
    ]
    return buffer.encode_sparse(*FORM, selections, tf.constant(finite))


def reference(workers):
    """The algorithm as the class says it: a dictionary of each worker and tensor.

    Returns:
        The merged tensors, and which of each worker's entries were kept all the way.
    """
    merged, kept = [], [[] for _ in workers]
    for i, (tensor, k) in enumerate(zip(*FORM, strict=True)):
        have = [dict(zip(*worker[i], strict=True)) for worker in workers]
        own = [dict.fromkeys(of_worker, True) for of_worker in have]
        merged.append(merge_all(have, own, tensor.size if tensor.uncompressed else k))
        if not tensor.uncompressed:
            for found, mine in zip(kept, own, strict=True):
                found += [mine[p] for p in sorted(mine)]
    return merged, kept


def merge_all(have, own, k):
    """Return the result, and note in `own` what is kept of each worker's entries."""
    core = 2 ** (len(have).bit_length() - 1)
    groups = [{w} for w in range(len(have))]
    rounds = [[(extra - core, extra) for extra in range(core, len(have))]]
    for bit in range(core.bit_length() - 1):
        rounds.append([(a, a | 1 << bit) for a in range(core) if not a >> bit & 1])
    for pairs in rounds:
        for a, b in pairs:
            total = dict(have[a])
            for p, v in have[b].items():
                total[p] = total.get(p, 0) + v
            order = sorted(total, key=lambda p, total=total: (-abs(total[p]), p))[:k]
            have[a] = have[b] = {p: total[p] for p in order}
            groups[a] = groups[b] = groups[a] | groups[b]
            for w in groups[a]:
                own[w].update({p: own[w][p] and p in have[a] for p in own[w]})
    return have[0]


@pytest.mark.parametrize("seed", rows(range(8), [0, 1]))
@pytest.mark.parametrize("number", range(1, 9))
def test_is_the_algorithm(number, seed):
    rng = np.random.default_rng(seed)
    workers = [make_entries(rng) for _ in range(number)]
    steps = [
        GTopK().merge(as_words(mine, finite=w != number - 2), FORM, Rank(w, number))
        for w, mine in enumerate(workers)
    ]
    record = [[] for _ in workers]
    outcomes = run_all(steps, record)
    expected, kept = reference(workers)
    flag, found = buffer.read_buffers(outcomes[0][0][tf.newaxis], *FORM)
    assert flag[0] == (number > 1)
    for (where, values), total in zip(found, expected, strict=True):
        at = np.arange(5) if where is None else where[0].numpy()
        assert dict(zip(at, values[0].numpy(), strict=True)) == total
    assert len({words.numpy().tobytes() for words, *_ in outcomes}) == 1
    for (_, delivered, _), mine in zip(outcomes, kept, strict=True):
        assert delivered.numpy().tolist() == mine
    cost = GTopK().cost_of_merge(1, number)
    assert max(map(len, record)) == cost.rounds


@pytest.mark.skipif(native_library.load_library().library is None, reason="not built")
@pytest.mark.parametrize("seed", range(5))
def test_natively_it_is_the_same(seed):
    rng = np.random.default_rng(seed)
    pair = [as_words(make_entries(rng), finite) for finite in (True, seed != 3)]
    mine = sparse_merge.merge_buffers(*pair, FORM)
    reference = sparse_merge.merge_buffers_with_tensorflow(*pair, FORM)
    for ours, theirs in zip(mine, reference, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(
        mine[0], sparse_merge.merge_buffers(*pair[::-1], FORM)[0]
    )


def assert_spoiled(words, damaged):
    """The same but for the checksum, the fifth word; refused whatever was damaged."""
    np.testing.assert_array_equal(np.delete(words, 4), np.delete(damaged, 4))
    with pytest.raises(tf.errors.InvalidArgumentError):
        buffer.read_buffers(words[tf.newaxis], *FORM)


def test_what_is_sound_for_others_is_spoiled_too():
    """As where it is this worker that has another model."""
    mine = as_words(make_entries(np.random.default_rng(0)))
    other = BufferLayout(
        [FORM.tensors[0]._replace(shape=(61,)), *FORM.tensors[1:]], FORM.counts
    )
    for merge in (
        sparse_merge.merge_buffers,
        sparse_merge.merge_buffers_with_tensorflow,
    ):
        words, _ = merge(mine, mine, other)
        assert_spoiled(words, mine)


@pytest.mark.parametrize(
    "merge", [sparse_merge.merge_buffers, sparse_merge.merge_buffers_with_tensorflow]
)
@pytest.mark.parametrize("word", [0, 1, 3, 4, 7, -1])
def test_damage_goes_on_to_be_refused(merge, word):
    rng = np.random.default_rng(0)
    fine, damaged = (as_words(make_entries(rng)).numpy() for _ in range(2))
    damaged[word] ^= 4
    for pair in ((fine, damaged), (damaged, fine), (damaged, damaged)):
        words, places = merge(*map(tf.constant, pair), FORM)
        assert_spoiled(words, damaged)
        np.testing.assert_array_equal(places, [-1] * 9)
        again, _ = merge(words, tf.constant(fine), FORM)
        np.testing.assert_array_equal(again, words)
    with pytest.raises(tf.errors.InvalidArgumentError):
        buffer.read_buffers(tf.constant(damaged)[tf.newaxis], *FORM)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2, 8))
def test_all_refuse_what_one_worker_sends(number):
    """Whoever it is, and however they wait for each other."""
    rng = np.random.default_rng(0)
    for wrong in range(number):
        workers = [as_words(make_entries(rng)).numpy() for _ in range(number)]
        workers[wrong][-1] ^= 4
        steps = [
            GTopK().merge(tf.constant(words), FORM, Rank(w, number))
            for w, words in enumerate(workers)
        ]
        for words, delivered, _ in run_all(steps):
            assert not np.any(delivered)
            with pytest.raises(tf.errors.InvalidArgumentError):
                buffer.read_buffers(words[tf.newaxis], *FORM)


@pytest.mark.parametrize(
    "make",
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
def test_what_it_cannot_merge(make):
    with pytest.raises(ValueError, match="on the way"):
        make(keras.optimizers.SGD(0.1))
