"""Base classes of methods with one and two rounds, and common steps of exchanges."""

import abc
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.codecs import value_types
from tf_dgc.codecs.bits import to_words
from tf_dgc.codecs.checks import require
from tf_dgc.collectives.requests import (
    Aggregation,
    AllGather,
    AllReduce,
    Result,
    TensorRequest,
)
from tf_dgc.compressors.base import Compressor
from tf_dgc.compressors.random_keys import RandomKeys


class OneRound(Compressor):
    """A method whose payloads are gathered once, decoded and summed.

    The size of a payload is known statically. A subclass implements `words`, `encode`
    and `decode`.
    """

    @abc.abstractmethod
    def words(self, size: int, dtype: tf.DType) -> int:
        """Return the 32-bit words of the payload of a tensor of `size` entries."""

    @abc.abstractmethod
    def encode(self, values: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
        """Return the payload, int32 `[words(n, dtype)]`, of float `[n]`."""

    @abc.abstractmethod
    def decode(self, words: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
        """Return float `[size]` of one worker's payload, int32 `[w]`."""

    def combine(self, gathered: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
        """Return the sum, float `[size]`, of all workers' payloads, int32 `[N, w]`.

        Every bit of it is the same on all workers.
        """
        return sum_decoded(
            gathered, lambda words: self.decode(words, size, dtype), [size], dtype
        )

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return `4 * words(size, dtype)`."""
        return 4 * self.words(math.prod(shape), dtype)

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Encode, gather and combine."""
        del state
        values = tf.reshape(values, [-1])
        size, dtype = values.shape[0], values.dtype
        words = self._check_length(self.encode(values, keys), self.words(size, dtype))
        gathered = yield AllGather(words)
        total = self.combine(gathered, size, dtype)
        return Result(total, self.decode(words, size, dtype))

    def _check_length(self, words: tf.Tensor, stated: int) -> tf.Tensor:
        if words.shape.rank == 1 and words.shape[0] is None:
            return tf.ensure_shape(words, [stated], name=f"{self.name}_payload")
        if words.shape != (stated,) or words.dtype != tf.int32:
            raise ValueError(
                f"{self!r} must return from `encode` a payload of the size that it "
                f"states: `words` says int32 [{stated}]. Received: {words.dtype.name} "
                f"{words.shape}"
            )
        return words


def sum_decoded(
    gathered: tf.Tensor,
    decode: Callable[[tf.Tensor], tf.Tensor],
    shape: Any,
    dtype: tf.DType,
) -> tf.Tensor:
    """Return the sum of all workers' decoded payloads, int32 `[N, w]`, in their order.

    Every bit of it is the same on all workers. The loop is part of the graph, and
    traced once for any number of workers.
    """
    return tf.foldl(
        lambda total, words: total + decode(words),
        gathered,
        tf.zeros(shape, dtype),
        parallel_iterations=1,
    )


def send_whole(values: tf.Tensor, aggregation: str) -> Aggregation:
    """Exchange a tensor exactly, with the collective that the other tensors use."""
    if aggregation == "sum":
        total = yield AllReduce(values)
        return Result(total, values)
    gathered = yield AllGather(to_words(values))
    total = tf.zeros_like(values)
    for row in tf.unstack(gathered):
        total += from_words(row, values.dtype, values.shape)
    return Result(total, values)


def send_rounded(values: tf.Tensor, dtype: tf.DType) -> Aggregation:
    """Sum a tensor, float32 or float64 of any shape, in a narrower float dtype."""
    narrow = value_types.round_to(values, dtype)
    total = yield AllReduce(narrow)
    return Result(tf.cast(total, values.dtype), tf.cast(narrow, values.dtype))


def send_coded(values: tf.Tensor, value_dtype: str) -> Aggregation:
    """Gather all entries of a tensor in a value type."""
    size, dtype = values.shape[0], values.dtype
    words = value_types.encode_values(values, value_dtype)
    gathered = yield AllGather(words)
    decoded = value_types.decode_values(gathered, value_dtype, size, dtype)
    checks = value_types.value_checks(decoded, gathered, value_dtype, size)
    total = tf.zeros_like(values)
    for row in tf.unstack(require(checks, decoded)):
        total += row
    sent = value_types.decode_values(words[tf.newaxis], value_dtype, size, dtype)
    return Result(total, sent[0])


def from_words(words: tf.Tensor, dtype: tf.DType, shape: Any) -> tf.Tensor:
    """Return float32 or float64 numbers of `shape` from their bits, int32 `[w]`."""
    bits = tf.reshape(words, [-1, 2]) if dtype == tf.float64 else words
    return tf.reshape(tf.bitcast(bits, dtype), shape)


def only_if(condition: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
    """Return the words if the condition holds, else none; within XLA always all."""
    if tracing.in_xla_context():
        return words
    return words[: tf.where(condition, tf.size(words), 0)]


def maximum(values: tf.Tensor) -> Generator[TensorRequest, tf.Tensor, tf.Tensor]:
    """Request the maximum over workers of each entry, for small tensors.

    Use it as `largest = yield from maximum(values)`. It shares a collective with the
    gathered words of other tensors.
    """
    gathered = yield AllGather(to_words(values))
    rows = [from_words(row, values.dtype, values.shape) for row in tf.unstack(gathered)]
    return tf.reduce_max(tf.stack(rows), axis=0)


MethodStates: TypeAlias = Sequence[dict[str, Any]]
"""Variables of each tensor's state, by name."""


class RoundsResult(NamedTuple):
    """Numbers known at the end of a step, of all tensors with two rounds.

    Attributes:
        parameters: result of `second_parameters`, float32 `[tensors, m]`; of
            `first_parameters` if the rounds are sums.
        notes: numbers that the first round left for this worker alone, float32
            `[tensors, m]`.
        norms: norm of each tensor's sum, if the method notes it, float32 `[tensors]`.
        sums: sum over workers of each tensor's numbers in the second round, float32
            `[m]`; empty if words were gathered.
    """

    parameters: Any
    notes: tf.Tensor
    norms: tf.Tensor
    sums: Sequence[tf.Tensor]


class TwoRounds(Compressor):
    """A method whose second round depends on all workers' results of the first.

    Its `NativeMethod` has a `first`. The methods below compute with TensorFlow
    operations, for all tensors with two rounds at once, the numbers that a round of
    the native method takes as parameters. If the rounds are sums, the second round
    takes the sum of the first instead.
    """

    def first_parameters(self, states: MethodStates) -> tf.Tensor | Sequence[tf.Tensor]:
        """Return the first round's parameters: `[tensors, m]`, or `[m]` per tensor."""
        return tf.zeros([len(states), 0])

    def second_parameters(
        self, gathered: tf.Tensor, notes: tf.Tensor, states: MethodStates
    ) -> tf.Tensor:
        """Return the parameters of the second round, float32 `[tensors, m]`.

        `gathered` is int32 `[tensors, num_workers, w]`; `notes` is what the first round
        leaves for this worker alone, float32 `[tensors, m]`.
        """
        raise NotImplementedError(f"{self!r} must implement `second_parameters`.")

    def updated_states(
        self, rounds: RoundsResult, states: MethodStates
    ) -> list[dict[str, tf.Tensor]]:
        """Return new values of states that the native method does not update."""
        del rounds
        return [{} for _ in states]
