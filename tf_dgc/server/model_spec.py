"""The model spec: what a worker tells the server about the model when it joins.

With it the server needs no script of its own. The specs of all workers must be equal.
"""

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import keras_optimizers
from tf_dgc._versions import tf_dgc_version
from tf_dgc.arguments import show
from tf_dgc.codecs import bits
from tf_dgc.compressors import Compressor
from tf_dgc.optimizers import state

ModelSpec = dict[str, Any]
"""The spec as JSON; `create_model_spec` defines its content."""


def create_model_spec(
    settings: dict[str, Any],
    num_workers: int,
    inner: keras.optimizers.Optimizer,
    compressor: Compressor,
    variables: Sequence[keras.Variable],
    uncompressed: Sequence[bool],
    is_table: Sequence[bool],
    shard: tuple[int, int] = (0, 1),
    run: int = 0,
) -> ModelSpec:
    """Return the model spec for one server."""
    serialize = keras.saving.serialize_keras_object
    return state.without_identities(
        {
            "version": tf_dgc_version(),
            "settings": settings,
            "num_workers": num_workers,
            "shard": list(shard),
            "run": run,
            "optimizer": serialize(inner),
            "compressor": serialize(compressor),
            "variables": [
                {
                    "shape": list(v.shape),
                    "dtype": v.dtype,
                    "exempt": bool(exempt),
                    "table": bool(table),
                    "decays": not inner.weight_decay
                    or keras_optimizers.uses_weight_decay(inner, v.value),
                    "name": v.path,
                }
                for v, exempt, table in zip(
                    variables, uncompressed, is_table, strict=True
                )
            ],
        }
    )


def model_spec_text(spec: ModelSpec) -> str:
    """Return a model spec as JSON text."""
    try:
        return json.dumps(spec, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "The server creates the inner optimizer and the compressor from their "
            f"configs, and one of these cannot be written as JSON: {error}. Pass "
            f"numbers and Keras's own schedules. Received: {show(spec)}"
        ) from error


def create_from_config(config: dict[str, Any]) -> Any:
    """Return the optimizer or compressor of a config, without executing code in it."""
    # Keras replaces the configs of schedules in place, hence the copy.
    created = keras.saving.deserialize_keras_object(
        copy.deepcopy(config), safe_mode=True
    )
    if isinstance(created, keras.optimizers.Optimizer):
        keras_optimizers.replace_all_reduce(created, list)
    return created


def create_variables(spec: ModelSpec) -> list[keras.Variable]:
    """Return the server's variables, zero."""
    return [
        keras.Variable(
            initializer="zeros",
            shape=v["shape"],
            dtype=v["dtype"],
            name=v["name"].replace("/", "_"),
        )
        for v in spec["variables"]
    ]


def model_words(spec: ModelSpec) -> int:
    """Return the total number of words of the server's variables."""
    return sum(
        bits.num_words_of(tf.as_dtype(v["dtype"]), math.prod(v["shape"]))
        for v in spec["variables"]
    )


def learning_rate_of(spec: ModelSpec) -> float | None:
    """Return the worker's initial learning rate, None for a schedule."""
    rate = spec["optimizer"]["config"].get("learning_rate")
    return float(rate) if isinstance(rate, int | float) else None


def spec_difference(
    expected: ModelSpec, actual: ModelSpec, compare_learning_rates: bool = True
) -> str | None:
    """Return the differences between two model specs except names; None if equal."""
    expected, actual = _without_names(expected), _without_names(actual)
    configs = [expected["optimizer"]["config"], actual["optimizer"]["config"]]
    if not compare_learning_rates and all(
        isinstance(config.get("learning_rate"), int | float) for config in configs
    ):
        for config in configs:
            del config["learning_rate"]
    differences = _differences(expected, actual, "")
    return "; ".join(differences[:3]) or None


def _without_names(spec: ModelSpec) -> ModelSpec:
    optimizer = dict(spec["optimizer"])
    optimizer["config"] = {k: v for k, v in optimizer["config"].items() if k != "name"}
    variables = [{**v, "name": ""} for v in spec["variables"]]
    return {**spec, "optimizer": optimizer, "variables": variables}


def _differences(expected: Any, actual: Any, path: str) -> list[str]:
    if isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            return [f"{path} has {len(actual)} entries, not {len(expected)}"]
        expected, actual = dict(enumerate(expected)), dict(enumerate(actual))
    if not isinstance(expected, dict) or not isinstance(actual, dict):
        return [] if expected == actual else [f"{path} is {actual!r}, not {expected!r}"]
    return [
        text
        for key in dict.fromkeys([*expected, *actual])
        for text in _differences(
            expected.get(key), actual.get(key), f"{path} {key}".strip()
        )
    ]
