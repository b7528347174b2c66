"""TernGrad: -s, 0 or s, by chance, with one scaler for all workers."""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.arguments import check_number
from tf_dgc.codecs import value_types
from tf_dgc.collectives.requests import Aggregation, AllGather, Result
from tf_dgc.compressors.base import NativeMethod, RandomKeys
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.common.one_round import (
    MethodStates,
    TwoRounds,
    maximum,
    sum_decoded,
)


@keras.saving.register_keras_serializable(package="tf_dgc")
class TernGrad(TwoRounds):
    """Sends `s sign(g) b`, with b 1 or 0 by chance and s the largest magnitude.

    Wen et al., equations 1 to 3: `P(b = 1) = |g| / s` and `s = max|g|`, of every tensor
    by itself (layer-wise ternarizing), so the expectation is g. Before that g is
    clipped to 2.5 of its standard deviations (gradient clipping), since one outlier
    makes all others noise. Workers first agree on the largest s of all (scaler sharing,
    section 3.1), a round of one number; the sum of what they send is then s times a
    whole number. (For large networks the paper leaves the last layer whole.)

    Three values take 1.6 bits, packed 5 in a byte. The standard deviation is taken
    about 0, which is the same for the gradients the paper has in mind, and does not
    clip a gradient that is the same everywhere down to nothing.

    The variance can be `(sqrt(n) - 1) / 2` times the square of the input and more, so
    error feedback would diverge.

    Args:
        clip: number of standard deviations that are kept, above 0; None not to clip,
            which makes the method unbiased.
    """

    name = "tern_grad"
    kind = "quantization"
    reference = "Wen et al., TernGrad, NeurIPS 2017"
    error_feedback = "forbidden"

    def __init__(self, clip: float | None = 2.5):
        if clip is not None:
            means = ", of standard deviations, or None not to clip"
            clip = check_number("clip", clip, "(0, inf)", means)
        self.clip = clip
        self.unbiased = clip is None

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return those of the scaler, and of the codes."""
        return dtype.size + 4 * quantize.num_trit_words(math.prod(shape))

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Clip, agree on the scaler, ternarize, and sum."""
        del state
        values = self._clipped(tf.reshape(values, [-1]))
        size, dtype = values.shape[0], values.dtype
        scaler = yield from maximum(tf.reduce_max(tf.abs(values)))
        # Of a quotient, which is at most 1, so no level but -1, 0 and 1 comes out.
        shares = tf.math.divide_no_nan(values, scaler)
        levels = quantize.stochastic_round(shares, keys.local())

        def decode(words: tf.Tensor) -> tf.Tensor:
            return tf.cast(quantize.unpack_trits(words, size) - 1, dtype)

        words = quantize.pack_trits(tf.cast(levels, tf.int32) + 1)
        gathered = yield AllGather(words)
        total = sum_decoded(gathered, decode, [size], dtype)
        return Result(scaler * total, scaler * levels)

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method; a first one finds the scaler."""
        share = self._share(math.prod(shape))
        first = f"{self.name}, scaler"
        return NativeMethod(self.name, [share], first=first, num_words=1, num_notes=1)

    def told_then(
        self, everyone: tf.Tensor, notes: tf.Tensor, states: MethodStates
    ) -> tf.Tensor:
        """Return this worker's scaler, and the largest of all."""
        del states
        largest = tf.reduce_max(tf.bitcast(everyone, tf.float32), axis=1)
        return tf.concat([notes, largest], axis=1)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"clip": self.clip}

    def _clipped(self, values: tf.Tensor) -> tf.Tensor:
        if self.clip is None:
            return values
        largest = tf.reduce_max(tf.abs(values))
        if values.dtype == tf.float64:  # which is scaled to 1 first: squares overflow
            unit = tf.math.divide_no_nan(values, largest)
            limit = self.clip * largest * tf.sqrt(tf.reduce_mean(unit**2))
        else:
            squares = tf.square(tf.cast(values, tf.float64))
            limit = self._share(values.shape[0]) * tf.sqrt(tf.reduce_sum(squares))
        limit = tf.minimum(value_types.round_to(limit, values.dtype), largest)
        return tf.clip_by_value(values, -limit, limit)

    def _share(self, size: int) -> float:
        """Return what is kept, as a share of the norm; a number of float32."""
        return float(np.float32((self.clip or 0.0) / math.sqrt(size)))
