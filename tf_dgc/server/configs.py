"""Configs of a `ServerOptimizer`: its arguments, as Keras saves them."""

from typing import Any

from tf_dgc.inner.descriptions import Serialize

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


def config_of(optimizer: Any, serialize: Serialize) -> dict[str, Any]:
    """Return the arguments of a `ServerOptimizer`, with the current learning rate."""
    return {
        "name": optimizer.name,
        "inner": optimizer.inner_config(serialize),
        **{name: serialize(getattr(optimizer, name)) for name in SETTINGS},
    }
