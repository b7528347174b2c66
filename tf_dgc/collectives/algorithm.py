"""The interface of a collective algorithm, and what algorithms share."""

import abc
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.collectives.requests import Broadcast, BufferLayout, Primitive, Remainder

Outcome = TypeVar("Outcome")

AlgorithmSteps: TypeAlias = Generator[list[Primitive], list[tf.Tensor], tf.Tensor]
"""One worker's requests, round by round; an empty list in a round it sits out."""


class MergeResult(NamedTuple):
    """Result of `CollectiveAlgorithm.merge`.

    Attributes:
        words: merged buffer of the same layout, int32 `[w]`, the same bits on all
            workers.
        delivered: whether each entry of this worker is in `words` or in some worker's
            `remainder`, bool, by tensor and position.
        remainder: dropped sums that this worker keeps; None unless the algorithm
            `keeps_sums`.
    """

    words: tf.Tensor
    delivered: tf.Tensor
    remainder: Remainder | None = None


MergeSteps: TypeAlias = Generator[list[Primitive], list[tf.Tensor], MergeResult]
"""One worker's requests in `CollectiveAlgorithm.merge`."""


class Rank(NamedTuple):
    """Index of a worker among N.

    Attributes:
        worker: index of the worker.
        num_workers: number of workers, N.
    """

    worker: int
    num_workers: int

    @property
    def bits(self) -> int:
        """Binary logarithm of the largest power of two that does not exceed N."""
        return self.num_workers.bit_length() - 1

    @property
    def helper(self) -> tuple[int, int] | None:
        """The pair of a worker beyond that power of two and the worker that helps it.

        None if this worker is in no such pair.
        """
        core = 2**self.bits
        if self.worker >= core:
            return self.worker, self.worker - core
        if self.worker + core < self.num_workers:
            return self.worker + core, self.worker
        return None


class Cost(NamedTuple):
    """Cost of an algorithm for the busiest workers.

    Attributes:
        rounds: rounds in which such a worker takes part.
        sent: bytes that it sends.
        received: bytes that it receives.
        path: bytes that are transferred one after the other from the first round to the
            last, over full-duplex links.
        launches: collectives that run one after the other; None for one per round.
        merged: bytes of entries that it merges.
    """

    rounds: int
    sent: float
    received: float
    path: float
    launches: int | None = None
    merged: float = 0.0

    @property
    def collectives(self) -> int:
        """Number of collectives that run one after the other."""
        return self.rounds if self.launches is None else self.launches


class CollectiveAlgorithm(abc.ABC):
    """How the sum or the words of all workers travel between them.

    All workers end with the same bits, for any number of workers.

    Attributes:
        name: name for the argument `collective=` of optimizers.
        reference: source, or why there is none.
        drops_entries: whether `merge` merges the entries of sparse buffers on the way,
            and may drop some.
        keeps_sums: whether a dropped sum stays with the worker that formed it; else its
            terms return to the workers that contributed them.
        is_neighbor_exchange: whether workers exchange with neighbors only.
        sums_within_groups: whether groups of workers may sum their gradients before
            compressing; see `node_of`.
    """

    name: str
    reference: str
    drops_entries = False
    keeps_sums = False
    sums_within_groups = False
    is_neighbor_exchange = False

    @abc.abstractmethod
    def sum(self, values: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Sum a vector over all workers.

        Args:
            values: vector of this worker, float or int32 `[n]`, n the same on all
                workers.
            rank: rank of this worker.

        Yields:
            This worker's requests in a round.

        Returns:
            The sum, `[n]`, the same bits on all workers.
        """

    @abc.abstractmethod
    def gather(self, words: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Gather the words of all workers.

        Args:
            words: words of this worker, int32 `[w]`, w the same on all workers.
            rank: rank of this worker.

        Yields:
            This worker's requests in a round.

        Returns:
            The words, `[num_workers, w]`, by worker.
        """

    def merge(self, words: tf.Tensor, layout: BufferLayout, rank: Rank) -> MergeSteps:
        """Merge the sparse buffers of all workers into one of the same layout.

        Args:
            words: buffer of this worker, int32 `[w]`.
            layout: layout of the buffers, the same on all workers.
            rank: rank of this worker.

        Yields:
            This worker's requests in a round.

        Returns:
            The merged buffer, and which of this worker's entries were delivered.
        """
        raise NotImplementedError

    def resolve(self, hosts: Sequence[str]) -> "CollectiveAlgorithm":
        """Return the algorithm to use for these workers.

        Args:
            hosts: host of each worker, by index.
        """
        del hosts
        return self

    def node_of(self, worker: int) -> tuple[int, ...]:
        """Return the workers that sum their gradients with a worker's, ascending.

        They do so before compressing. The worker itself is one of them.
        """
        return (worker,)

    @abc.abstractmethod
    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost of summing vectors of `num_bytes` bytes."""

    @abc.abstractmethod
    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost of gathering `num_bytes` bytes per worker."""

    def cost_of_merge(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost of merging buffers of `num_bytes` bytes.

        Only algorithms with `drops_entries` implement it.
        """
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CollectiveAlgorithm":
        """Create an algorithm from `get_config`'s dictionary."""
        return cls(**config)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={show(v)}" for k, v in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


def first_dimension(values: tf.Tensor) -> int | tf.Tensor:
    """Return the length of the first axis, an int if it is known statically."""
    length = values.shape[0]
    return tf.shape(values)[0] if length is None else length


def send_to(values: tf.Tensor, source: int, target: int) -> Broadcast:
    """Return the request with which both workers send a tensor from source to target.

    The reply of both is the source's tensor.

    The target passes any tensor of the same shape and dtype.
    """
    low, high = sorted([source, target])
    return Broadcast(values, source, (low, high))


def zero_rows(rows: tf.Tensor, count: int) -> tf.Tensor:
    """Return `count` rows of zeros, which a receiver passes to `send_to`."""
    width = tf.shape(rows)[1] if rows.shape[1] is None else rows.shape[1]
    return tf.zeros([count, width], rows.dtype)


def sum_rows(rows: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the sum of some tensors, added in their order."""
    total = rows[0]
    for row in rows[1:]:
        total += row
    return total


def run_together(
    steps: Sequence[Generator[Any, Any, Outcome]],
    answer: Callable[[list[Any]], Sequence[Any]],
) -> list[Outcome]:
    """Run the generators of several workers in lockstep; return their results.

    `answer` returns the replies to one round of requests, by worker.

    Raises:
        ValueError: if some generators have more rounds than others.
    """
    outcomes: list[Outcome] = []
    replies: Sequence[Any] = [None] * len(steps)
    while len(outcomes) < len(steps):
        requests = []
        for step, reply in zip(steps, replies, strict=True):
            try:
                requests.append(step.send(reply))
            except StopIteration as end:
                outcomes.append(end.value)
        if requests:
            if outcomes:
                raise ValueError("Some workers request more rounds than others.")
            replies = answer(requests)
    return outcomes
