"""Everything that `import tf_dgc` exports. Checks versions, registers classes."""

# ruff: noqa: E402, F401

import os
import sys

from tf_dgc import _versions

# Before Keras is imported, which fails if another backend is set but not installed.
if "keras" not in sys.modules:
    _versions.check_backend(os.environ.get("KERAS_BACKEND"))

import keras
import tensorflow as tf

_versions.check_backend(keras.config.backend())
_versions.check_supported(
    {
        "python": _versions.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }
)

from tf_dgc import callbacks, cluster, collectives, compressors, saving, schedules
from tf_dgc.advice.advise import Advice, advise
from tf_dgc.collectives.cross_device import CompressedCrossDeviceOps
from tf_dgc.local.optimizer import LocalOptimizer
from tf_dgc.local.presets import (
    diloco,
    local_sgd,
    post_local_sgd,
    sparse_loco,
)
from tf_dgc.metrics import CompressionStats
from tf_dgc.multiworker.layer_statistics import average_statistics
from tf_dgc.multiworker.strategy import multi_worker_strategy, prepare
from tf_dgc.optimizers.compressed import CompressedOptimizer
from tf_dgc.optimizers.corrections import Corrections
from tf_dgc.optimizers.dgc import DGCOptimizer, dgc_for_steps
from tf_dgc.optimizers.diagnostics import Diagnostics
from tf_dgc.optimizers.inner_optimizers import DelayedNesterov, NovoGrad
from tf_dgc.server.optimizer import ServerOptimizer
from tf_dgc.server.staleness_correction import StalenessCorrection
