"""What many methods do: gather once, decode, sum. And pieces of exchanges."""

import abc
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.codecs import value_types
from tf_dgc.codecs.checks import require
from tf_dgc.collectives.requests import (
    Aggregation,
    AllGather,
    AllReduce,
    Request,
    Result,
)
from tf_dgc.compressors.base import Compressor, RandomKeys


class OneRound(Compressor):
    """A method whose payloads, of known size, are gathered once, decoded and summed.

    A subclass implements `words`, `encode` and `decode`.
    """

    @abc.abstractmethod
    def words(self, size: int, dtype: tf.DType) -> int:
        """Return the words of 32 bits that a tensor of `size` entries takes."""

    @abc.abstractmethod
    def encode(self, values: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
        """Return int32 `[words(n, dtype)]` for float `[n]`."""

    @abc.abstractmethod
    def decode(self, words: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
        """Return float `[size]` of one worker's words, int32 `[w]`."""

    def combine(self, gathered: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
        """Return float `[size]`, the sum of all workers' payloads, int32 `[N, w]`.

        Every bit of it is equal on all workers.
        """
        return sum_decoded(
            gathered, lambda words: self.decode(words, size, dtype), [size], dtype
        )

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return `4 * words(size, dtype)`."""
        return 4 * self.words(math.prod(shape), dtype)

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Encode, gather, and combine."""
        del state
        values = tf.reshape(values, [-1])
        size, dtype = values.shape[0], values.dtype
        words = self.encode(values, keys)
        gathered = yield AllGather(
            self._of_stated_length(words, self.words(size, dtype))
        )
        total = self.combine(gathered, size, dtype)
        return Result(total, self.decode(words, size, dtype))

    def _of_stated_length(self, words: tf.Tensor, stated: int) -> tf.Tensor:
        if words.shape.rank == 1 and words.shape[0] is None:
            return tf.ensure_shape(words, [stated], name=f"{self.name}_payload")
        if words.shape != (stated,) or words.dtype != tf.int32:
            raise ValueError(
                f"{self!r} returned a payload of another size than it states. "
                f"`words` says int32 [{stated}]; received from `encode`: "
                f"{words.dtype.name} {words.shape}"
            )
        return words


def sum_decoded(
    gathered: tf.Tensor,
    decode: Callable[[tf.Tensor], tf.Tensor],
    shape: Any,
    dtype: tf.DType,
) -> tf.Tensor:
    """Return the sum of what all workers' words decode to.

    Worker after worker, so every bit of it is equal on all workers; in a loop of the
    graph, which is traced once for any number of them.

    Args:
        gathered: words of all workers, int32 `[N, w]`.
        decode: function that makes a tensor of `shape` and `dtype` of int32 `[w]`.
        shape: shape of the sum.
        dtype: dtype of the sum.
    """
    return tf.foldl(
        lambda total, words: total + decode(words),
        gathered,
        tf.zeros(shape, dtype),
        parallel_iterations=1,
    )


def send_whole(values: tf.Tensor, aggregation: str) -> Aggregation:
    """Exchange a tensor exactly, in the same kind of collective as the others.

    Args:
        values: tensor to be sent, float32 or float64, of any shape.
        aggregation: kind of aggregation of the method that the other tensors are sent
            with; see `Compressor`.
    """
    if aggregation == "sum":
        total = yield AllReduce(values)
        return Result(total, values)
    gathered = yield AllGather(to_words(values))
    total = tf.zeros_like(values)
    for row in tf.unstack(gathered):
        total += from_words(row, values.dtype, values.shape)
    return Result(total, values)


def send_rounded(values: tf.Tensor, dtype: tf.DType) -> Aggregation:
    """Sum a tensor in a narrower type.

    Args:
        values: tensor to be sent, float32 or float64, of any shape.
        dtype: float dtype that is summed.
    """
    narrow = value_types.round_to(values, dtype)
    total = yield AllReduce(narrow)
    return Result(tf.cast(total, values.dtype), tf.cast(narrow, values.dtype))


def send_coded(values: tf.Tensor, value_dtype: str) -> Aggregation:
    """Gather all entries of a tensor, coded.

    Args:
        values: tensor to be sent, float32 or float64 `[n]`.
        value_dtype: type of the values on the wire, one of `value_types.CHOICES`.
    """
    size, dtype = values.shape[0], values.dtype
    words = value_types.encode_values(values, value_dtype)
    gathered = yield AllGather(words)
    found = value_types.decode_values(gathered, value_dtype, size, dtype)
    checks = value_types.value_checks(found, gathered, value_dtype, size)
    total = tf.zeros_like(values)
    for row in tf.unstack(require(checks, found)):
        total += row
    sent = value_types.decode_values(words[tf.newaxis], value_dtype, size, dtype)
    return Result(total, sent[0])


def from_words(words: tf.Tensor, dtype: tf.DType, shape: Any) -> tf.Tensor:
    """Return float32 or float64 numbers of `shape` from their bits, int32 `[w]`."""
    bits = tf.reshape(words, [-1, 2]) if dtype == tf.float64 else words
    return tf.reshape(tf.bitcast(bits, dtype), shape)


def to_words(values: tf.Tensor) -> tf.Tensor:
    """Return the bits, int32 `[w]`, of float32 or float64 numbers."""
    return tf.reshape(tf.bitcast(values, tf.int32), [-1])


def only_if(wanted: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
    """Return the words if they are wanted, else none of them.

    XLA, in which the number of words cannot depend on the step, gets all of them.
    """
    if tracing.in_xla_context():
        return words
    return words[: tf.where(wanted, tf.size(words), 0)]


def maximum(values: tf.Tensor) -> Generator[Request, tf.Tensor, tf.Tensor]:
    """Ask for the largest over workers, entry by entry.

    Use it as `largest = yield from maximum(values)`. It travels with the gathered words
    of other tensors, so it costs no collective of its own; for small tensors.

    Args:
        values: tensor of this worker, float32 or float64, of any shape.
    """
    gathered = yield AllGather(to_words(values))
    rows = [from_words(row, values.dtype, values.shape) for row in tf.unstack(gathered)]
    return tf.reduce_max(tf.stack(rows), axis=0)


# --- Methods of two rounds: what their native parts are told in between.

MethodStates: TypeAlias = Sequence[dict[str, Any]]
"""Variables of each tensor's state, by name."""


class RoundsResult(NamedTuple):
    """What is known at the end of a step, of all tensors that have two rounds.

    Attributes:
        told: result of `told_then`, float32 `[tensors, m]`; of `told_first` if the
            rounds are sums.
        notes: numbers of the first round for this worker alone, float32 `[tensors, m]`.
        norms: norm of each tensor's sum, if the method notes it, float32 `[tensors]`.
        sums: sum over workers of each tensor's numbers in the second round, float32
            `[m]`; none if words were gathered.
    """

    told: Any
    notes: tf.Tensor
    norms: tf.Tensor
    sums: Sequence[tf.Tensor]


class TwoRounds(Compressor):
    """A method whose second round depends on what all say in the first.

    Its `Native` has a `first`. What is told is of all tensors that have two rounds, one
    after the other: numbers that are computed by TensorFlow operations. Where rounds
    are sums, the second one is told the first one's.
    """

    def told_first(self, states: MethodStates) -> tf.Tensor | Sequence[tf.Tensor]:
        """Return what it is told in the first round.

        Returns:
            Float32 `[tensors, m]`, or `[m]` of each tensor with an m of its own.
        """
        return tf.zeros([len(states), 0])

    def told_then(
        self, everyone: tf.Tensor, notes: tf.Tensor, states: MethodStates
    ) -> tf.Tensor:
        """Return what it is told in the second round, float32 `[tensors, m]`.

        Args:
            everyone: words of all workers in the first round, int32
                `[tensors, num_workers, w]`.
            notes: numbers that the first round leaves for this worker alone, float32
                `[tensors, m]`.
            states: variables of each tensor's state, by name.
        """
        raise NotImplementedError(f"{self!r} does not say what its second round takes.")

    def settle(
        self, ended: RoundsResult, states: MethodStates
    ) -> list[dict[str, tf.Tensor]]:
        """Return new values of states that the native method does not update.

        Args:
            ended: numbers that are known by now.
            states: variables of each tensor's state, by name.
        """
        del ended
        return [{} for _ in states]
