"""gTop-k: entries of two workers are merged, and as many kept, round after round."""

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
    """Sums sparse entries by swapping with partners, and keeps the k largest each time.

    Shi et al., algorithm 3: after round r, groups of 2^(r+1) workers hold the same k
    entries, so what a worker receives is log2 N buffers instead of N - 1. If N is no
    power of two, each worker beyond the largest one merges with one below first, and
    gets the result from it: two more rounds for those.

    An entry counts as sent only if it was kept in every round on its worker's way; else
    it goes back to that worker's residual, also where others' entries of the same
    position arrived. (The paper looks at the final result only, which loses those.)

    Values travel as wide as they are accumulated, since each round would round them
    anew. What is not a buffer of entries goes around TensorFlow's ring.
    """

    name = "gtopk"
    reference = "Shi et al., ICDCS 2019, algorithm 3"
    drops_entries = True

    def merge(self, words: tf.Tensor, form: BufferLayout, place: Rank) -> MergeSteps:
        """Merge with a helper, then with partners at distances of powers of two."""
        if all(t.uncompressed for t in form.layout):
            # Such a step is dense: where that is decided at run time, this is traced.
            return MergeResult(words, tf.zeros([0], tf.bool))
        number = num_sparse_entries(form)
        helper, places = place.helper, tf.range(number, dtype=tf.int32)
        if helper is None:
            yield []
        else:
            (theirs,) = yield [SendRecv(words, sum(helper) - place.worker)]
            sound = buffer.is_valid(theirs, buffer.layout_fingerprint(form.layout))
            words, places = merge_buffers(words, theirs, form)
        if helper is not None and place.worker == helper[0]:
            for _ in range(place.bits):
                yield []
            words, kept, _ = yield from _hear(words, number, helper, sound)
        else:
            words, kept, _ = yield from _swap_all(words, number, form, place)
            told = tf.concat([words, _pack(kept)], axis=0)
            yield [] if helper is None else [send_to(told, *helper[::-1])]
        return MergeResult(words, tf.logical_and(places >= 0, _of(kept, places)))

    def cost_of_merge(self, num_bytes: float, num_workers: int) -> Cost:
        """Return that of a worker that helps another one, if there is one."""
        bits = num_workers.bit_length() - 1
        if num_workers == 2**bits:
            each = bits * num_bytes
            return Cost(bits, each, each, each, merged=2 * each)
        sent = (bits + 2) * num_bytes
        merged = 2 * (bits + 1) * num_bytes
        return Cost(bits + 2, sent, sent - num_bytes, sent, merged=merged)


def _swap_all(
    words: tf.Tensor, number: int | tf.Tensor, form: BufferLayout, place: Rank
) -> MergeSteps:
    """Return the result, and which of the entries it began with were kept."""
    places = tf.range(number, dtype=tf.int32)
    for bit in range(place.bits):
        (theirs,) = yield [SendRecv(words, place.worker ^ 1 << bit)]
        words, step = merge_buffers(words, theirs, form)
        places = tf.where(places < 0, -1, _of(step, places))
    return MergeResult(words, places >= 0)


def _hear(
    words: tf.Tensor,
    number: int | tf.Tensor,
    helper: tuple[int, int],
    sound: tf.Tensor,
) -> MergeSteps:
    """Return the same as the helper says, refused unless all came as it was sent."""
    bits = _pack(tf.ones([number], tf.bool))
    (told,) = yield [send_to(tf.concat([words, bits], axis=0), *helper[::-1])]
    length = tf.size(words)
    bits = told[length:]
    kept = unpack_bits(tf.reshape(bits[:-1], [1, -1]))[0, :number]
    words = tf.ensure_shape(told[:length], words.shape)
    fine = tf.logical_and(sound, tf.equal(bits[-1], _check(bits[:-1])))
    words = tf.where(fine, words, buffer.invalidate(words))
    return MergeResult(words, tf.cast(kept, tf.bool))


def _pack(kept: tf.Tensor) -> tf.Tensor:
    """Return a bit for each of them, and a word that shows whether they are damaged."""
    bits = pack_bits(tf.cast(kept, tf.int32))
    return tf.concat([bits, [_check(bits)]], axis=0)


def _check(bits: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.invert(tf.reduce_sum(bits))


def _of(values: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Return the values at places; those of the first one for places below 0."""
    return tf.gather(values, tf.maximum(places, 0))
