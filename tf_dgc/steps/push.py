"""A step that a worker pushes to a server, and the server's sum of such pushes.

The worker's requests are answered as if it were alone, and their words form one
message. The server derives the plan of a top-k step from what all workers know: method,
tensors, seed and step number. For other methods it runs the exchange again, with the
message as replies (`neighbors.py`).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import schedules
from tf_dgc.codecs import buffer
from tf_dgc.codecs.bits import from_words, num_words_of, to_words
from tf_dgc.codecs.checks import BufferCheck, require
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.cross_device import reply_of_single_worker
from tf_dgc.collectives.requests import (
    AllGather,
    AllReduce,
    DenseOrSparse,
    DenseOrSparseReply,
    Request,
)
from tf_dgc.compressors import TopK
from tf_dgc.compressors.base import Compressor
from tf_dgc.compressors.topk import is_top_k
from tf_dgc.conditions import smart_cond
from tf_dgc.steps import implementations, native, tensorflow_ops, top_k_step
from tf_dgc.steps.base import (
    StepInputs,
    StepOutcome,
    StepPlan,
    TouchedEntries,
    plan_step,
    split_uncompressed,
)
from tf_dgc.steps.neighbors import NeighborCoder, NeighborMessage
from tf_dgc.steps.top_k_step import ReceivedPart

NUM_WORKERS = 2
"""Number of workers for which a pushed step is planned.

