"""TernGrad: stochastic rounding to -s, 0 or s, with one scaler for all workers."""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.arguments import check_number
from tf_dgc.codecs import value_types
from tf_dgc.collectives.requests import Aggregation, AllGather, Result
from tf_dgc.compressors.base import NativeMethod, Quantizer
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.common.one_round import (
    MethodStates,
    TwoRounds,
    maximum,
    sum_decoded,
)
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class TernGrad(TwoRounds, Quantizer):
    """Sends `s sign(g) b`, with a random bit b and s the largest magnitude.

    Wen et al., equations 1 to 3: `P(b = 1) = |g| / s` and `s = max|g|` of each tensor
    (layer-wise ternarizing), so the expected value is g.

    1. Clip g to 2.5 of its standard deviations (gradient clipping), since one outlier
       would turn all other entries into noise.
    2. Find the largest s of all workers (scaler sharing, section 3.1), in a round of
       one number. The sum of all payloads is then s times an integer.
    3. Ternarize and gather. Values take 1.6 bits, packed 5 per byte.

    (For large networks the paper sends the last layer uncompressed.) The standard
    deviation is taken about 0, which makes no difference for the paper's gradients, and
    does not clip a constant gradient to nothing.

    The variance can be `(sqrt(n) - 1) / 2` times the square of the input and more, so
    error feedback would diverge.

    Args:
        clip: number of standard deviations to clip to, above 0; None for no clipping,
            which makes the method unbiased.
    """

    name = "tern_grad"
    reference = "Wen et al., TernGrad, NeurIPS 2017"
    error_feedback = "forbidden"

    def __init__(self, clip: float | None = 2.5):
        if clip is not None:
            meaning = ", of standard deviations, or None not to clip"
            clip = check_number("clip", clip, "(0, inf)", meaning)
        self.clip = clip
        self.unbiased = clip is None

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of the scaler and of the codes."""
        return dtype.size + 4 * quantize.num_trit_words(math.prod(shape))

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Clip, find the scaler, ternarize and sum."""
        del state
        values = self._clipped(tf.reshape(values, [-1]))
        size, dtype = values.shape[0], values.dtype
        scaler = yield from maximum(tf.reduce_max(tf.abs(values)))
        # The quotient is at most 1, so that the only levels are -1, 0 and 1.
        shares = tf.math.divide_no_nan(values, scaler)
        levels = quantize.stochastic_round(shares, keys.local())

        def decode(words: tf.Tensor) -> tf.Tensor:
            return tf.cast(quantize.unpack_trits(words, size) - 1, dtype)

        words = quantize.pack_trits(tf.cast(levels, tf.int32) + 1)
        gathered = yield AllGather(words)
        total = sum_decoded(gathered, decode, [size], dtype)
        return Result(scaler * total, scaler * levels)

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method; its first round finds the scaler."""
        share = self._share(math.prod(shape))
        first = f"{self.name}, scaler"
        return NativeMethod(self.name, [share], first=first, num_words=1, num_notes=1)

    def second_parameters(
        self, gathered: tf.Tensor, notes: tf.Tensor, states: MethodStates
    ) -> tf.Tensor:
        """Return this worker's scaler and the largest of all."""
        del states
        largest = tf.reduce_max(tf.bitcast(gathered, tf.float32), axis=1)
        return tf.concat([notes, largest], axis=1)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"clip": self.clip}

    def _clipped(self, values: tf.Tensor) -> tf.Tensor:
        if self.clip is None:
            return values
        largest = tf.reduce_max(tf.abs(values))
        if values.dtype == tf.float64:  # scaled to 1, so that squares do not overflow
            unit = tf.math.divide_no_nan(values, largest)
            limit = self.clip * largest * tf.sqrt(tf.reduce_mean(unit**2))
        else:
            squares = tf.square(tf.cast(values, tf.float64))
            limit = self._share(values.shape[0]) * tf.sqrt(tf.reduce_sum(squares))
        limit = tf.minimum(value_types.round_to(limit, values.dtype), largest)
        return tf.clip_by_value(values, -limit, limit)

    def _share(self, size: int) -> float:
        """Return the limit as a share of the norm, rounded to float32."""
        return float(np.float32((self.clip or 0.0) / math.sqrt(size)))
