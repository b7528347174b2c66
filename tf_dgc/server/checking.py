"""What workers hand over, checked before anything is made of it.

It may be anything: no class that is not for this is made, and nothing is allocated that
this machine has no memory for.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import psutil
import tensorflow as tf

from tf_dgc.server import handing, validation
from tf_dgc.server.handing import Handed
from tf_dgc.server.messages import MOST_WORDS, Kind, to_text

_MOST_TEXT = 2**22  # words: 16 MiB, of a hundred thousand variables
_MOST_TIMES = 8  # words that any method has for a word of the model, and more

MOST_RUNS = 2**31
"""Number of runs, at the most."""

_FORM = {
    "version": str,
    "settings": dict,
    "num_workers": int,
    "shard": list,
    "run": int,
    "optimizer": dict,
    "compressor": dict,
    "variables": list,
}
_FORM_OF_VARIABLE = {
    "shape": list,
    "dtype": str,
    "exempt": bool,
    "table": bool,
    "decays": bool,
    "name": str,
}
_MODULES = ("keras.optimizers", "keras.optimizers.schedules")
_NUMBERS = re.compile(r"bool|u?int\d+|b?float\d+")


def read(body: np.ndarray) -> Any:
    """Return what a worker hands over, of which nothing is known yet.

    Args:
        body: words of it, int32 `[w]`.

    Raises:
        ValueError: if it is no JSON.
    """
    try:
        return json.loads(to_text(body))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def most_words(kind: Kind, num_words: int) -> int:
    """Return how many words a request may have.

    Args:
        kind: kind of the request.
        num_words: number of words of all variables, 0 before they are known.
    """
    most = {
        Kind.JOIN: _MOST_TEXT,
        Kind.GIVE: num_words,
        Kind.PUSH: _MOST_TIMES * num_words + MOST_WORDS,
    }
    return most.get(kind, MOST_WORDS)


def check(handed: Handed) -> None:
    """Raise an error, of any class, unless a model can be made of a description."""
    _check_form(handed, _FORM)
    if not 0 <= handed["run"] < MOST_RUNS:
        raise ValueError(f"run {handed['run']} cannot be")
    for name in ("optimizer", "compressor"):
        _check_classes(handed[name])
    settings = handed["settings"]
    mode, staleness = settings["mode"], settings["staleness"]
    validation.check_mode(mode, staleness, settings["quorum"])
    strength = settings["correction_strength"]
    by = settings["correction"], strength, mode, staleness, settings["pull"]
    validation.check_correction(*by)
    _check_form(settings, {"error_feedback": bool, "seed": int})
    for variable in handed["variables"]:
        _check_form(variable, _FORM_OF_VARIABLE)
        if not all(isinstance(n, int) and n >= 0 for n in variable["shape"]):
            raise ValueError(f"shape {variable['shape']} cannot be")
        if not tf.as_dtype(variable["dtype"]).is_floating:
            raise ValueError(f"dtype {variable['dtype']} cannot be")
    size, memory = 4 * handing.num_words(handed), psutil.virtual_memory().total
    if size > memory:
        raise ValueError(
            f"its variables have {size:,} bytes, and the server's machine {memory:,}"
        )


def _check_form(found: Any, form: Mapping[str, type]) -> None:
    for name, kind in form.items():
        if not isinstance(found[name], kind):
            raise ValueError(f"{name} cannot be {found[name]!r:.100}")


def _check_classes(found: Any) -> None:
    """Raise `ValueError` if Keras would make an object of a class that is not known.

    Of a layer, for example, that takes as much memory as its config says.
    """
    left = [found]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            if "class_name" in one and not _is_known(one):
                names = one.get("module"), one["class_name"]
                raise ValueError(
                    "the server cannot make the optimizer or the compressor of their "
                    "configs; it knows those of Keras and of tf_dgc, and what its own "
                    f"process has registered with Keras. Received: {names!r:.100}"
                )
            left += one.values()
        elif isinstance(one, list):
            left += one


def _is_known(config: dict[str, Any]) -> bool:
    if config["class_name"] == "__numpy__":
        return bool(_NUMBERS.fullmatch(config["config"]["dtype"]))
    registered = config.get("registered_name")
    found = registered and keras.saving.get_registered_object(registered)
    return found is not None if registered else config.get("module") in _MODULES
