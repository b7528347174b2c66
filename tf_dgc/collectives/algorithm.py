"""What an exchange is: rounds in which all workers come to a sum, or to all words."""

import abc
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.collectives.requests import Broadcast, BufferLayout, Primitive, Remainder

AlgorithmSteps: TypeAlias = Generator[list[Primitive], list[tf.Tensor], tf.Tensor]
"""What one worker asks for, round after round; nothing in a round it sits out."""


class MergeResult(NamedTuple):
    """What `Exchange.merge` comes to.

    Attributes:
        words: buffer of the same form, int32 `[w]`, the same bits on all workers.
        delivered: whether each entry of this worker is in it, or in what is left with
            some worker: bool, tensor after tensor.
        left: sums that stay with this worker; None for exchanges without `keeps_sums`.
    """

    words: tf.Tensor
    delivered: tf.Tensor
    left: Remainder | None = None


MergeSteps: TypeAlias = Generator[list[Primitive], list[tf.Tensor], MergeResult]
"""What one worker asks for, of `Exchange.merge`."""


class Rank(NamedTuple):
    """Where a worker stands.

    Attributes:
        worker: index of it among all.
        num_workers: number of workers, N.
    """

    worker: int
    num_workers: int

    @property
    def bits(self) -> int:
        """Binary logarithm of the largest power of two that is not above N."""
        return self.num_workers.bit_length() - 1

    @property
    def helper(self) -> tuple[int, int] | None:
        """Who of those beyond that power is helped, and by whom; None for others."""
        core = 2**self.bits
        if self.worker >= core:
            return self.worker, self.worker - core
        if self.worker + core < self.num_workers:
            return self.worker + core, self.worker
        return None


class Cost(NamedTuple):
    """What an exchange costs the workers that have most to do.

    Attributes:
        rounds: number of rounds that one takes part in.
        sent: number of bytes that one sends.
        received: number of bytes that one receives.
        path: number of bytes that go one behind the other from the first round to the
            last, on links that carry as many both ways at once.
        launches: number of collectives that go one behind the other; None if they are
            the rounds.
        merged: number of bytes of entries that one merges.
    """

    rounds: int
    sent: float
    received: float
    path: float
    launches: int | None = None
    merged: float = 0.0

    @property
    def collectives(self) -> int:
        """Number of collectives that go one behind the other."""
        return self.rounds if self.launches is None else self.launches


class CollectiveAlgorithm(abc.ABC):
    """Along which ways what workers sum and gather travels.

    All workers have the same bits afterwards, for any number of them.

    Attributes:
        name: name by which `exchange=` finds it.
        reference: source, or why there is none.
        drops_entries: whether buffers of entries are merged on the way, by `merge`,
            which may leave some out.
        keeps_sums: whether what is left out of sums stays with the worker that formed
            them, and not with those that contributed.
        is_neighbor_exchange: whether it is for workers that exchange with neighbours
            alone.
        adds_up_first: whether there may be workers that add up their gradients before
            they compress, as `node_of` says.
    """

    name: str
    reference: str
    drops_entries = False
    keeps_sums = False
    adds_up_first = False
    is_neighbor_exchange = False

    @abc.abstractmethod
    def sum(self, values: tf.Tensor, place: Rank) -> AlgorithmSteps:
        """Sum a vector over all workers.

        Args:
            values: values of this worker, float or int32 `[n]`, n equal on all.
            place: place of this worker.

        Yields:
            What this worker asks for.

        Returns:
            The sum, `[n]`, the same bits on all workers.
        """

    @abc.abstractmethod
    def gather(self, words: tf.Tensor, place: Rank) -> AlgorithmSteps:
        """Gather the words of all workers.

        Args:
            words: words of this worker, int32 `[w]`, w equal on all.
            place: place of this worker.

        Yields:
            What this worker asks for.

        Returns:
            The words, `[num_workers, w]`, by worker.
        """

    def merge(self, words: tf.Tensor, form: BufferLayout, place: Rank) -> MergeSteps:
        """Merge the entries of all workers into a buffer of the same form.

        Args:
            words: buffer of this worker, int32 `[w]`.
            form: form of it, the same on all workers.
            place: place of this worker.

        Yields:
            What this worker asks for.

        Returns:
            The merged buffer, and what became of this worker's entries.
        """
        raise NotImplementedError

    def settle(self, hosts: Sequence[str]) -> "CollectiveAlgorithm":
        """Return the exchange for these workers, as soon as they are known.

        Args:
            hosts: host of each worker, by index.
        """
        del hosts
        return self

    def node_of(self, worker: int) -> tuple[int, ...]:
        """Return the workers that add up their gradients before they compress.

        Args:
            worker: index of one of them.
        """
        return (worker,)

    @abc.abstractmethod
    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return what it costs to sum vectors of so many bytes."""

    @abc.abstractmethod
    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return what it costs to gather words of so many bytes per worker."""

    def cost_of_merge(self, num_bytes: float, num_workers: int) -> Cost:
        """Return what it costs to merge entries, of exchanges that `drops_entries`."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CollectiveAlgorithm":
        """Build an exchange from `get_config`'s dictionary."""
        return cls(**config)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={show(v)}" for k, v in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


def first_dimension(values: tf.Tensor) -> int | tf.Tensor:
    """Return the length of the first axis: an int if it is known while tracing."""
    known = values.shape[0]
    return tf.shape(values)[0] if known is None else known


def send_to(values: tf.Tensor, source: int, target: int) -> Broadcast:
    """Return what both ask for; the reply of both is what the source has.

    Args:
        values: tensor of the source; of the target any of the same shape and dtype.
        source: index of the worker that sends.
        target: index of the one that receives.
    """
    low, high = sorted([source, target])
    return Broadcast(values, source, (low, high))


def zero_rows(rows: tf.Tensor, number: int) -> tf.Tensor:
    """Return zeros of so many rows, as who receives them hands over."""
    width = tf.shape(rows)[1] if rows.shape[1] is None else rows.shape[1]
    return tf.zeros([number, width], rows.dtype)


# --- Lockstep: the rounds of several workers in one process.

Outcome = TypeVar("Outcome")


def run_together(
    steps: Sequence[Generator[Any, Any, Outcome]],
    answer: Callable[[list[Any]], Sequence[Any]],
) -> list[Outcome]:
    """Run the rounds of several workers in lockstep; return their outcomes.

    Args:
        steps: rounds of each worker, as many of all.
        answer: function that returns the replies to what each asks for in a round.

    Raises:
        ValueError: if some ask for more rounds than others.
    """
    outcomes: list[Outcome] = []
    replies: Sequence[Any] = [None] * len(steps)
    while len(outcomes) < len(steps):
        asked = []
        for step, reply in zip(steps, replies, strict=True):
            try:
                asked.append(step.send(reply))
            except StopIteration as end:
                outcomes.append(end.value)
        if asked:
            if outcomes:
                raise ValueError("Some workers ask for more rounds than others.")
            replies = answer(asked)
    return outcomes
