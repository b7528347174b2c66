"""Several workers of one method in one process, without a strategy or an optimizer.

For tests, for comparing methods, and for those who write one. What travels is packed,
sealed and checked as it is between real workers.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tf_dgc.arguments import check_whole
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.algorithm import run_together
from tf_dgc.collectives.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    DenseOrSparseReply,
    Reply,
    Request,
    SendRecv,
    group_members,
    to_dense_tensor,
)
from tf_dgc.compressors import get
from tf_dgc.compressors.base import StateSpec
from tf_dgc.compressors.random_keys import RandomKeys, tie_break_key
from tf_dgc.optimizers import validation
from tf_dgc.steps import generic_step, state

# --- What the communicator does, for all workers of one process at once.

Outcome = TypeVar("Outcome")


class _Meeting(NamedTuple):
    """What several workers ask for together.

    Attributes:
        kind: type of the messages.
        group: group as they name it.
        source: worker that a broadcast comes from.
        turn: number of the same before it, in this round.
        members: workers that take part.
    """

    kind: type
    group: Any
    source: int | None
    turn: int
    members: tuple[int, ...]


def run_all(
    steps: Sequence[Generator[list[Request], list[Reply], Outcome]],
    record: list[list[Request]] | None = None,
) -> list[Outcome]:
    """Run the steps of all workers in lockstep; return their outcomes, by worker.

    Args:
        steps: step of each worker.
        record: lists, one per worker, to which all that it asks for is appended.

    Raises:
        ValueError: if some ask for more rounds than others, and as `answer_all`.
    """

    def answer(asked: list[list[Request]]) -> list[list[Reply]]:
        for messages, new in zip(record or [], asked, strict=False):
            messages.extend(new)
        return answer_all(asked)

    return run_together(steps, answer)


def answer_all(asked: Sequence[Sequence[Request]]) -> list[list[Reply]]:
    """Return the replies to what all workers ask for in a round, by worker.

    Args:
        asked: messages of each worker, in order; a worker may have none.

    Raises:
        ValueError: if not all workers of a group ask for the same, and as `members_of`.
    """
    meetings: dict[_Meeting, dict[int, tuple[int, Any]]] = {}
    for worker, messages in enumerate(asked):
        for place, message in enumerate(messages):
            meeting = _meeting(message, worker, asked)
            while worker in meetings.get(meeting, {}):
                meeting = meeting._replace(turn=meeting.turn + 1)
            meetings.setdefault(meeting, {})[worker] = place, message
    replies: list[list[Any]] = [[None] * len(messages) for messages in asked]
    for meeting, found in meetings.items():
        if set(found) != set(meeting.members):
            raise ValueError(_mismatch(meeting, sorted(found), asked))
        answers = _answer(meeting, [found[m][1] for m in meeting.members])
        for member, answer in zip(meeting.members, answers, strict=True):
            replies[member][found[member][0]] = answer
    return replies


def _meeting(message: Request, worker: int, asked: Sequence) -> _Meeting:
    members = group_members(message, worker, len(asked))
    group = None if isinstance(message, SendRecv) else message.group
    source = message.source if isinstance(message, Broadcast) else None
    return _Meeting(type(message), group, source, 0, members)


def _mismatch(meeting: _Meeting, found: list[int], asked: Sequence) -> str:
    if meeting.kind is SendRecv:
        return (
            "A swap must be asked for by both workers of a pair. Received: of workers "
            f"{meeting.members} only {found} ask for it"
        )
    others = [asked[m] for m in meeting.members if m not in found]
    return (
        "All workers of a group must ask for the same. Received: of workers "
        f"{meeting.members} only {found} ask for {meeting.kind.__name__} with "
        f"group={meeting.group}, and the others for {others!r}"
    )


def _answer(meeting: _Meeting, messages: Sequence[Any]) -> list[Reply]:
    """Return the reply to each member."""
    if meeting.kind is SendRecv:
        return [message.values for message in reversed(messages)]
    if meeting.kind is AllToAll:
        rows = [message.rows for message in messages]
        return [tf.stack(theirs) for theirs in zip(*map(tf.unstack, rows), strict=True)]
    return [_same_for_all(meeting, messages)] * len(messages)


def _same_for_all(meeting: _Meeting, messages: Sequence[Any]) -> Reply:
    first = messages[0]
    if isinstance(first, Broadcast):
        return messages[meeting.members.index(first.source)].values
    if isinstance(first, AllReduce):
        return _add([message.values for message in messages])
    if isinstance(first, AllGather):
        return tf.stack([message.words for message in messages])
    if first.dense:
        total = _add([message.vector for message in messages])
        return DenseOrSparseReply(total, tf.zeros([len(messages), 0], tf.int32))
    return DenseOrSparseReply(
        first.vector[:0], tf.stack([message.words for message in messages])
    )


def _add(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    total = vectors[0]
    for vector in vectors[1:]:
        total = total + vector
    return total


class Simulation:
    """Workers that exchange given gradients by one method.

    >>> simulation = Simulation("top_k", shapes=[(100, 100)], num_workers=4)
    >>> (total,) = simulation.step([[gradient] for gradient in gradients])

    Args:
        compressor: method, a `Compressor`, or its name.
        shapes: shapes of the tensors; none of them is exempt.
        num_workers: number of workers, N, 1 or more.
        dtype: name of the gradients' dtype, float32 or float64.
        error_feedback: whether what is not sent is kept, as in `CompressedOptimizer`.
        seed: seed of all random choices.
        compiled: whether to make a graph of a step: slow at first, then several times
            as fast.

    Attributes:
        residual: NumPy arrays of what was not sent, by worker and tensor; zeros without
            error feedback.
        sent: NumPy arrays of what was contributed in the last step, by worker and
            tensor.
        state: values of the method's own state by name, by worker and tensor.
        common: values of its state that is of all tensors by name, by worker.
        sent_bytes: number of bytes that one worker handed to the collectives in the
            last step.
        messages: requests of the last step, by worker; none if steps are compiled.
    """

    def __init__(
        self,
        compressor: Any,
        shapes: Sequence[tuple[int, ...]],
        num_workers: int,
        dtype: str = "float32",
        error_feedback: bool | None = None,
        seed: int = 0,
        compiled: bool = False,
    ):
        self.compressor = get(compressor)
        self.num_workers = check_whole("num_workers", num_workers)
        self.seed = seed
        self.iteration = 0
        self.sent_bytes = 0
        self.messages: list[list[Request]] = []
        self.sent: list[list[np.ndarray]] = []
        self._run = tf.function(self._exchange) if compiled else self._exchange
        self._keeps_residual = validation.uses_error_feedback(
            self.compressor, error_feedback
        )
        kind = tf.as_dtype(dtype)
        self._tensors = [
            TensorSpec(f"tensor {i}", tuple(s), kind, False)
            for i, s in enumerate(shapes)
        ]
        workers = range(self.num_workers)
        self.residual = [[np.zeros(s, dtype) for s in shapes] for _ in workers]
        self.state = [
            [
                _initial(self.compressor.state(t.shape), t.dtype, i)
                for i, t in enumerate(self._tensors)
            ]
            for _ in workers
        ]
        self.common = [
            _initial(self.compressor.common_state(), kind, 0) for _ in workers
        ]

    def step(self, gradients: Sequence[Sequence[Any]]) -> list[np.ndarray]:
        """Exchange `gradients[worker][tensor]`; return the sum over workers of each.

        Raises:
            AssertionError: if workers end with different sums.
        """
        decay = self.compressor.feedback_decay
        corrected = [
            [
                decay * r + np.asarray(g, r.dtype)
                for g, r in zip(grads, residual, strict=True)
            ]
            for grads, residual in zip(gradients, self.residual, strict=True)
        ]
        step = tf.constant(self.iteration, tf.int64)
        sums, sent, states, common, sent_bytes = self._run(
            corrected, self.state, self.common, self.residual, step
        )
        self.sent = [self._shaped(worker) for worker in sent]
        if self._keeps_residual:
            self.residual = [
                [c - s for c, s in zip(have, gone, strict=True)]
                for have, gone in zip(corrected, self.sent, strict=True)
            ]
        self.state, self.common = tf.nest.map_structure(
            lambda value: value.numpy(), (states, common)
        )
        self.sent_bytes = int(sent_bytes)
        self.iteration += 1
        first, *others = map(self._shaped, sums)
        for other in others:
            for a, b in zip(first, other, strict=True):
                np.testing.assert_array_equal(a, b, "workers have different sums")
        return first

    def _exchange(
        self, values: list, states: list, common: list, residual: list, step: tf.Tensor
    ) -> tuple:
        """Return sums, what was sent, new states and `common`, and bytes sent."""
        merged = []
        ties = tie_break_key(self.seed, step, len(self._tensors))
        for worker, (have, known) in enumerate(zip(values, states, strict=True)):
            keys_per_tensor = [
                RandomKeys(
                    self.seed, step, i, worker, ties, num_workers=self.num_workers
                )
                for i in range(len(self._tensors))
            ]
            flat = [tf.reshape(v, [-1]) for v in have]
            held, all_at_once = tf.nest.map_structure(
                tf.convert_to_tensor, (known, common[worker])
            )
            if self.compressor.reads_residual:
                kept = map(tf.convert_to_tensor, residual[worker])
                held = [{**s, "residual": r} for s, r in zip(held, kept, strict=True)]
            finite = tf.constant(True)
            merged.append(
                generic_step.aggregate_tensors(
                    self.compressor,
                    self._tensors,
                    flat,
                    held,
                    all_at_once,
                    keys_per_tensor,
                    finite,
                )
            )
        messages: list[list[Request]] = [[] for _ in merged]
        ended = run_all(merged, messages)
        self.messages = messages if tf.executing_eagerly() else []
        outcomes = [outcome for outcome, _ in ended]
        return (
            [[to_dense_tensor(r.sum) for r in o.results] for o in outcomes],
            [[to_dense_tensor(r.sent) for r in o.results] for o in outcomes],
            [
                [
                    {**old, **(r.state or {})}
                    for old, r in zip(s, o.results, strict=True)
                ]
                for s, o in zip(states, outcomes, strict=True)
            ],
            [new for _, new in ended],
            tf.convert_to_tensor(outcomes[0].sent_bytes),
        )

    def _shaped(self, values: Sequence[tf.Tensor]) -> list[np.ndarray]:
        return [
            value.numpy().reshape(tensor.shape)
            for value, tensor in zip(values, self._tensors, strict=True)
        ]


def _initial(
    specs: dict[str, StateSpec], dtype: tf.DType, seed: int
) -> dict[str, np.ndarray]:
    return {
        name: state.initial_value(spec, seed).astype(dtype.name)
        for name, spec in specs.items()
    }
