"""Loading: whether what was saved is an optimizer's state, and all of it."""

import itertools
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

_MARK = "tf_dgc"  # a key beside those of the variables, "0", "1", ...
_OF_GRADIENTS, _OF_UPDATES = 1, 2  # what it says of the units of what waits
_COMMON = 2  # variables that every optimizer may have: iterations and learning rate
_WITHOUT = (
    "Without the state: `load_model(path, compile=False)`, or `load_weights(path, "
    "skip_mismatch=True)`."
)


def describe(
    weighs: bool,
    turns: int,
    own: int,
    optimizers: Sequence[keras.optimizers.Optimizer],
) -> list[int]:
    """Return what is saved beside a state, so that none of another form is loaded.

    Args:
        weighs: whether what waits has the learning rate in it.
        turns: number of parts of the model that take turns.
        own: number of the optimizer's own variables; 0 if it is not built.
        optimizers: optimizers that Keras saves beside it.

    Returns:
        A number that stands for the units of what waits; the two others; and of each
        optimizer beside it the number of its variables, 0 if it is not built, and a
        CRC-32 of their shapes.
    """
    shapes = [[tuple(v.shape) for v in o.variables if o.built] for o in optimizers]
    forms = [(len(some), zlib.crc32(str(some).encode())) for some in shapes]
    units = _OF_UPDATES if weighs else _OF_GRADIENTS
    return [units, turns, own, *itertools.chain(*forms)]


def mark(store: Any, description: Sequence[int]) -> None:
    """Say in a store of Keras's that an optimizer of this package filled it.

    Args:
        store: store of what is saved.
        description: numbers that `describe` returned.
    """
    store[_MARK] = np.array(description, np.int64)


def is_marked(store: Any) -> bool:
    """Whether an optimizer of this package filled a store."""
    return _MARK in set(store.keys())


def saved_description(store: Any) -> list[int]:
    """Return the numbers that a store of this package's was marked by."""
    return list(map(int, read(store, _MARK)))


def check(saved: Sequence[int], own: Sequence[int], kind: str) -> None:
    """Raise `ValueError` if a state of this form would not be loaded, or not whole.

    Args:
        saved: numbers of `describe` that were saved.
        own: those of the optimizer that is to load it.
        kind: name of the optimizer's class.
    """
    if saved[0] != own[0]:
        names = {_OF_UPDATES: "updates", _OF_GRADIENTS: "gradients"}
        raise ValueError(
            f"What waits was saved in units of {names[saved[0]]}, and this optimizer "
            f"keeps it in units of {names[own[0]]}: one of them has the learning rate "
            "in it. Load with the settings it was saved with: `rate_correction`, or "
            f"else compressor, sparsity and inner optimizer. {_WITHOUT}"
        )
    if saved[1] != own[1]:
        raise ValueError(
            f"The saved {kind} has `parts={saved[1]}` of the model that take turns, "
            f"and this one has `parts={own[1]}`, so what is under way would be taken "
            "for that of another part. Load with the settings it was saved with. "
            f"{_WITHOUT}"
        )
    if saved[2] and own[2] and saved[2] != own[2]:
        raise ValueError(_of_others(kind, saved[2], own[2]))
    pairs = zip(_forms(saved), _forms(own), strict=True)
    for (was, its_shapes), (now, own_shapes) in pairs:
        other = was != now or its_shapes != own_shapes
        if was and now and other and max(was, now) > _COMMON:
            raise ValueError(
                f"The optimizer within the saved {kind} has {was} variables, and the "
                f"one within this has {now}{'' if was != now else ' of other shapes'}. "
                "Load with the settings it was saved with: its kind, `use_ema`, "
                "`momentum`, `amsgrad` and the like, and whether its learning rate is "
                f"a schedule, decide which variables there are. {_WITHOUT}"
            )


def _forms(description: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(description[3::2], description[4::2], strict=True))


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


def is_to_be_loaded(
    kind: str, built: bool, trains: bool, steps: int, store: Any, own: int
) -> bool:
    """Whether there is something to load; nothing that counts is left out silently.

    Args:
        kind: name of the optimizer's class.
        built: whether it is built.
        trains: whether it was given variables, if it was built at all.
        steps: number of steps that it has taken.
        store: store of what was saved.
        own: number of the optimizer's variables.

    Raises:
        ValueError: if what this package saved would be lost, or is another state.
    """
    if is_of_an_unbuilt_one(store):
        if steps:
            _warn_of("it was saved before any step, and this one's is kept")
        return False
    saved = len(names(store))
    if not is_marked(store):
        why = "it is of one that is not of this package" if saved else "there is none"
        _warn_of(f"{why}, and {kind} stays as it is")
        return False
    if not trains:
        _warn_of("the model has no trainable variables")
        return False
    if saved == own:
        return True
    if not built:
        raise ValueError(
            f"This {kind} is not yet built, so what is saved of its state would be "
            "lost. Before loading, `with strategy.scope(): "
            "model.optimizer.build(model.trainable_variables)`; or load without the "
            "state, by `load_weights(path, skip_mismatch=True)` or before `compile`."
        )
    raise ValueError(_of_others(kind, saved, own))


def _of_others(kind: str, saved: int, own: int) -> str:
    return (
        f"The saved {kind} has {saved} variables, this one has {own}. Load with the "
        "settings it was saved with: compressor, error feedback, sparsity above 0, "
        "momentum and Adam correction, what is tracked, the inner optimizer's "
        "`momentum` and `gradient_accumulation_steps`, and which layers were trainable "
        f"when it was built decide which variables there are. {_WITHOUT}"
    )


def _warn_of(why: str) -> None:
    warnings.warn(
        f"What is saved of the optimizer's state is not loaded: {why}.", stacklevel=4
    )
