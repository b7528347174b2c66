"""Brain floating point on the wire, summed on the way."""

import keras
import tensorflow as tf

from tf_dgc.compressors.float16 import Float16


@keras.saving.register_keras_serializable(package="tf_dgc")
class BFloat16(Float16):
    """Rounds to bfloat16 and lets the all-reduce add in bfloat16: 2 bytes per entry.

    The range of float32 (Kalamkar et al., section 3), so nothing vanishes and no loss
    scale is needed, with 8 bits of precision where float16 has 11.
    """

    name = "bfloat16"
    reference = "Kalamkar et al., A study of BFLOAT16 for deep learning, 2019"
    rounding = 2.0**-8
    wire_dtype = tf.bfloat16
    native = Float16.native  # takes `wire_dtype` from here
