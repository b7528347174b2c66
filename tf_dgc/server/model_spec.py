"""What workers hand to the server as they join: what it is to be, as text.

So the server needs no script of its own. All workers must hand over the same.
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
from tf_dgc.optimizers import state

ModelSpec = dict[str, Any]
"""JSON; `collect` says what is in it."""


def create_model_spec(
    settings: dict[str, Any],
    num_workers: int,
    rule: keras.optimizers.Optimizer,
    compressor: Any,
    variables: Sequence[keras.Variable],
    uncompressed: Sequence[bool],
    tabular: Sequence[bool],
    shard: tuple[int, int] = (0, 1),
    run: int = 0,
) -> ModelSpec:
    """Return what the server is to be.

    Args:
        settings: settings of the optimizer that concern the server.
        num_workers: number of workers, N.
        rule: inner optimizer, without what workers apply in its place.
        compressor: method of what is pushed.
        variables: variables of the model that this server is to keep.
        uncompressed: whether each is sent whole.
        tabular: whether rows of each are sent.
        shard: index of this server, and number of servers.
        run: number of the run, from 0.
    """
    serialize = keras.saving.serialize_keras_object
    excluded = [
        bool(rule.weight_decay)
        and not keras_optimizers.uses_weight_decay(rule, v.value)
        for v in variables
    ]
    return state.without_identities(
        {
            "version": tf_dgc_version(),
            "settings": settings,
            "num_workers": num_workers,
            "shard": list(shard),
            "run": run,
            "optimizer": serialize(rule),
            "compressor": serialize(compressor),
            "variables": [
                {
                    "shape": list(v.shape),
                    "dtype": v.dtype,
                    "exempt": bool(e),
                    "table": bool(t),
                    "decays": not x,
                    "name": v.path,
                }
                for v, e, t, x in zip(
                    variables, uncompressed, tabular, excluded, strict=True
                )
            ],
        }
    )


def model_spec_text(handed: ModelSpec) -> str:
    """Return it as text.

    Raises:
        ValueError: if there is something in it that only this process has.
    """
    try:
        return json.dumps(handed, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "The inner optimizer and the compressor run on the server, which is given "
            "their configs, and one of these cannot be written as JSON: "
            f"{error}. Pass numbers and Keras's own schedules. Received: {show(handed)}"
        ) from error


def parse_model_spec(config: dict[str, Any]) -> Any:
    """Return what Keras makes of a config, nothing of which is code.

    Of a copy, as Keras puts schedules where their configs were.
    """
    given = copy.deepcopy(config)
    found = keras.saving.deserialize_keras_object(given, safe_mode=True)
    if isinstance(found, keras.optimizers.Optimizer):
        keras_optimizers.replace_all_reduce(found, list)
    return found


def create_variables(handed: ModelSpec) -> list[keras.Variable]:
    """Return new variables of a server, zero."""
    return [
        keras.Variable(
            initializer="zeros",
            shape=v["shape"],
            dtype=v["dtype"],
            name=v["name"].replace("/", "_"),
        )
        for v in handed["variables"]
    ]


def model_words(handed: ModelSpec) -> int:
    """Return the words of all variables that a server is to keep."""
    return sum(
        bits.num_words_of(tf.as_dtype(v["dtype"]), math.prod(v["shape"]))
        for v in handed["variables"]
    )


def learning_rate_of(handed: ModelSpec) -> float | None:
    """Return the learning rate that a worker begins with, None for a schedule."""
    rate = handed["optimizer"]["config"].get("learning_rate")
    return float(rate) if isinstance(rate, int | float) else None


def spec_difference(one: ModelSpec, other: ModelSpec, rates: bool = True) -> str | None:
    """Return in what two differ, as errors say it; None if they are the same.

    Names are not compared: Keras numbers them anew in each process.

    Args:
        one: description of one worker.
        other: description of another one.
        rates: whether learning rates that are numbers are compared.
    """
    one, other = _unnamed(one), _unnamed(other)
    both = [one["optimizer"]["config"], other["optimizer"]["config"]]
    numbers = [isinstance(c.get("learning_rate"), int | float) for c in both]
    if not rates and all(numbers):
        both[0].pop("learning_rate"), both[1].pop("learning_rate")
    found = _differences(one, other, "")
    return "; ".join(found[:3]) or None


def _unnamed(handed: ModelSpec) -> ModelSpec:
    rule = dict(handed["optimizer"])
    rule["config"] = {k: v for k, v in rule["config"].items() if k != "name"}
    variables = [{**v, "name": ""} for v in handed["variables"]]
    return {**handed, "optimizer": rule, "variables": variables}


def _differences(one: Any, other: Any, where: str) -> list[str]:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, list) and isinstance(other, list):
        return [f"{where} has {len(other)} entries, not {len(one)}"]
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [] if one == other else [f"{where} is {other!r}, not {one!r}"]
    return [
        text
        for key in dict.fromkeys([*one, *other])
        for text in _differences(one.get(key), other.get(key), f"{where} {key}".strip())
    ]
