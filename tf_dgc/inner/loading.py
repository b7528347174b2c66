"""Loading: whether what was saved is an optimizer's state, and all of it."""

import warnings
import zlib
from typing import Any

import numpy as np

_MARK = "tf_dgc"  # a key beside those of the variables, "0", "1", ...
_OF_GRADIENTS, _OF_UPDATES = 1, 2  # what it says of the units of what waits


def mark(store: Any, weighs: bool) -> None:
    """Say in a store of Keras's that an optimizer of this package filled it.

    Args:
        store: store of what is saved.
        weighs: whether what waits has the learning rate in it.
    """
    store[_MARK] = np.int64(units(weighs))


def units(weighs: bool) -> int:
    """Return the number that stands for the units of what waits."""
    return _OF_UPDATES if weighs else _OF_GRADIENTS


def is_marked(store: Any) -> bool:
    """Whether an optimizer of this package filled a store."""
    return _MARK in set(store.keys())


def saved_units(store: Any) -> int:
    """Return the number of `units` that a store of this package's was marked by."""
    return int(read(store, _MARK))


def check_units(saved: int, weighs: bool) -> None:
    """Raise `ValueError` if what waited is saved in other units than it is kept.

    Args:
        saved: number of `units` of what was saved.
        weighs: whether what waits has the learning rate in it.
    """
    if saved != units(weighs):
        was, now = (
            "updates" if number == _OF_UPDATES else "gradients"
            for number in (saved, units(weighs))
        )
        raise ValueError(
            f"What waits was saved in units of {was}, and this optimizer keeps it in "
            f"units of {now}: one of them has the learning rate in it. Load with the "
            "settings it was saved with: `rate_correction`, or else compressor, "
            "sparsity and inner optimizer. Without the state: `load_model(path, "
            "compile=False)`, or `load_weights(path, skip_mismatch=True)`."
        )


def names(store: Any) -> list[str]:
    """Return the keys of what was saved of variables, sorted."""
    return sorted(set(store.keys()) - {_MARK})


def read(store: Any, name: str) -> np.ndarray:
    """Return a value that was saved, which older Keras leaves in the file."""
    return np.asarray(store[name])


def checksum(store: Any, name: str) -> int:
    """Return the CRC-32 of a value that was saved, of whatever dtype."""
    values = np.ascontiguousarray(read(store, name)).reshape(-1)
    return zlib.crc32(values.view(np.uint8).data)


def is_of_an_unbuilt_one(store: Any) -> bool:
    """Whether all that was saved are the iterations, of which there were none."""
    return names(store) == ["0"] and np.array_equal(read(store, "0"), 0)


def is_to_be_loaded(kind: str, built: bool, trains: bool, store: Any, own: int) -> bool:
    """Whether there is something to load; nothing that counts is left out silently.

    Args:
        kind: name of the optimizer's class.
        built: whether it is built.
        trains: whether it was given variables, if it was built at all.
        store: store of what was saved.
        own: number of the optimizer's variables.

    Raises:
        ValueError: if what this package saved would be lost, or is another state.
    """
    saved = len(names(store))
    if saved == own:
        return True
    if not is_marked(store) or not trains:
        if not is_of_an_unbuilt_one(store):
            why = (
                "the model has no trainable variables"
                if not trains
                else f"it is of an optimizer that is not of this package, and {kind} "
                "begins anew"
            )
            warnings.warn(
                f"What is saved of the optimizer's state is not loaded: {why}.",
                stacklevel=2,
            )
        return False
    if not built:
        raise ValueError(
            f"This {kind} is not yet built, so what is saved of its state would be "
            "lost. Before loading, `with strategy.scope(): "
            "model.optimizer.build(model.trainable_variables)`; or load without the "
            "state, by `load_weights(path, skip_mismatch=True)` or before `compile`."
        )
    raise ValueError(
        f"The saved {kind} has {saved} variables, this one has {own}. Load with the "
        "settings it was saved with: compressor, error feedback, sparsity above 0, "
        "momentum and Adam correction, what is tracked, the inner optimizer's "
        "momentum, and which layers were trainable when it was built decide which "
        "variables there are. Without the state: `load_model(path, compile=False)`, or "
        "`load_weights(path, skip_mismatch=True)`."
    )
