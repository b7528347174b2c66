"""Several workers in one process, without a strategy or an optimizer.

For tests, and for comparing and writing methods. Messages are packed and checked as
between real workers.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tf_dgc.arguments import check_whole
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.algorithm import run_together
from tf_dgc.collectives.packing import PackedOutcome
from tf_dgc.collectives.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    DenseOrSparse,
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
from tf_dgc.steps import generic_step
from tf_dgc.steps.state import initial_value


class Simulation:
    """Workers that exchange gradients by one method.

    >>> simulation = Simulation("top_k", shapes=[(100, 100)], num_workers=4)
    >>> (total,) = simulation.step([[gradient] for gradient in gradients])

    Args:
        compressor: method, a `Compressor`, or its name.
        shapes: shapes of the tensors; all of them are compressed.
        num_workers: number of workers, N, 1 or more.
        dtype: name of the gradients' dtype, float32 or float64.
        error_feedback: whether to keep unsent entries, as in `CompressedOptimizer`.
        seed: seed of all random choices.
        compiled: whether to compile a step to a graph: slow at first, then several
            times as fast.

    Attributes:
        residual: NumPy arrays of unsent entries, by worker and tensor; zeros without
            error feedback.
        sent: NumPy arrays of each worker's contribution in the last step, by worker and
            tensor.
        state: values of the method's own state by name, by worker and tensor.
        common: values of its state for all tensors at once by name, by worker.
        sent_bytes: number of bytes that one worker passed to the collectives in the
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
        tf_dtype = tf.as_dtype(dtype)
        self._tensors = [
            TensorSpec(f"tensor {i}", tuple(s), tf_dtype, False)
            for i, s in enumerate(shapes)
        ]
        workers = range(self.num_workers)
        self.residual = [[np.zeros(s, dtype) for s in shapes] for _ in workers]
        self.state = [
            [
                _initial_state(self.compressor.state(t.shape), dtype, i)
                for i, t in enumerate(self._tensors)
            ]
            for _ in workers
        ]
        self.common = [
            _initial_state(self.compressor.common_state(), dtype, 0) for _ in workers
        ]

    def step(self, gradients: Sequence[Sequence[Any]]) -> list[np.ndarray]:
        """Exchange `gradients[worker][tensor]`; return the sum over workers of each.

        Raises:
            AssertionError: if workers obtain different sums.
        """
        decay = self.compressor.feedback_decay
        corrected = [
            [
                decay * r + np.asarray(g, r.dtype)
                for g, r in zip(worker_gradients, residual, strict=True)
            ]
            for worker_gradients, residual in zip(gradients, self.residual, strict=True)
        ]
        sums, sent, states, common, sent_bytes = self._run(
            corrected,
            self.state,
            self.common,
            self.residual,
            tf.constant(self.iteration, tf.int64),
        )
        self.sent = [self._shaped(values) for values in sent]
        if self._keeps_residual:
            self.residual = [
                [c - s for c, s in zip(worker_corrected, worker_sent, strict=True)]
                for worker_corrected, worker_sent in zip(
                    corrected, self.sent, strict=True
                )
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
        """Return sums, contributions, new states and `common`, and bytes sent."""
        tie_breaks = tie_break_key(self.seed, step, len(self._tensors))
        steps = [
            self._start_step(worker, step, tie_breaks, *of_worker)
            for worker, of_worker in enumerate(
                zip(values, states, common, residual, strict=True)
            )
        ]
        messages: list[list[Request]] = [[] for _ in steps]
        finished = run_all(steps, messages)
        self.messages = messages if tf.executing_eagerly() else []
        outcomes = [outcome for outcome, _ in finished]
        return (
            [[to_dense_tensor(r.sum) for r in o.results] for o in outcomes],
            [[to_dense_tensor(r.sent) for r in o.results] for o in outcomes],
            [
                [
                    {**old, **(r.state or {})}
                    for old, r in zip(worker_states, o.results, strict=True)
                ]
                for worker_states, o in zip(states, outcomes, strict=True)
            ],
            [new_common for _, new_common in finished],
            tf.convert_to_tensor(outcomes[0].sent_bytes),
        )

    def _start_step(
        self,
        worker: int,
        step: tf.Tensor,
        tie_breaks: Any,
        values: list,
        states: list,
        common: dict,
        residual: list,
    ) -> Generator[list[Request], list[Reply], tuple[PackedOutcome, dict[str, Any]]]:
        keys_per_tensor = [
            RandomKeys(
                self.seed, step, i, worker, tie_breaks, num_workers=self.num_workers
            )
            for i in range(len(self._tensors))
        ]
        states, common = tf.nest.map_structure(tf.convert_to_tensor, (states, common))
        if self.compressor.reads_residual:
            states = [
                {**s, "residual": tf.convert_to_tensor(r)}
                for s, r in zip(states, residual, strict=True)
            ]
        return generic_step.aggregate_tensors(
            self.compressor,
            self._tensors,
            [tf.reshape(v, [-1]) for v in values],
            states,
            common,
            keys_per_tensor,
            finite=tf.constant(True),
        )

    def _shaped(self, values: Sequence[tf.Tensor]) -> list[np.ndarray]:
        return [
            value.numpy().reshape(tensor.shape)
            for value, tensor in zip(values, self._tensors, strict=True)
        ]


def _initial_state(
    specs: dict[str, StateSpec], dtype: str, seed: int
) -> dict[str, np.ndarray]:
    return {
        name: initial_value(spec, seed).astype(dtype) for name, spec in specs.items()
    }


Outcome = TypeVar("Outcome")


def run_all(
    steps: Sequence[Generator[list[Request], list[Reply], Outcome]],
    record: list[list[Request]] | None = None,
) -> list[Outcome]:
    """Run the steps of all workers in lockstep; return their outcomes, by worker."""

    def answer(requests: list[list[Request]]) -> list[list[Reply]]:
        for recorded, new in zip(record or [], requests, strict=False):
            recorded.extend(new)
        return answer_all(requests)

    return run_together(steps, answer)


class _Collective(NamedTuple):
    request_type: type
    group: Any  # group as the requests name it
    source: int | None  # worker that a broadcast comes from
    repetition: int  # number of equal collectives before it in this round
    members: tuple[int, ...]  # workers that take part


def answer_all(requests: Sequence[Sequence[Request]]) -> list[list[Reply]]:
    """Return the replies to the requests of all workers in a round, by worker."""
    # Of each collective and member, the position and content of its request.
    collectives: dict[_Collective, dict[int, tuple[int, Any]]] = {}
    for worker, worker_requests in enumerate(requests):
        for position, request in enumerate(worker_requests):
            collective = _collective(request, worker, len(requests))
            while worker in collectives.get(collective, {}):
                collective = collective._replace(repetition=collective.repetition + 1)
            collectives.setdefault(collective, {})[worker] = position, request
    replies: list[list[Any]] = [[None] * len(each) for each in requests]
    for collective, by_worker in collectives.items():
        if set(by_worker) != set(collective.members):
            raise ValueError(_mismatch(collective, sorted(by_worker), requests))
        answers = _answer(collective, [by_worker[m][1] for m in collective.members])
        for member, answer in zip(collective.members, answers, strict=True):
            replies[member][by_worker[member][0]] = answer
    return replies


def _collective(request: Request, worker: int, num_workers: int) -> _Collective:
    if isinstance(request, DenseOrSparse):
        gather = AllGather(request.words, request.group)
        members = group_members(gather, worker, num_workers)
    else:
        members = group_members(request, worker, num_workers)
    group = None if isinstance(request, SendRecv) else request.group
    source = request.source if isinstance(request, Broadcast) else None
    return _Collective(type(request), group, source, 0, members)


def _mismatch(collective: _Collective, workers: list[int], requests: Sequence) -> str:
    if collective.request_type is SendRecv:
        return (
            "SendRecv must be requested by both workers of a pair. Received: of "
            f"workers {collective.members} only {workers} request it"
        )
    others = [requests[m] for m in collective.members if m not in workers]
    return (
        "All workers of a group must make the same request. Received: of workers "
        f"{collective.members} only {workers} request "
        f"{collective.request_type.__name__} with group={collective.group}, and the "
        f"others request {others!r}"
    )


def _answer(collective: _Collective, requests: Sequence[Any]) -> list[Reply]:
    """Return the reply to each member."""
    first = requests[0]
    if isinstance(first, SendRecv):
        return [request.values for request in reversed(requests)]
    if isinstance(first, AllToAll):
        rows = [tf.unstack(request.rows) for request in requests]
        return [tf.stack(received) for received in zip(*rows, strict=True)]
    reply: Reply
    if isinstance(first, Broadcast):
        reply = requests[collective.members.index(first.source)].values
    elif isinstance(first, AllReduce):
        reply = _add_in_order([request.values for request in requests])
    elif isinstance(first, AllGather):
        reply = tf.stack([request.words for request in requests])
    elif first.dense:
        total = _add_in_order([request.vector for request in requests])
        reply = DenseOrSparseReply(total, tf.zeros([len(requests), 0], tf.int32))
    else:
        words = tf.stack([request.words for request in requests])
        reply = DenseOrSparseReply(first.vector[:0], words)
    return [reply] * len(requests)


def _add_in_order(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    total = vectors[0]
    for vector in vectors[1:]:
        total = total + vector
    return total
