"""Deep Gradient Compression for Keras 3 on TensorFlow.

>>> optimizer = tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))

Importing this package patches nothing, initializes no device and changes no setting of
TensorFlow or Keras.
"""

import importlib
import os
import sys
from typing import Any

__all__ = [
    "Advice",
    "CompressedCrossDeviceOps",
    "CompressedOptimizer",
    "CompressionStats",
    "Corrections",
    "DGCOptimizer",
    "DelayedNesterov",
    "Diagnostics",
    "LocalOptimizer",
    "NovoGrad",
    "ServerOptimizer",
    "StalenessCorrection",
    "advise",
    "average_statistics",
    "callbacks",
    "cluster",
    "collectives",
    "compressors",
    "dgc_for_steps",
    "diloco",
    "local_sgd",
    "multi_worker_strategy",
    "post_local_sgd",
    "prepare",
    "saving",
    "schedules",
    "sparse_loco",
]


def _is_command_line() -> bool:
    """Whether this process is `tf-dgc` or `python -m tf_dgc`."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # while Python looks for the module
        return sys.orig_argv[-len(sys.argv)] in ("tf_dgc", "-mtf_dgc")
    return os.path.basename(program) == "tf-dgc"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("tf_dgc._versions").tf_dgc_version()
    if name in __all__:
        return getattr(importlib.import_module("tf_dgc._everything"), name)
    raise AttributeError(f"module 'tf_dgc' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]


# Importing the package registers its classes with Keras, for loading models. The
# command line answers before TensorFlow is loaded, and loads these names on first use.
if not _is_command_line():
    from tf_dgc._everything import (
        Advice,
        CompressedCrossDeviceOps,
        CompressedOptimizer,
        CompressionStats,
        Corrections,
        DelayedNesterov,
        DGCOptimizer,
        Diagnostics,
        LocalOptimizer,
        NovoGrad,
        ServerOptimizer,
        StalenessCorrection,
        advise,
        average_statistics,
        callbacks,
        cluster,
        collectives,
        compressors,
        dgc_for_steps,
        diloco,
        local_sgd,
        multi_worker_strategy,
        post_local_sgd,
        prepare,
        saving,
        schedules,
        sparse_loco,
    )
