"""What a server begins with: weights of a worker, or its own checkpoint.

Of a checkpoint are weights and the optimizer's state. How they are trained from there,
and by how many workers, is said by the workers that come, as at every beginning.
"""

import pathlib
from typing import NamedTuple

import numpy as np

from tf_dgc.server import handing
from tf_dgc.server.handing import Handed
from tf_dgc.server.model import Model


def first_model(handed: Handed, words: np.ndarray) -> Model:
    """Return the model that a worker gives its first weights.

    Args:
        handed: description of what the server is to be.
        words: bits of all variables, int32 `[w]`.

    Raises:
        ValueError: if it cannot be; for another number of words before there is any.
    """
    number = handing.num_words(handed)
    if len(words) != number:
        raise ValueError(
            f"The first weights must be {number} words, as the variables that were "
            f"handed over are. Received: {len(words)} words"
        )
    try:
        model = Model(handed)
        model.load(words)
    except Exception as error:  # Keras raises any, and TensorFlow where it is too large
        raise ValueError(
            "The server cannot make the optimizer or the compressor of their configs; "
            f"it knows those of Keras and of tf_dgc. It says: {error}"
        ) from error
    return model


class Restored(NamedTuple):
    """What a checkpoint has.

    Attributes:
        path: path of its file.
        handed: description of what the server was.
        words: bits of all variables, of the optimizer too, int32 `[w]`.
        clock: number of updates that they have had.
        rate: learning rate.
    """

    path: pathlib.Path
    handed: Handed
    words: np.ndarray
    clock: int
    rate: float

    def difference(self, handed: Handed) -> str | None:
        """Return why workers cannot go on from it; None if they can.

        Args:
            handed: description of what the server is to be.
        """
        found = handing.difference(
            _of_state(self.handed), _of_state(handed), rates=False
        )
        if found is None:
            return None
        return (
            f"{found}, as in the checkpoint {self.path}. Train with what that is of; "
            "or remove it, to begin anew"
        )

    def model(self, handed: Handed) -> Model:
        """Return the model as it was, to be trained as workers say.

        Args:
            handed: description of what the server is to be.

        Raises:
            ValueError: if it cannot be.
        """
        try:
            model = Model(handed)
            model.restore(self.words, self.clock, self.rate)
        except Exception as error:  # as above
            raise ValueError(f"{self.path} does not go with it: {error}") from error
        rate = handing.rate_of(handed)
        if rate is not None and rate != model.rate:
            model.set_rate(rate)
        return model


def _of_state(handed: Handed) -> Handed:
    """Return what the words of a checkpoint are of."""
    kept = {name: handed[name] for name in ("version", "shard", "optimizer")}
    forms = [{"shape": v["shape"], "dtype": v["dtype"]} for v in handed["variables"]]
    return {**kept, "variables": forms}
