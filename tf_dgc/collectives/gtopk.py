"""gTop-k: merges sparse buffers pairwise, keeping k entries each time."""

import keras
import tensorflow as tf

from tf_dgc.codecs import buffer
from tf_dgc.codecs.bits import pack_bits, unpack_bits
from tf_dgc.collectives.algorithm import Cost, MergeResult, MergeSteps, Rank, send_to
from tf_dgc.collectives.requests import BufferLayout, SendRecv
from tf_dgc.collectives.ring import Ring
from tf_dgc.collectives.sparse_merge import merge_buffers, num_sparse_entries


@keras.saving.register_keras_serializable(package="tf_dgc")
class GTopK(Ring):
    """Sums sparse entries pairwise, and keeps the k largest sums each time.

    Shi et al., algorithm 3: after round r, groups of 2^(r+1) workers hold the same k
    entries, so a worker receives log2 N buffers instead of N - 1. If N is no power of
    two, each worker beyond the largest power merges with a helper first and receives
    the result from it: two more rounds for those workers.

    An entry counts as sent only if it was kept in every round on its way. Otherwise it
    returns to the residual of the worker that sent it, even if other workers' entries
    at the same position arrived. (The paper checks only the final result, and loses
    these entries.)

    Values are sent in the dtype in which they are accumulated, since each round would
    round them again. Everything except sparse buffers uses TensorFlow's collectives.
    """

    name = "gtopk"
    reference = "Shi et al., ICDCS 2019, algorithm 3"
    drops_entries = True

    def merge(self, words: tf.Tensor, layout: BufferLayout, rank: Rank) -> MergeSteps:
        """Merge with the helper, then with partners at distances of powers of two."""
        if all(t.uncompressed for t in layout.tensors):
            # Traced, but never run: a step without compressed tensors is dense.
            return MergeResult(words, tf.zeros([0], tf.bool))
        number = num_sparse_entries(layout)
        helper, positions = rank.helper, tf.range(number, dtype=tf.int32)
        if helper is None:
            yield []
        else:
            (received,) = yield [SendRecv(words, sum(helper) - rank.worker)]
            fingerprint = buffer.layout_fingerprint(layout.tensors)
            is_valid = buffer.is_valid(received, fingerprint)
            words, positions = merge_buffers(words, received, layout)
        if helper is not None and rank.worker == helper[0]:
            for _ in range(rank.bits):
                yield []
            words, survived, _ = yield from _receive_result(
                words, number, helper, is_valid
            )
        else:
            words, survived, _ = yield from _merge_with_partners(
                words, number, layout, rank
            )
            result = tf.concat([words, _pack_mask(survived)], axis=0)
            yield [] if helper is None else [send_to(result, *helper[::-1])]
        delivered = tf.logical_and(positions >= 0, _lookup(survived, positions))
        return MergeResult(words, delivered)

    def cost_of_merge(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost of a worker that helps another, if there is one."""
        bits = num_workers.bit_length() - 1
        if num_workers == 2**bits:
            total = bits * num_bytes
            return Cost(bits, total, total, total, merged=2 * total)
        sent = (bits + 2) * num_bytes
        merged = 2 * (bits + 1) * num_bytes
        return Cost(bits + 2, sent, sent - num_bytes, sent, merged=merged)


def _merge_with_partners(
    words: tf.Tensor, number: int | tf.Tensor, layout: BufferLayout, rank: Rank
) -> MergeSteps:
    """Return the result, and which of the initial entries survived all rounds."""
    positions = tf.range(number, dtype=tf.int32)
    for bit in range(rank.bits):
        (received,) = yield [SendRecv(words, rank.worker ^ 1 << bit)]
        words, new_positions = merge_buffers(words, received, layout)
        positions = tf.where(positions < 0, -1, _lookup(new_positions, positions))
    return MergeResult(words, positions >= 0)


def _receive_result(
    words: tf.Tensor,
    number: int | tf.Tensor,
    helper: tuple[int, int],
    is_valid: tf.Tensor,
) -> MergeSteps:
    """Return the result and the mask that the helper sends.

    The words are invalid if the helper's first message was, or if the mask is damaged.
    """
    mask = _pack_mask(tf.ones([number], tf.bool))
    placeholder = tf.concat([words, mask], axis=0)
    (received,) = yield [send_to(placeholder, *helper[::-1])]
    length = tf.size(words)
    mask = received[length:]
    survived = unpack_bits(tf.reshape(mask[:-1], [1, -1]))[0, :number]
    words = tf.ensure_shape(received[:length], words.shape)
    is_valid = tf.logical_and(is_valid, tf.equal(mask[-1], _check_word(mask[:-1])))
    words = tf.where(is_valid, words, buffer.invalidate(words))
    return MergeResult(words, tf.cast(survived, tf.bool))


def _pack_mask(mask: tf.Tensor) -> tf.Tensor:
    """Return a bool mask as bits, followed by a check word."""
    bits = pack_bits(tf.cast(mask, tf.int32))
    return tf.concat([bits, [_check_word(bits)]], axis=0)


def _check_word(bits: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.invert(tf.reduce_sum(bits))


def _lookup(values: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Return the values at some positions; at 0 for negative positions."""
    return tf.gather(values, tf.maximum(positions, 0))
