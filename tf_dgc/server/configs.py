"""Configs of a `ServerOptimizer`: its arguments, as Keras saves them."""

from typing import Any

import keras

SETTINGS = (
    "mode",
    "staleness",
    "compressor",
    "quorum",
    "correction",
    "correction_strength",
    "error_feedback",
    "momentum_correction",
    "factor_masking",
    "pull",
    "pull_sparsity",
    "rows",
    "min_compress_size",
    "seed",
)


def config_of(optimizer: Any) -> dict[str, Any]:
    """Return the arguments of a `ServerOptimizer`, with the current learning rate."""
    values = {name: getattr(optimizer, name) for name in SETTINGS}
    return {
        "name": optimizer.name,
        "inner": optimizer.inner_config(),
        **keras.saving.serialize_keras_object(values),
    }
