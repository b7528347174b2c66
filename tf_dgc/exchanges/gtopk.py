"""gTop-k: entries of two workers are merged, and as many kept, round after round."""

from collections.abc import Generator
from typing import TypeAlias

import keras
import tensorflow as tf

from tf_dgc.codecs import bitstream
from tf_dgc.collectives.entries import Entries, Space, are_in
from tf_dgc.collectives.requests import Form, Primitive, Swap
from tf_dgc.exchanges.base import Cost, Exchange, MergeRounds, Place, Rounds, hand_over
from tf_dgc.exchanges.ring import Ring

_Merging: TypeAlias = Generator[list[Primitive], list[tf.Tensor], Entries]


@keras.saving.register_keras_serializable(package="tf_dgc")
class GTopK(Exchange):
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

    def sum(self, values: tf.Tensor, place: Place) -> Rounds:
        """Ask for one all-reduce."""
        return (yield from Ring().sum(values, place))

    def gather(self, words: tf.Tensor, place: Place) -> Rounds:
        """Ask for one all-gather."""
        return (yield from Ring().gather(words, place))

    def merge(self, words: tf.Tensor, form: Form, place: Place) -> MergeRounds:
        """Merge with a helper, then with partners at distances of powers of two."""
        space = Space(form)
        mine = entries = space.read(words)
        delivered = tf.ones_like(mine.positions, tf.bool)
        helper = _helper(place)
        if helper is None:
            yield []
        else:
            partner = sum(helper) - place.worker
            entries = yield from _swap(entries, words, partner, space)
            delivered = are_in(mine.positions, entries)
        if helper is not None and place.worker == helper[0]:
            for _ in range(_bits(place)):
                yield []
            return (yield from _hear(words, entries, mine, delivered, helper, space))
        first, kept = entries, tf.ones_like(entries.positions, tf.bool)
        for bit in range(_bits(place)):
            words = space.write(entries)
            entries = yield from _swap(entries, words, place.worker ^ 1 << bit, space)
            kept = tf.logical_and(kept, are_in(first.positions, entries))
        words = space.write(entries)
        if helper is None:
            yield []
        else:
            told = tf.concat([words, _packed(kept)], axis=0)
            yield [hand_over(told, *helper[::-1])]
        return words, _also(delivered, mine, first, kept)

    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return that of a ring."""
        return Ring().cost_of_sum(num_bytes, num_workers)

    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return that of a ring; see `cost_of_merge`."""
        return Ring().cost_of_gather(num_bytes, num_workers)

    def cost_of_merge(self, num_bytes: float, num_workers: int) -> Cost:
        """Return that of a worker that helps another one, if there is one."""
        bits = num_workers.bit_length() - 1
        if num_workers == 2**bits:
            return Cost(bits, bits * num_bytes, bits * num_bytes)
        return Cost(bits + 2, (bits + 2) * num_bytes, (bits + 1) * num_bytes)


def _bits(place: Place) -> int:
    return place.num_workers.bit_length() - 1


def _helper(place: Place) -> tuple[int, int] | None:
    """Return who is helped and by whom, if this worker is one of both."""
    core = 2 ** _bits(place)
    if place.worker >= core:
        return place.worker, place.worker - core
    if place.worker + core < place.num_workers:
        return place.worker + core, place.worker
    return None


def _swap(entries: Entries, words: tf.Tensor, partner: int, space: Space) -> _Merging:
    """Return what one's own entries and a partner's come to."""
    (theirs,) = yield [Swap(words, partner)]
    return space.merge(entries, space.read(theirs))


def _hear(
    words: tf.Tensor,
    first: Entries,
    mine: Entries,
    delivered: tf.Tensor,
    helper: tuple[int, int],
    space: Space,
) -> MergeRounds:
    """Return the result, and which entries are in it, as the helper says."""
    bits = _packed(tf.ones_like(first.positions, tf.bool))
    told = tf.concat([words, bits], axis=0)  # of the same length
    (told,) = yield [hand_over(told, *helper[::-1])]
    length, number = tf.size(words), tf.size(first.positions)
    unpacked = bitstream.unpack(tf.reshape(told[length:], [1, -1]))[0, :number]
    kept = tf.cast(unpacked, tf.bool)
    result = tf.ensure_shape(told[:length], words.shape)
    return result, _also(delivered, mine, first, kept)


def _packed(bits: tf.Tensor) -> tf.Tensor:
    return bitstream.pack(tf.cast(bits, tf.int32))


def _also(
    delivered: tf.Tensor, mine: Entries, first: Entries, kept: tf.Tensor
) -> tf.Tensor:
    """Return which of this worker's entries were kept at first and ever after."""
    last = tf.size(first.positions) - 1
    place = tf.minimum(tf.searchsorted(first.positions, mine.positions), last)
    return tf.logical_and(delivered, tf.gather(kept, place))
