"""What an optimizer knows of its variables before the first step."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.codecs import value_types
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.schedules import comparing


def describe(
    variable: keras.Variable,
    exempt: bool,
    keeps_residual: bool,
    num_workers: int,
    exempt_dtype: str | None = None,
) -> Tensor:
    """Return what is to be known of a variable.

    Args:
        variable: variable of the model.
        exempt: whether it is sent whole.
        keeps_residual: whether what is not sent is kept, so that a sum that would not
            fit into the variable can be spread over several steps.
        num_workers: number of workers, N.
        exempt_dtype: type of the values on the wire if it is exempt and what that loses
            is kept; None for that of the accumulators.
    """
    own = tf.as_dtype(variable.dtype)
    dtype = tf.float64 if own == tf.float64 else tf.float32
    coded = exempt_dtype if exempt and keeps_residual else None
    bound = value_types.largest_share(own, num_workers)
    if coded:  # it may be summed so
        bound = min(bound, value_types.largest_share(tf.bfloat16, num_workers))
    return Tensor(
        variable.path,
        tuple(variable.shape),
        dtype,
        exempt,
        exempt_dtype=coded,
        narrow=own if own.size < dtype.size else None,
        largest=bound if keeps_residual else math.inf,
    )


def is_small(variable: keras.Variable, min_compress_size: int) -> bool:
    """Whether compressing it would not pay: few entries, or a rank below 2."""
    size = variable.shape.num_elements()
    return len(variable.shape) < 2 or size < max(1, min_compress_size)


def agreement(
    optimizer: Any, variables: Sequence[keras.Variable], lane: int | None = None
) -> dict[str, Any]:
    """Return what must be equal on all workers, as nested dictionaries.

    Args:
        optimizer: optimizer, whose config must be, and its schedules.
        variables: variables of the model, in order.
        lane: number of its exchanges in the background, if it has any.
    """
    config = {**optimizer.describe_config(), "lane": lane, **_schedules(optimizer)}
    config = without_identities(config)
    for wrapped in (config["inner"], config.get("outer") or {"config": {}}):
        wrapped["config"].pop("name", None)  # a class may leave it out
    config.pop("name")
    shapes = {
        f"{i}": {"shape": str(tuple(v.shape)), "dtype": v.dtype}
        for i, v in enumerate(variables)
    }
    return {
        "version": {"tensorflow": tf.__version__, "keras": keras.__version__},
        "optimizer": config,
        "variable": shapes,
    }


def _schedules(optimizer: Any) -> dict[str, Any]:
    """Return what tells schedules apart: configs of functions are their names alone."""
    found = {
        "sparsity": getattr(optimizer.compressor, "sparsity", None),
        "period": getattr(optimizer, "period", None),
    }
    asked = {name: schedule for name, schedule in found.items() if callable(schedule)}
    begins = {f"{name} at step 0": _first(given) for name, given in asked.items()}
    traced = {
        f"{name}, a checksum of its operations": comparing.fingerprint(given)
        for name, given in asked.items()
    }
    return {**begins, **traced}


def _first(schedule: Callable[[tf.Tensor], Any]) -> float:
    return tf.convert_to_tensor(schedule(tf.constant(0, tf.int64))).numpy().item()


def without_identities(config: Any) -> Any:
    """Leave out what Keras adds while it saves and loads: addresses in this process."""
    if isinstance(config, list | tuple):
        return [without_identities(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {
        key: without_identities(value)
        for key, value in config.items()
        if key != "shared_object_id"
    }
