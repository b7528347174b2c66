"""Weights that are shown in place of those that a worker trains."""

import contextlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tf_dgc.distribute.copies import Copies


class Shown:
    """Lets variables of the model have other values for a while; outside of steps.

    Values change hands and are not copied, so that it takes no memory.

    Args:
        strategy: strategy of the variables.
        variables: variables of the model, of no aggregation.

    Attributes:
        hidden: values of the variables meanwhile, by the variable's id, one per local
            replica; empty if nothing is shown.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable]
    ):
        self._strategy, self._variables = strategy, variables
        self.hidden: dict[int, list[tf.Tensor]] = {}

    @contextlib.contextmanager
    def instead(self, values: Sequence[Sequence[tf.Tensor]]) -> Iterator[None]:
        """Show values until the end of the context, whatever ends it.

        Args:
            values: values of each variable, one per local replica.
        """
        copies = [Copies(self._strategy, v.value).local for v in self._variables]
        hidden = [[c.read_value() for c in replicas] for replicas in copies]
        names = map(id, self._variables)
        self.hidden = dict(zip(names, hidden, strict=True))
        try:
            _assign(copies, values)
            yield
        finally:
            _assign(copies, hidden)
            self.hidden = {}


def _assign(
    copies: Sequence[Sequence[tf.Variable]], values: Sequence[Sequence[tf.Tensor]]
) -> None:
    for replicas, given in zip(copies, values, strict=True):
        for copy, value in zip(replicas, given, strict=True):
            copy.assign(value)
