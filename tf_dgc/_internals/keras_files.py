"""What Keras saves and loads of one optimizer: methods that are replaced on it."""

from collections.abc import Callable

import keras

METHODS = ("save_own_variables", "load_own_variables")


def leave_out_of_files(optimizer: keras.optimizers.Optimizer) -> None:
    """Let Keras save nothing of this instance: its owner does."""
    for name in METHODS:
        setattr(optimizer, name, lambda store: None)


def load_only_if(
    optimizer: keras.optimizers.Optimizer, wanted: Callable[[], bool]
) -> None:
    """Let Keras load the state of this instance only where its owner's was loaded."""
    load = optimizer.load_own_variables
    optimizer.load_own_variables = lambda store: load(store) if wanted() else None
