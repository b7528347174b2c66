"""EF-signSGD: one bit per entry with a magnitude, and error feedback."""

import keras
import tensorflow as tf

from tf_dgc.codecs import bits, value_types
from tf_dgc.compressors.base import NativeMethod, Quantizer
from tf_dgc.compressors.common.one_round import OneRound
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class EFSignSGD(OneRound, Quantizer):
    """Sends signs, and the mean magnitude of the tensor: 1 bit per entry.

    Karimireddy et al., algorithm 1: `delta = (|p|_1 / d) sign(p)`, where p is the
    gradient times the learning rate plus the residual, and `e = p - delta` is the new
    residual. Without error feedback it need not converge (section 3).

    One bit cannot represent 0: a zero is sent as the magnitude, and the residual
    compensates for it in later steps. So weights without a gradient fluctuate around
    their values.
    """

    name = "ef_sign_sgd"
    reference = "Karimireddy et al., Error feedback fixes SignSGD, ICML 2019"
    error_feedback = "required"

    def words(self, size: int, dtype: tf.DType) -> int:
        """Return the words of a float32 magnitude and of the signs."""
        del dtype
        return 1 + bits.num_stream_words(size)

    def encode(self, values: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
        """Return the mean magnitude, and a bit per entry, 1 for negative."""
        del keys
        return value_types.encode_values(values, "sign")

    def decode(self, words: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
        """Return the magnitude with the entries' signs."""
        return value_types.decode_values(words[tf.newaxis], "sign", size, dtype)[0]

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        del shape
        return NativeMethod(self.name)

    def error_bound(self, size: int) -> float:
        """Return `1 - 1/n`, the worst case of `1 - |v|_1^2 / (n |v|^2)` (lemma 8)."""
        return 1 - 1 / size
