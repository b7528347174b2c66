"""The config of an optimizer: what Keras saves, and compares between workers."""

from collections.abc import Mapping
from typing import Any

import keras

from tf_dgc.exchanges import Gossip
from tf_dgc.inner.descriptions import Serialize
from tf_dgc.optimizers.exclusions import Exclusions

SETTINGS = (
    "compressor",
    "error_feedback",
    "momentum_correction",
    "factor_masking",
    "adam_correction",
    "rate_correction",
    "min_compress_size",
    "seed",
    "track_staleness",
    "check_every",
    "on_divergence",
    "exchange",
    "overlap",
)
LOCAL_SETTINGS = (
    "period",
    "compressor",
    "error_feedback",
    "min_compress_size",
    "seed",
    "check_every",
    "on_divergence",
    "exchange",
    "track_drift",
    "delay",
    "parts",
)
_EXCLUDED = "excluded_from_compression"  # not by the constructor


def collect(
    optimizer: Any, serialize: Serialize, exclusions: Exclusions
) -> dict[str, Any]:
    """Return the arguments that an optimizer was made with.

    Args:
        optimizer: `CompressedOptimizer`, whose attributes they are.
        serialize: function that turns an argument into JSON values.
        exclusions: variables that are sent whole.
    """
    return {
        "name": optimizer.name,
        "inner": optimizer.inner_config(serialize),
        **{name: serialize(getattr(optimizer, name)) for name in SETTINGS},
        _EXCLUDED: exclusions.get_config(),
    }


def collect_local(optimizer: Any, serialize: Serialize) -> dict[str, Any]:
    """Return the arguments that a `LocalOptimizer` was made with.

    Args:
        optimizer: optimizer, whose attributes they are.
        serialize: function that turns an argument into JSON values.
    """
    near = isinstance(optimizer.exchange, Gossip)
    return {
        "name": optimizer.name,
        "inner": optimizer.inner_config(serialize),
        "outer": None if near else serialize(optimizer.outer_optimizer),
        **{name: serialize(getattr(optimizer, name)) for name in LOCAL_SETTINGS},
    }


def take_apart(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Exclusions]:
    """Return the constructor's arguments of a config, and which variables it excludes.

    Args:
        config: dictionary of `collect`, perhaps from a file.
        custom_objects: classes by name, as Keras passes them.
    """
    config = dict(config)
    exclusions = Exclusions(**config.pop(_EXCLUDED, {}))
    arguments = {
        key: keras.saving.deserialize_keras_object(value, custom_objects)
        if isinstance(value, dict)
        else value
        for key, value in config.items()
    }
    return arguments, exclusions
