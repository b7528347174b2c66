"""Deep Gradient Compression for Keras 3 on TensorFlow.

>>> optimizer = tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))

Importing has no effect on other programs' TensorFlow: nothing is patched, no device
is initialized, no setting is changed.
"""

import keras
import tensorflow as tf

from tf_dgc import _versions

_versions.check_supported(
    {
        "python": _versions.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }
)

from tf_dgc import callbacks, compressors, saving, schedules  # noqa: E402
from tf_dgc.dgc import DGCOptimizer  # noqa: E402
from tf_dgc.distribute import CompressedCrossDeviceOps, prepare  # noqa: E402
from tf_dgc.monitor import CompressionStats  # noqa: E402
from tf_dgc.novograd import NovoGrad  # noqa: E402
from tf_dgc.optimizer import CompressedOptimizer  # noqa: E402
from tf_dgc.startup import multi_worker_strategy  # noqa: E402

__version__ = _versions.tf_dgc_version()

__all__ = [
    "CompressedCrossDeviceOps",
    "CompressedOptimizer",
    "CompressionStats",
    "DGCOptimizer",
    "NovoGrad",
    "callbacks",
    "compressors",
    "multi_worker_strategy",
    "prepare",
    "saving",
    "schedules",
]
