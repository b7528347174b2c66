"""signSGD: one bit per entry, decided by majority."""

import math

import keras
import tensorflow as tf

from tf_dgc.codecs.bits import num_stream_words, pack_bits, unpack_bits
from tf_dgc.collectives.requests import Aggregation, AllGather, Result
from tf_dgc.compressors.base import NativeMethod, Quantizer
from tf_dgc.compressors.common.one_round import sum_decoded
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class SignSGD(Quantizer):
    """Takes a majority vote on the sign of every entry: 1 bit per entry.

    Bernstein et al., algorithm 3: workers send `sign(g)`, and the update is
    `sign(sum of signs)`. The inner optimizer receives -1, 0 (a tie) or 1, whatever the
    gradient's magnitude and the number of workers: choose its learning rate as for
    signSGD.

    One bit cannot represent the sign of 0. So a worker abstains for rows whose gradient
    is all zeros, such as those of an embedding that its batch did not look up: one more
    bit per row says whether the worker votes. A row without a gradient on any worker
    does not change. In other rows, zeros vote at random. A row has one index for all
    axes but the last; tensors of rank below 2 are one row.

    The method has no error feedback; see `EFSignSGD`.
    """

    name = "sign_sgd"
    reference = "Bernstein et al., signSGD, ICML 2018"
    aggregation = "vote"
    additive = False
    homogeneity = 0
    error_feedback = "forbidden"

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of a bit per row and of a bit per entry."""
        del dtype
        rows, columns = _rows(shape)
        return 4 * (num_stream_words(rows) + num_stream_words(rows * columns))

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Gather and count the votes."""
        del state
        shape = _rows(tuple(values.shape))

        def decode(words: tf.Tensor) -> tf.Tensor:
            return _decode(words, *shape, values.dtype)

        words = _encode(tf.reshape(values, shape), keys)
        gathered = yield AllGather(words)
        votes = sum_decoded(gathered, decode, shape, values.dtype)
        return Result(tf.sign(votes), decode(words))

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method, which takes the length of a row."""
        return NativeMethod(self.name, NativeMethod.in_halves(_rows(shape)[1]))


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of rows and of entries per row."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return math.prod(shape[:-1]), shape[-1]


def _encode(rows: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
    """Return a bit per row, 1 to vote, then a bit per entry, 1 for negative."""
    votes = tf.reduce_any(rows != 0, axis=1)
    values = tf.reshape(rows, [-1])
    coins = tf.random.stateless_uniform(values.shape, keys.local()) < 0.5
    negative = tf.where(values == 0, coins, values < 0)
    streams = [pack_bits(tf.cast(bits, tf.int32)) for bits in (votes, negative)]
    return tf.concat(streams, axis=0)


def _decode(words: tf.Tensor, rows: int, columns: int, dtype: tf.DType) -> tf.Tensor:
    """Return one worker's votes, `[rows, columns]`: -1 or 1, 0 if it abstains."""
    split = num_stream_words(rows)
    votes = unpack_bits(words[tf.newaxis, :split])[0, :rows]
    negative = unpack_bits(words[tf.newaxis, split:])[0, : rows * columns]
    signs = 1 - 2 * tf.cast(tf.reshape(negative, [rows, columns]), dtype)
    return tf.cast(votes, dtype)[:, tf.newaxis] * signs
