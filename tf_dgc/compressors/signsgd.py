"""signSGD: one bit per entry, and the majority decides."""

import keras
import tensorflow as tf

from tf_dgc.codecs import bitstream
from tf_dgc.compressors.base import Draw, Native
from tf_dgc.compressors.common.one_round import OneRound


@keras.saving.register_keras_serializable(package="tf_dgc")
class SignSGD(OneRound):
    """Every worker votes for a sign of every entry: 1 bit per entry.

    Bernstein et al., algorithm 3: workers send `sign(g)`, and the update is
    `sign(sum of signs)`. What the inner optimizer gets is -1, 0 (a draw) or 1, whatever
    the gradient's magnitude and the number of workers: choose its learning rate as for
    signSGD. An entry that is 0 votes by chance, and a tensor that is all zeros
    abstains, as weights would drift else. There is nothing that a residual could mean;
    for error feedback see `EFSignSGD`.
    """

    name = "sign_sgd"
    kind = "quantization"
    reference = "Bernstein et al., signSGD, ICML 2018"
    aggregation = "vote"
    additive = False
    sends_signs = True
    error_feedback = "forbidden"

    def words(self, size: int, dtype: tf.DType) -> int:
        """Return one word that says whether the worker votes, and its signs."""
        del dtype
        return 1 + bitstream.num_words(size)

    def encode(self, values: tf.Tensor, draw: Draw) -> tf.Tensor:
        """Return 1 (or 0, for no vote), and bits that are 1 for negative."""
        votes = tf.cast(tf.reduce_any(values != 0), tf.int32)[tf.newaxis]
        coins = tf.random.stateless_uniform(values.shape, draw.local()) < 0.5
        negative = tf.where(values == 0, coins, values < 0)
        bits = bitstream.pack(tf.cast(negative, tf.int32))
        return tf.concat([votes, bits], axis=0)

    def decode(self, words: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
        """Return one worker's votes: -1 or 1, or all 0."""
        negative = bitstream.unpack(words[tf.newaxis, 1:])[0, :size]
        return tf.cast(words[0], dtype) * (1 - 2 * tf.cast(negative, dtype))

    def native(self, shape: tuple[int, ...]) -> Native:
        """Return the native method."""
        del shape
        return Native(self.name)

    def combine(self, gathered: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
        """Return the sign of the sum of votes."""
        return tf.sign(super().combine(gathered, size, dtype))
