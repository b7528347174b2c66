"""Count sketches: tables in which every entry has a cell and a sign in each row."""

import tensorflow as tf


class Sketch:
    """A random assignment of entries to cells and signs; seeds are int32 `[2]`."""

    def __init__(self, size: int, cells: int, seeds: list[tf.Tensor]):
        self._cells = cells
        self._bits = [_hash(size, seed) for seed in seeds]

    def of(self, values: tf.Tensor) -> tf.Tensor:
        """Return the sketch, `[rows, cells]`, of float `[n]`."""
        rows = []
        for bits in self._bits:
            signed = values * _signs(bits, values.dtype)
            indices = self._cell_indices(bits)
            rows.append(tf.math.unsorted_segment_sum(signed, indices, self._cells))
        return tf.stack(rows)

    def touched(self, values: tf.Tensor) -> tf.Tensor:
        """Return whether each cell has a nonzero entry, bool `[rows, cells]`.

        Unlike a sum, it does not depend on the order, which a GPU does not fix.
        """
        nonzero = tf.cast(values != 0, tf.int32)
        rows = [
            tf.math.unsorted_segment_max(nonzero, self._cell_indices(b), self._cells)
            for b in self._bits
        ]
        return tf.stack(rows) > 0

    def estimates(self, table: tf.Tensor) -> tf.Tensor:
        """Return the median over rows of every entry's cell, float `[n]`."""
        rows = [
            tf.gather(row, self._cell_indices(bits)) * _signs(bits, table.dtype)
            for row, bits in zip(tf.unstack(table), self._bits, strict=True)
        ]
        # Odd-even transposition sort: n sorts of a few numbers would take longer.
        for turn in range(len(rows)):
            for i in range(turn % 2, len(rows) - 1, 2):
                low, high = rows[i], rows[i + 1]
                rows[i], rows[i + 1] = tf.minimum(low, high), tf.maximum(low, high)
        return rows[len(rows) // 2]

    def _cell_indices(self, bits: tf.Tensor) -> tf.Tensor:
        scaled = tf.cast(bits, tf.int64) * self._cells
        return tf.cast(tf.bitwise.right_shift(scaled, 32), tf.int32)


def _signs(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    lowest = tf.bitwise.bitwise_and(bits, tf.constant(1, tf.uint32))
    return tf.cast(1 - 2 * tf.cast(lowest, tf.int32), dtype)


def _hash(size: int, seed: tf.Tensor) -> tf.Tensor:
    """Return 32 random bits for every entry, uint32 `[size]`.

    Mixes the position and two keys by shifts and odd factors (those of C. Wellons'
    "lowbias32"): several times faster than a random generator.
    """
    keys = tf.random.stateless_uniform([2], seed, None, None, tf.uint32)
    x = tf.cast(tf.range(size), tf.uint32) + keys[0]
    x = _xor_shift(x, 16) * tf.constant(0x7FEB352D, tf.uint32) + keys[1]
    x = _xor_shift(x, 15) * tf.constant(0x846CA68B, tf.uint32)
    return _xor_shift(x, 16)


def _xor_shift(x: tf.Tensor, shift: int) -> tf.Tensor:
    upper = tf.bitwise.right_shift(x, tf.constant(shift, tf.uint32))
    return tf.bitwise.bitwise_xor(x, upper)
