"""The config of an optimizer: what Keras saves, and compares between workers."""

from collections.abc import Mapping
from typing import Any

import keras

from tf_dgc.exchanges import Gossip
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
    optimizer: keras.optimizers.Optimizer,
    inner: Mapping[str, Any],
    exclusions: Exclusions,
) -> dict[str, Any]:
    """Return the arguments that an optimizer was made with.

    Args:
        optimizer: `CompressedOptimizer`, whose attributes they are.
        inner: config of the inner optimizer.
        exclusions: variables that are sent whole.
    """
    values = {name: getattr(optimizer, name) for name in SETTINGS}
    return {
        "name": optimizer.name,
        "inner": inner,
        **keras.saving.serialize_keras_object(values),
        _EXCLUDED: exclusions.get_config(),
    }


def collect_local(optimizer: Any, inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a `LocalOptimizer` was made with.

    Args:
        optimizer: optimizer, whose attributes they are.
        inner: config of the inner optimizer.
    """
    values = {name: getattr(optimizer, name) for name in LOCAL_SETTINGS}
    outer = keras.saving.serialize_keras_object(optimizer.outer_optimizer)
    near = isinstance(optimizer.exchange, Gossip)
    return {
        "name": optimizer.name,
        "inner": inner,
        "outer": None if near else outer,
        **keras.saving.serialize_keras_object(values),
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
