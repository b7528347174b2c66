"""Two bits per entry: signs of the entries that reach a threshold, as in MXNet."""

from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_number
from tf_dgc.compressors.base import NativeMethod, Quantizer
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.common.one_round import OneRound
from tf_dgc.compressors.random_keys import RandomKeys

_ABOVE, _BELOW = 1, 2


@keras.saving.register_keras_serializable(package="tf_dgc")
class TwoBit(OneRound, Quantizer):
    """Sends `+t` for an entry that is t or more, `-t` for -t or less, else 0: 2 bits.

    The gradient compression of Apache MXNet's parameter server, after Strom, who sends
    the positions of such entries. The rest stays in the residual r,
    `r += g; q = t sign(r) [|r| >= t]; r -= q`: an entry much above t is sent over many
    steps, and error feedback is required. A payload has only codes, as every worker
    knows t. (Three values would fit into 1.6 bits, as with `TernGrad`; MXNet uses 2.)

    Choose t in units of one worker's gradients: divided by the number of workers, not
    multiplied by the learning rate.

    Args:
        threshold: magnitude t, above 0. The default is MXNet's.
    """

    name = "two_bit"
    reference = "Strom, as in Apache MXNet 1.0 (2017), Interspeech 2015"
    error_feedback = "required"
    homogeneity = None

    def __init__(self, threshold: float = 0.5):
        meaning = ", the magnitude at which entries are sent"
        self.threshold = check_number("threshold", threshold, "(0, inf)", meaning)

    def words(self, size: int, dtype: tf.DType) -> int:
        """Return the words of codes of 2 bits."""
        del dtype
        return quantize.num_words(size, 2)

    def encode(self, values: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
        """Return codes: 1 for t or more, 2 for -t or less, else 0."""
        del keys
        above = tf.cast(values >= self.threshold, tf.int32)
        below = tf.cast(values <= -self.threshold, tf.int32)
        return quantize.pack(_ABOVE * above + _BELOW * below, 2)

    def decode(self, words: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
        """Return t, -t or 0."""
        levels = tf.constant([0.0, self.threshold, -self.threshold, 0.0], dtype)
        return tf.gather(levels, quantize.unpack(words, 2, size))

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        del shape
        return NativeMethod(self.name, [self.threshold])

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"threshold": self.threshold}
