"""DeMo: the largest cosine components of the momentum."""

import functools
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import arguments
from tf_dgc.codecs import golomb, value_types
from tf_dgc.collectives.requests import Aggregation, AllGather, Result
from tf_dgc.compressors.base import LowRank, NativeMethod
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.common.one_round import sum_decoded
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import tie_offset

_LARGEST = float(np.finfo(np.float32).max) / 2


@keras.saving.register_keras_serializable(package="tf_dgc")
class DeMo(LowRank):
    """Sends the largest components of each tile's cosine transform.

    Peng et al., "Decoupled momentum optimization", 2024, algorithm 1. The residual is
    the momentum:

    1. `m = decay * m + g`.
    2. Transform each tile of m (orthonormal DCT-II in both dimensions).
    3. Send the k components of largest magnitude, and subtract their inverse transform
       from m.
    4. Transform the sum over workers back and, as in the paper's experiments, take its
       sign (`sign`).

    A component contributes to all entries of its tile: weights without a gradient
    change with the others of their tile.

    A tensor is a matrix whose columns are its last axis. Tiles are `tile` wide and
    high, or as large as a smaller matrix, and padded with zeros at its ends; the
    authors' code uses the largest divisors of its dimensions instead. The inner
    optimizer must have no momentum.

    Args:
        tile: number of rows and of columns of a tile, 1 or more.
        per_tile: number of components of a tile that are sent, or all if it has fewer.
        decay: factor of the momentum per step, in (0, 1].
        sign: whether the update is the sign of the sum, which needs a learning rate of
            its own; otherwise it is the sum.
        value_dtype: type of the components on the wire: None for that of the residual,
            or one of `tf_dgc.codecs.value_types.CHOICES`.
    """

    name = "demo"
    reference = "Peng et al., DeMo: Decoupled momentum optimization, 2024"
    error_feedback = "required"
    residual_is_momentum = True

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
        self.homogeneity = 0 if self.sign else 1

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of positions and components.

        Raises:
            ValueError: if the positions of components do not fit into int32.
        """
        size, k = self._sizes(shape)
        if size > tf.int32.max:
            raise ValueError(
                "Tiles must have at most 2**31 - 1 components together, as positions "
                "are int32. Choose a smaller `tile`, or exclude the tensor from "
                f"compression. Received: shape={tuple(shape)}, tile={self.tile}, "
                f"{size} components"
            )
        streams = value_types.value_bits(self.value_dtype or dtype.name, k)
        values = sum(-(-bits // 32) for bits in streams)
        return 4 * (golomb.num_words(size, k) + values)

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Transform, select, gather and transform back."""
        del state
        shape, dtype = values.shape, values.dtype
        size, k = self._sizes(tuple(shape))
        value_dtype, offset = self.value_dtype or dtype.name, tie_offset(size, keys)
        bounded = value_types.bound(values, _LARGEST / self.tile**2)
        components = _transform(_to_tiles(bounded, self._tile(shape)))
        rotated = golomb.rotate(self._select(components), size, offset)
        position_words, _ = golomb.encode(rotated, size)
        positions = golomb.unrotate(rotated, size, offset)
        selected = tf.gather(tf.reshape(components, [-1]), positions)
        value_words = value_types.encode_values(selected, value_dtype)
        words = tf.concat([position_words, value_words], axis=0)
        gathered = yield AllGather(words)
        split = golomb.num_words(size, k)

        def decode(words: tf.Tensor) -> tf.Tensor:
            rotated, _ = golomb.decode(words[:split], size, k)
            indices = golomb.unrotate(rotated, size, offset)[:, tf.newaxis]
            value_words = words[tf.newaxis, split:]
            values = value_types.decode_values(value_words, value_dtype, k, dtype)[0]
            values = tf.where(rotated < size, values, tf.zeros_like(values))
            return tf.scatter_nd(indices, values, [size])

        def transform_back(flat: tf.Tensor) -> tf.Tensor:
            tiles = _inverse_transform(tf.reshape(flat, components.shape))
            return _from_tiles(tiles, shape)

        total = transform_back(sum_decoded(gathered, decode, [size], dtype))
        update = tf.sign(total) if self.sign else total
        return Result(update, transform_back(decode(words)))

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method, whose sums are rounded differently."""
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

    def _select(self, components: tf.Tensor) -> tf.Tensor:
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
        """Return the number of components, and of those sent."""
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
    """Return the rows and columns of a tensor as a matrix."""
    columns = shape[-1] if len(shape) else 1
    return math.prod(shape) // columns, columns


def _to_tiles(values: tf.Tensor, tile: tuple[int, int]) -> tf.Tensor:
    """Return `[tiles, height, width]`, padded with zeros."""
    (rows, columns), (height, width) = _matrix(values.shape), tile
    matrix = tf.reshape(values, [rows, columns])
    matrix = tf.pad(matrix, [[0, -rows % height], [0, -columns % width]])
    split = [matrix.shape[0] // height, height, matrix.shape[1] // width, width]
    tiles = tf.transpose(tf.reshape(matrix, split), [0, 2, 1, 3])
    return tf.reshape(tiles, [-1, height, width])


def _from_tiles(tiles: tf.Tensor, shape: Any) -> tf.Tensor:
    """Return the tensor of some tiles, the inverse of `_to_tiles`."""
    (rows, columns), (height, width) = _matrix(shape), tiles.shape[1:]
    split = [-(-rows // height), -(-columns // width), height, width]
    matrix = tf.transpose(tf.reshape(tiles, split), [0, 2, 1, 3])
    matrix = tf.reshape(matrix, [split[0] * height, split[1] * width])
    return tf.reshape(matrix[:rows, :columns], shape)


def _transform(tiles: tf.Tensor) -> tf.Tensor:
    """Return the cosine transform of each tile."""
    height, width = (_cosines(n, tiles.dtype) for n in tiles.shape[1:])
    return tf.matmul(tf.matmul(height, tiles), width, transpose_b=True)


def _inverse_transform(components: tf.Tensor) -> tf.Tensor:
    """Return the tiles with these cosine transforms."""
    height, width = (_cosines(n, components.dtype) for n in components.shape[1:])
    return tf.matmul(tf.matmul(height, components, transpose_a=True), width)


def _cosines(length: int, dtype: tf.DType) -> tf.Tensor:
    return tf.constant(_orthonormal(length), dtype)


@functools.cache
def _orthonormal(length: int) -> "np.ndarray[Any, Any]":
    """Return the matrix of the orthonormal DCT-II, `[length, length]`."""
    k, i = np.mgrid[:length, :length]
    cosines = np.cos(np.pi * (2 * i + 1) * k / (2 * length))
    return cosines * np.sqrt(np.where(k == 0, 1, 2) / length)