A push crosses one link, as between two workers. So a step is dense if that is shorter,
however many workers push.
"""


class PushedStep(NamedTuple):
    """A step and its message."""

    words: tf.Tensor  # int32 `[w]`
    outcome: StepOutcome  # as if the worker were alone
    nonfinite: tf.Tensor  # 1 if the gradient was not finite and was left out, else 0


def push(inputs: StepInputs) -> PushedStep:
    """Run a step planned for `NUM_WORKERS`, which stores unsent values."""
    step = implementations.start_step(inputs)
    requests: list[Request] = []
    replies: Any = None
    while True:
        try:
            new_requests = step.send(replies)
        except StopIteration as end:
            words = tf.concat([_request_words(r) for r in requests], axis=0)
            return PushedStep(words, end.value, _nonfinite_flag(requests[0]))
        requests += new_requests
        replies = [reply_of_single_worker(r) for r in new_requests]


def _request_words(request: Request) -> tf.Tensor:
    if isinstance(request, DenseOrSparse):  # one of them is empty
        return tf.concat([to_words(request.vector), request.words], axis=0)
    return to_words(request[0])


def _nonfinite_flag(request: Any) -> tf.Tensor:
    if isinstance(request, AllGather):
        return request.words[buffer.FLAGS_WORD]
    if isinstance(request, AllReduce):
        return tf.cast(request.values[0], tf.int32)
    return smart_cond(
        request.dense,
        lambda: tf.cast(request.vector[0], tf.int32),
        lambda: request.words[buffer.FLAGS_WORD],
    )


class PushReceiver(NamedTuple):
    """Decodes and sums pushes; every tensor has a gradient in every step."""

    compressor: Compressor
    tensors: Sequence[TensorSpec]
    error_feedback: bool  # whether workers keep unsent values
    seed: int  # of all random choices; equal on all workers
    use_native: bool  # whether the variables have native operations

    def receive(
        self, pushes: Sequence[tf.Tensor], workers: Sequence[tf.Tensor], step: tf.Tensor
    ) -> StepOutcome:
        """Sum the pushes of one step; decoding or applying fails for malformed ones."""
        if is_top_k(self.compressor) and self.error_feedback:
            return self._receive_top_k(self.compressor, pushes, step)
        coder = NeighborCoder(self.compressor, self.tensors, self.seed, step)
        zeros = [tf.zeros([t.size], t.dtype) for t in self.tensors]
        messages = [
            coder.decode(words, zeros, worker)
            for words, worker in zip(pushes, workers, strict=True)
        ]
        return StepOutcome(decode=lambda: _sum(messages), entries=0, sent_bytes=0)

    def _receive_top_k(
        self, compressor: TopK, pushes: Sequence[tf.Tensor], step: tf.Tensor
    ) -> StepOutcome:
        sparsity = schedules.sparsity_of_step(compressor.sparsity, step)
        tensors = [t._replace(value_dtype=compressor.value_dtype) for t in self.tensors]
        received, missing, rest = [], [], list(pushes)
        for places in split_uncompressed(tensors, NUM_WORKERS):
            plan = plan_step([tensors[i] for i in places], sparsity, NUM_WORKERS)
            parts = [_read_part(plan, words) for words in rest]
            vectors, buffers, rest, num_missing = map(list, zip(*parts, strict=True))
            reply = DenseOrSparseReply(tf.add_n(vectors), tf.stack(buffers))
            received.append(ReceivedPart(places, plan, reply))
            missing.append(tf.stack(num_missing))
        received = _require_lengths(received, tf.add_n(missing), rest)
        path = native if self.use_native else tensorflow_ops
        return StepOutcome(
            decode=lambda: top_k_step.decode_parts(path.decode_and_sum, received),
            entries=0,
            sent_bytes=0,
            apply=(lambda rule: top_k_step.apply_parts(received, rule))
            if self.use_native
            else None,
            touched=lambda: _touched_entries(received),
        )


def _read_part(
    plan: StepPlan, words: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return vector and buffer (one empty), the rest, and how many words are missing.

    Missing words are replaced by zeros.
    """
    dtype = plan.summed_dtype
    dense_words = num_words_of(dtype, plan.dense_entries)
    sparse_words = buffer.sparse_words(plan.layout, plan.counts)
    if not isinstance(sparse_words, int):
        sparse_words = tf.cast(sparse_words, tf.int32)
    if isinstance(plan.dense, bool):
        dense_words = dense_words if plan.dense else 0
        sparse_words = 0 if plan.dense else sparse_words
    else:
        dense_words = tf.where(plan.dense, dense_words, 0)
        sparse_words = tf.where(plan.dense, 0, sparse_words)
    end = dense_words + sparse_words
    missing = tf.maximum(end - tf.size(words), 0)
    words = tf.pad(words, [[0, missing]])
    like = tf.zeros([dense_words // num_words_of(dtype, 1)], dtype)
    vector = from_words(words[:dense_words], like)
    return vector, words[dense_words:end], words[end:], missing


def _require_lengths(
    received: list[ReceivedPart], missing: tf.Tensor, rest: Sequence[tf.Tensor]
) -> list[ReceivedPart]:
    """Return the parts, which fail if a message has too few or too many words."""
    superfluous = tf.stack([tf.size(words) for words in rest])
    checks = [
        BufferCheck("number of missing words", missing, 0),
        BufferCheck("number of words after the last tensor", superfluous, 0),
    ]
    replies = require(checks, [part.reply for part in received])
    return [
        part._replace(reply=reply)
        for part, reply in zip(received, replies, strict=True)
    ]


def _touched_entries(received: Sequence[ReceivedPart]) -> TouchedEntries:
    positions: dict[int, tf.Tensor] = {}
    any_other = tf.constant(False)
    for places, plan, reply in received:
        compressed = not all(t.uncompressed for t in plan.layout)
        any_other = tf.logical_or(any_other, compressed and plan.dense)
        part = _sent_positions(plan, reply.buffers)
        positions.update(zip(places, part, strict=True))
    return [positions[i] for i in sorted(positions)], any_other


def _sent_positions(plan: StepPlan, buffers: tf.Tensor) -> list[tf.Tensor]:
    """Return each tensor's positions, int32 `[m]`; none if all entries are sent."""
    none = tf.zeros([0], tf.int32)

    def parse() -> list[tf.Tensor]:
        _, entries, _ = buffer.parse_buffers(buffers, plan.layout, plan.counts)
        return [none if p is None else tf.reshape(p, [-1]) for p, _ in entries]

    positions: list[tf.Tensor] = smart_cond(
        plan.dense, lambda: [none] * len(plan.layout), parse
    )
    return positions


def _sum(messages: Sequence[NeighborMessage]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return the sums, in the order of the messages, and the number not finite."""
    sums = [
        functools.reduce(tf.add, values)
        for values in zip(*(m.values for m in messages), strict=True)
    ]
    nonfinite = [tf.cast(tf.logical_not(m.finite), tf.int32) for m in messages]
    return sums, tf.add_n(nonfinite)
