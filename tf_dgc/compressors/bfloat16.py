"""bfloat16 on the wire, summed in bfloat16."""

import keras
import tensorflow as tf

from tf_dgc.compressors.float16 import Float16


@keras.saving.register_keras_serializable(package="tf_dgc")
class BFloat16(Float16):
    """Rounds to bfloat16 and sums in bfloat16: 2 bytes per entry.

    It has the range of float32 (Kalamkar et al., section 3), so that nothing underflows
    and no loss scale is needed, and 8 bits of precision where float16 has 11.
    """

    name = "bfloat16"
    reference = "Kalamkar et al., A study of BFLOAT16 for deep learning, 2019"
    unit_roundoff = 2.0**-8
    wire_dtype = tf.bfloat16
    native = Float16.native  # for this class's `wire_dtype`
