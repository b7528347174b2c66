"""Count sketches: tables in which every entry has a cell of each row, with a sign."""

import tensorflow as tf


class Sketch:
    """Where each entry goes, and with which sign: one draw of a sketch.

    Args:
        size: number of entries n.
        cells: number of cells of a row.
        seeds: seed of each row, int32 `[2]`.
    """

    def __init__(self, size: int, cells: int, seeds: list[tf.Tensor]):
        self._cells = cells
        self._bits = [_hash(size, seed) for seed in seeds]

    def of(self, values: tf.Tensor) -> tf.Tensor:
        """Return the sketch, `[rows, cells]`, of float `[n]`."""
        rows = [
            tf.math.unsorted_segment_sum(
                values * self._signs(bits, values.dtype), self._where(bits), self._cells
            )
            for bits in self._bits
        ]
        return tf.stack(rows)

    def touched(self, values: tf.Tensor) -> tf.Tensor:
        """Return which cells have an entry that is not 0, bool `[rows, cells]`.

        Unlike a sum, it does not depend on the order, which a GPU does not fix.
        """
        there = tf.cast(values != 0, tf.int32)
        rows = [
            tf.math.unsorted_segment_max(there, self._where(bits), self._cells)
            for bits in self._bits
        ]
        return tf.stack(rows) > 0

    def estimates(self, table: tf.Tensor) -> tf.Tensor:
        """Return the median over rows of every entry's cell, float `[n]`."""
        found = [
            tf.gather(row, self._where(bits)) * self._signs(bits, table.dtype)
            for row, bits in zip(tf.unstack(table), self._bits, strict=True)
        ]
        # Sorted by exchanging neighbours: n sorts of a few numbers would take longer.
        for turn in range(len(found)):
            for i in range(turn % 2, len(found) - 1, 2):
                low, high = found[i], found[i + 1]
                found[i], found[i + 1] = tf.minimum(low, high), tf.maximum(low, high)
        return found[len(found) // 2]

    def _where(self, bits: tf.Tensor) -> tf.Tensor:
        share = tf.cast(bits, tf.int64) * self._cells
        return tf.cast(tf.bitwise.right_shift(share, 32), tf.int32)

    def _signs(self, bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        lowest = tf.bitwise.bitwise_and(bits, tf.constant(1, tf.uint32))
        return tf.cast(1 - 2 * tf.cast(lowest, tf.int32), dtype)


def _hash(size: int, seed: tf.Tensor) -> tf.Tensor:
    """Return a number of 32 bits for every entry, uint32 `[size]`, by a row's seed.

    Position and two keys, mixed by shifts and odd factors (those of C. Wellons'
    "lowbias32"): a draw for every entry would take several times as long.
    """
    keys = tf.random.stateless_uniform([2], seed, None, None, tf.uint32)
    x = tf.cast(tf.range(size), tf.uint32) + keys[0]
    x = _folded(x, 16) * tf.constant(0x7FEB352D, tf.uint32) + keys[1]
    x = _folded(x, 15) * tf.constant(0x846CA68B, tf.uint32)
    return _folded(x, 16)


def _folded(x: tf.Tensor, shift: int) -> tf.Tensor:
    upper = tf.bitwise.right_shift(x, tf.constant(shift, tf.uint32))
    return tf.bitwise.bitwise_xor(x, upper)
