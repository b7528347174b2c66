"""AdaComp: entries that are large within their bin."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_number, check_whole
from tf_dgc.collectives.requests import Aggregation
from tf_dgc.compressors.base import NativeMethod, Sparsifier
from tf_dgc.compressors.common import capacity as slots
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class AdaComp(Sparsifier):
    """Sends the entries near the maximum of their bin, as signs of one magnitude.

    Chen et al., algorithm 2. With `G = residual + gradient`, the tensor is cut into
    bins of `bin_size` entries (L_T in the paper), and g_max is a bin's largest `|G|`.
    Entries with `|H| >= g_max` are sent, where `H = residual + scale * gradient`: an
    entry that this step's gradient confirms need only be near the maximum (soft
    threshold). So the number of entries follows local activity. Each is sent as
    `sign(G) * mean`, with the mean of all bins' g_max; the rest stays in the residual.

    The paper packs an entry into 8 bits (16 for bins above 64). Here an entry takes 1
    bit and a position of about `2 + log2(1 + bin_size / per_bin)` bits, with the
    defaults 6.4 in all for convolutions and 9.6 for others; the magnitude is a float32.
    The payload has `per_bin` slots per bin, counted over the whole tensor, and a fixed
    size. If more entries qualify, those that exceed their g_max by the largest factor
    are sent. The paper's compression ratios amount to about 5 entries per bin (40 with
    8 bits per entry in bins of 50; 200 with 16 bits in bins of 500).

    Args:
        bin_size: entries of a bin; None for the paper's 50 for convolutions (tensors
            of rank 3 and more) and 500 for others.
        scale: factor of the gradient in H, 1 or more; 2 in the paper, and 1 for no soft
            threshold.
        per_bin: average number of entries per bin that fit into a payload, above 0.
    """

    name = "adacomp"
    reference = "Chen et al., AdaComp, AAAI 2018"
    reads_residual = True

    def __init__(
        self,
        bin_size: int | None = None,
        scale: float = 2.0,
        per_bin: float = 5.0,
    ):
        if bin_size is not None:
            alternative = ", or None for the paper's"
            bin_size = check_whole("bin_size", bin_size, 1, " of entries", alternative)
        self.bin_size = bin_size
        reason = ": with less, entries that grow would be held back"
        self.scale = check_number("scale", scale, "[1, inf)", reason)
        self.per_bin = check_number(
            "per_bin", per_bin, "(0, inf)", ", the capacity of the payload"
        )

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of a position and a sign per slot, and of a magnitude."""
        del dtype
        return 4 * slots.num_words(math.prod(shape), self._capacity(shape), "sign")

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Compare with the bins' maxima, and gather."""
        shape = tuple(values.shape)
        gradient = tf.reshape(values - state["residual"], [-1])
        values = tf.reshape(values, [-1])
        soft = tf.abs(values + (self.scale - 1) * gradient)
        width = self._width(shape)
        largest = tf.reduce_max(quantize.rows(tf.abs(values), width), axis=1)
        limit = tf.repeat(largest, width)[: values.shape[0]]
        mask = (soft >= limit) & (values != 0)
        scores = tf.where(mask, soft, 0) / tf.where(mask, limit, 1)
        positions = slots.select(scores, mask, self._capacity(shape), keys)
        mean = tf.reduce_mean(tf.cast(largest, tf.float64))
        return (yield from slots.exchange_signs(values, positions, mean))

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        parameters = [
            *NativeMethod.in_halves(self._capacity(shape)),
            *NativeMethod.in_halves(self._width(shape)),
        ]
        return NativeMethod(self.name, [*parameters, self.scale - 1])

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "bin_size": self.bin_size,
            "scale": self.scale,
            "per_bin": self.per_bin,
        }

    def _width(self, shape: tuple[int, ...]) -> int:
        """Return the entries of a bin, at most those of the tensor."""
        width = self.bin_size or (50 if len(shape) > 2 else 500)
        return max(1, min(width, math.prod(shape)))

    def _capacity(self, shape: tuple[int, ...]) -> int:
        size = math.prod(shape)
        bins = math.ceil(size / self._width(shape))
        return min(size, max(1, math.ceil(self.per_bin * bins)))
