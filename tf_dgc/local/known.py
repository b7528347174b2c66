"""What neighbours know of each other's weights, where they compress: Choco-SGD."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc.codecs.tensor import Tensor
from tf_dgc.compressors import Compressor
from tf_dgc.distribute.worker_variables import PerWorkerVariable
from tf_dgc.exchanges import Gossip
from tf_dgc.local.neighbours import Neighbours, Pull
from tf_dgc.steps.memory import initial_value
from tf_dgc.steps.near import States

Values = list[tf.Tensor]


class Public(PerWorkerVariable):
    """What those who hear a worker know of one of its tensors.

    Another number of workers begins with the mean, in all phases.
    """

    def scatter(self, values: np.ndarray) -> None:
        """Restore what `gather` returned, of as many workers.

        Args:
            values: values of all workers, `[N, ..., n]`, N the number of workers then.
        """
        if len(values) != self._strategy.num_replicas_in_sync:
            mean = values.reshape(-1, values.shape[-1]).mean(axis=0)
            one = np.broadcast_to(mean, tuple(self.shape))
            values = np.stack([one] * self._strategy.num_replicas_in_sync)
        super().scatter(values)


class MethodState(PerWorkerVariable):
    """State of a method, of a worker and of those that it hears.

    Another number of workers begins with the first value.

    Args:
        shape: shape on one worker, `[phases, 1 + neighbours, ...]`.
        dtype: name of a dtype, float32 or float64.
        name: name of the variable, without slashes.
        first: value that all begin with, of any shape that can be broadcast.
    """

    def __init__(self, shape: Any, dtype: str, name: str, first: np.ndarray):
        self._begins = first
        super().__init__(shape, dtype, name)

    def first(self) -> tf.Tensor:
        """Return the value to begin with."""
        value = np.broadcast_to(self._begins, tuple(self.shape))
        return tf.constant(value, self.dtype)

    def scatter(self, values: np.ndarray) -> None:
        """Restore what `gather` returned, of as many workers.

        Args:
            values: values of all workers, `[N, ...]`, N the number of workers then.
        """
        if len(values) == self._strategy.num_replicas_in_sync:
            super().scatter(values)
        else:
            for copy in self._copies.local:
                copy.assign(self.first())


class Known:
    """Public copies of weights, which follow what is sent; in replica context.

    A graph with another neighbour in each phase has copies of each, as who hears
    nothing in a phase knows nothing of it.

    Args:
        gossip: graph of the workers.
        compressor: method of what is sent.
        tensors: descriptions of all tensors.
        num_workers: number of workers, N.

    Attributes:
        public: copy of each tensor that all have who hear this worker, `[n]`; of
            several phases `[phases, n]`.
        pull: sum over neighbours of their weight times the difference between their
            copies and this worker's, of each tensor; likewise.
        states: state of the method by name, of each tensor.
    """

    def __init__(
        self,
        gossip: Gossip,
        compressor: Compressor,
        tensors: Sequence[Tensor],
        num_workers: int,
    ):
        matrices = gossip.weights(num_workers)
        self._phases = len(matrices)
        phases = [self._phases] if self._phases > 1 else []
        self.public = [Public([*phases, t.size], *_named(t, "public")) for t in tensors]
        self.pull = [
            Pull([*phases, t.size], *_named(t, "pull"), gossip) for t in tensors
        ]
        hears = max(
            np.count_nonzero(row) - (row[i] > 0)
            for m in matrices
            for i, row in enumerate(m)
        )
        rows = [self._phases, 1 + int(hears)]
        self.states = [
            {}
            if t.exempt
            else {
                name: MethodState(
                    [*rows, *spec.shape], *_named(t, name), initial_value(spec, i)
                )
                for name, spec in compressor.state(t.shape).items()
            }
            for i, t in enumerate(tensors)
        ]

    def begin(self, weights: Values) -> None:
        """Let all copies be these, which all workers have, and states as at first."""
        self.agree(weights)
        for state in self.states:
            for variable in state.values():
                variable.assign(variable.first())

    def agree(self, mean: Values) -> None:
        """Let all copies be what all workers have."""
        for copy, pull, value in zip(self.public, self.pull, mean, strict=True):
            copy.assign(tf.broadcast_to(value, copy.shape))
            pull.assign(tf.zeros(pull.shape, pull.dtype))

    def read(self, number: tf.Tensor) -> Values:
        """Return the copies that count in a round, `[n]` of each tensor."""
        return [self._read(copy, number) for copy in self.public]

    def states_of(self, place: int, number: tf.Tensor) -> list[States]:
        """Return the method's state of each tensor.

        Args:
            place: place of whose it is: 0 for this worker, and 1 and so on for its
                neighbours.
            number: number of the round.
        """
        turn = number % self._phases
        return [
            {name: v.local()[turn, place] for name, v in state.items()}
            for state in self.states
        ]

    def follow(
        self,
        mine: Values,
        theirs: Sequence[Values],
        them: Neighbours,
        number: tf.Tensor,
    ) -> tuple[Values, Values]:
        """Let copies follow what was sent; return copies and pulls of this round.

        Args:
            mine: values that this worker sent of each tensor.
            theirs: values that each neighbour sent.
            them: neighbours of this round.
            number: number of the round.
        """
        public, pull = [], []
        for i, sent in enumerate(mine):
            public.append(self._read(self.public[i], number) + sent)
            differences = [values[i] - sent for values in theirs]
            drawn = self._read(self.pull[i], number)
            pull.append(drawn + weighted(them.shares, differences))
        self._write(self.public, public, number)
        self._write(self.pull, pull, number)
        return public, pull

    def store_states(self, everyone: Sequence[list[States]], number: tf.Tensor) -> None:
        """Store the states of this worker, and of its neighbours.

        Args:
            everyone: states of each of them, those of this worker first.
            number: number of the round.
        """
        turn = number % self._phases
        for i, state in enumerate(self.states):
            for name, variable in state.items():
                rows = tf.stack([states[i][name] for states in everyone])
                at = tf.stack([[turn, place] for place in range(len(everyone))])
                old = variable.local()
                variable.assign(tf.tensor_scatter_nd_update(old, at, rows))

    def _read(self, variable: PerWorkerVariable, number: tf.Tensor) -> tf.Tensor:
        value = variable.local()
        return value if self._phases == 1 else value[number % self._phases]

    def _write(
        self,
        variables: Sequence[PerWorkerVariable],
        values: Values,
        number: tf.Tensor,
    ) -> None:
        at = tf.reshape(number % self._phases, [1, 1])
        for variable, value in zip(variables, values, strict=True):
            if self._phases == 1:
                variable.assign(value)
            else:
                old, rows = variable.local(), value[tf.newaxis]
                variable.assign(tf.tensor_scatter_nd_update(old, at, rows))


def weighted(shares: Sequence[tf.Tensor], values: Values) -> tf.Tensor:
    """Return the sum of values by their shares.

    Args:
        shares: weight of each, scalar float64 tensors.
        values: values of one shape.
    """
    return tf.add_n(
        [tf.cast(s, v.dtype) * v for s, v in zip(shares, values, strict=True)]
    )


def _named(tensor: Tensor, name: str) -> tuple[str, str]:
    return tensor.dtype.name, f"{tensor.label.replace('/', '_')}_{name}"
