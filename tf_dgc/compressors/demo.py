"""DeMo: what changes fast in a momentum is sent, by its largest cosine components."""

import functools
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import arguments
from tf_dgc.codecs import golomb, value_types
from tf_dgc.collectives.requests import Aggregation, AllGather, Result
from tf_dgc.compressors.base import Compressor, NativeMethod
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.common.one_round import sum_decoded
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import tie_offset

_LARGEST = float(np.finfo(np.float32).max) / 2


@keras.saving.register_keras_serializable(package="tf_dgc")
class DeMo(Compressor):
    """Sends the largest components of each tile's cosine transform, in every step.

    Peng et al., "Decoupled momentum optimization", 2024, algorithm 1: the residual is
    the momentum, `m = decay * m + g`. Each tile of it is transformed (DCT-II, of both
    dimensions, orthonormal), the k components of largest magnitude are sent, and what
    they are the transform of leaves the momentum. Every worker turns the sum back and,
    as in the paper's experiments, takes its sign (`sign`).

    A component of a tile is in all of its entries: rows without a gradient move with
    the others of their tile.

    A tensor is seen as a matrix: all dimensions but the last, and the last. Tiles are
    `tile` wide and high, or as large as the matrix if that is smaller; at its ends they
    are filled up with zeros, where the authors' code takes the largest divisors of its
    dimensions. The optimizer around it must have no momentum, as SGD has none.

    Args:
        tile: number of rows and of columns of a tile, 1 or more.
        per_tile: number of components of a tile that are sent, or all if it has fewer.
        decay: share of the momentum that is kept, in (0, 1].
        sign: whether the update is the sign of the sum, which needs a learning rate of
            its own; else it is the sum.
        value_dtype: type of the components on the wire: None for that of the residual,
            or one of `tf_dgc.codecs.value_types.CHOICES`.
    """

    name = "demo"
    kind = "low rank"
    reference = "Peng et al., DeMo: Decoupled momentum optimization, 2024"
    error_feedback = "required"
    is_momentum = True

    def __init__(
        self,
        tile: int = 64,
        per_tile: int = 32,
        decay: float = 0.999,
        sign: bool = True,
        value_dtype: str | None = None,
    ):
        value_types.check_choice(value_dtype)
        self.tile = arguments.check_whole("tile", tile, 1)
        self.per_tile = arguments.check_whole("per_tile", per_tile, 1)
        self.decay = self.feedback_decay = arguments.check_decay(decay)
        self.sign = bool(sign)
        self.value_dtype = value_dtype
        self.additive = not self.sign
        self.has_units = self.sends_signs = self.sign
        self.conserves = self.decay == 1

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return those of positions and components.

        Raises:
            ValueError: if places of components, of whole tiles, do not fit into int32.
        """
        size, k = self._sizes(shape)
        if size > tf.int32.max:
            raise ValueError(
                "Of whole tiles there are more components than int32 counts. Choose a "
                "smaller `tile`, or exclude the tensor from compression. Received: "
                f"shape={tuple(shape)}, tile={self.tile}, {size} components"
            )
        streams = value_types.value_bits(self.value_dtype or dtype.name, k)
        values = sum(-(-bits // 32) for bits in streams)
        return 4 * (golomb.num_words(size, k) + values)

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Transform, choose, gather, and turn back."""
        del state
        shape, dtype = values.shape, values.dtype
        size, k = self._sizes(tuple(shape))
        kind, offset = self.value_dtype or dtype.name, tie_offset(size, keys)
        bounded = value_types.bound(values, _LARGEST / self.tile**2)
        components = _turn(_to_tiles(bounded, self._tile(shape)))
        turned = golomb.rotate(self._choose(components), size, offset)
        where, _ = golomb.encode(turned, size)
        at = golomb.unrotate(turned, size, offset)
        chosen = tf.gather(tf.reshape(components, [-1]), at)
        words = tf.concat([where, value_types.encode_values(chosen, kind)], axis=0)
        gathered = yield AllGather(words)
        split = golomb.num_words(size, k)

        def decode(words: tf.Tensor) -> tf.Tensor:
            turned, _ = golomb.decode(words[:split], size, k)
            at = golomb.unrotate(turned, size, offset)[:, tf.newaxis]
            found = value_types.decode_values(
                words[tf.newaxis, split:], kind, k, dtype
            )[0]
            there = tf.where(turned < size, found, tf.zeros_like(found))
            return tf.scatter_nd(at, there, [size])

        def back(flat: tf.Tensor) -> tf.Tensor:
            tiles = _turn_back(tf.reshape(flat, components.shape))
            return _from_tiles(tiles, shape)

        total = back(sum_decoded(gathered, decode, [size], dtype))
        return Result(tf.sign(total) if self.sign else total, back(decode(words)))

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method, whose sums are rounded otherwise."""
        size, k = self._sizes(shape)
        *_, value_type = sparse.native_parameters(k, self.value_dtype)
        parameters = [
            *NativeMethod.in_halves(self.tile),
            *NativeMethod.in_halves(self.per_tile),
            self.decay,
            float(self.sign),
            value_type,
            _LARGEST / self.tile**2,
            *golomb.native_parameters(size, k),
        ]
        return NativeMethod(self.name, parameters, all_workers_native=True)

    def _choose(self, components: tf.Tensor) -> tf.Tensor:
        """Return the positions of the largest of each tile, int32 `[k]`."""
        tiles = tf.reshape(components, [-1, math.prod(components.shape[1:])])
        number, width = tiles.shape
        k = min(self.per_tile, width)
        best = tf.math.top_k(tf.abs(tiles), k, sorted=False).indices
        return tf.reshape(best + width * tf.range(number)[:, tf.newaxis], [-1])

    def _tile(self, shape: Any) -> tuple[int, int]:
        rows, columns = _matrix(shape)
        return min(self.tile, rows), min(self.tile, columns)

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return how many components there are, and how many are sent."""
        pairs = zip(_matrix(shape), self._tile(shape), strict=True)
        number = math.prod(-(-length // side) for length, side in pairs)
        width = math.prod(self._tile(shape))
        return number * width, number * min(self.per_tile, width)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "tile": self.tile,
            "per_tile": self.per_tile,
            "decay": self.decay,
            "sign": self.sign,
            "value_dtype": self.value_dtype,
        }


def _matrix(shape: Any) -> tuple[int, int]:
    """Return rows and columns of a tensor of this shape, seen as a matrix."""
    columns = shape[-1] if len(shape) else 1
    return math.prod(shape) // columns, columns


def _to_tiles(values: tf.Tensor, tile: tuple[int, int]) -> tf.Tensor:
    """Return `[tiles, height, width]`, filled up with zeros."""
    (rows, columns), (height, width) = _matrix(values.shape), tile
    matrix = tf.reshape(values, [rows, columns])
    matrix = tf.pad(matrix, [[0, -rows % height], [0, -columns % width]])
    split = [matrix.shape[0] // height, height, matrix.shape[1] // width, width]
    tiles = tf.transpose(tf.reshape(matrix, split), [0, 2, 1, 3])
    return tf.reshape(tiles, [-1, height, width])


def _from_tiles(tiles: tf.Tensor, shape: Any) -> tf.Tensor:
    """Return what `_to_tiles` was given."""
    (rows, columns), (height, width) = _matrix(shape), tiles.shape[1:]
    split = [-(-rows // height), -(-columns // width), height, width]
    matrix = tf.transpose(tf.reshape(tiles, split), [0, 2, 1, 3])
    matrix = tf.reshape(matrix, [split[0] * height, split[1] * width])
    return tf.reshape(matrix[:rows, :columns], shape)


def _turn(tiles: tf.Tensor) -> tf.Tensor:
    """Return the cosine transform of each tile."""
    height, width = (_cosines(n, tiles.dtype) for n in tiles.shape[1:])
    return tf.matmul(tf.matmul(height, tiles), width, transpose_b=True)


def _turn_back(components: tf.Tensor) -> tf.Tensor:
    """Return the tiles that have these components."""
    height, width = (_cosines(n, components.dtype) for n in components.shape[1:])
    return tf.matmul(tf.matmul(height, components, transpose_a=True), width)


def _cosines(length: int, dtype: tf.DType) -> tf.Tensor:
    return tf.constant(_orthonormal(length), dtype)


@functools.cache
def _orthonormal(length: int) -> np.ndarray:
    """Return the matrix of the orthonormal DCT-II, `[length, length]`."""
    k, i = np.mgrid[:length, :length]
    cosines = np.cos(np.pi * (2 * i + 1) * k / (2 * length))
    return cosines * np.sqrt(np.where(k == 0, 1, 2) / length)
