"""A step of a worker that pushes to a server: one message, and nobody is asked.

A step's requests are answered as if its worker were alone (as in `near.py`), and all of
them are the message; `push.py` makes of it what was sent.
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
from tf_dgc.smart_cond import smart_cond
from tf_dgc.steps import implementations, native, tensorflow_ops, top_k_step
from tf_dgc.steps import plan as plans
from tf_dgc.steps.base import StepInputs, StepOutcome, TouchedEntries
from tf_dgc.steps.neighbors import NeighborCoder, NeighborMessage
from tf_dgc.steps.plan import StepPlan
from tf_dgc.steps.top_k_step import Share

NUM_WORKERS = 2
"""N by which a step is planned: what is pushed goes over one link, as between two.

So a step is dense where that is shorter, however many workers push.
"""


class PushedStep(NamedTuple):
    """What a worker pushes.

    Attributes:
        words: message, int32 `[w]`.
        outcome: outcome of its step, as if it were alone.
        nonfinite: whether its gradient was left out, scalar int32, 0 or 1.
    """

    words: tf.Tensor
    outcome: StepOutcome
    nonfinite: tf.Tensor


def push(inputs: StepInputs) -> PushedStep:
    """Run the step, which stores what is not sent, and return what is.

    Args:
        inputs: inputs of the step, with `NUM_WORKERS` for `num_workers`.
    """
    step = implementations.start_step(inputs)
    messages: list[Request] = []
    replies: Any = None
    while True:
        try:
            asked = step.send(replies)
        except StopIteration as end:
            words = [request_words(message) for message in messages]
            flag = _flag_of(messages[0])
            return PushedStep(tf.concat(words, axis=0), end.value, flag)
        messages += asked
        replies = [reply_of_single_worker(message) for message in asked]


def _flag_of(message: Any) -> tf.Tensor:
    """Return the flag that goes with every message; first among what is summed."""
    if isinstance(message, AllGather):
        return message.words[buffer.FLAGS_WORD]
    if isinstance(message, AllReduce):
        return tf.cast(message.values[0], tf.int32)
    return smart_cond(
        message.dense,
        lambda: tf.cast(message.vector[0], tf.int32),
        lambda: message.words[buffer.FLAGS_WORD],
    )


def request_words(message: Request) -> tf.Tensor:
    """Return the bits of a request, int32 `[w]`."""
    if isinstance(message, DenseOrSparse):  # what is not asked for is empty
        return tf.concat([to_words(message.vector), message.words], axis=0)
    return to_words(message[0])


# --- What a server makes of pushes: sums, as workers make of what they gather.
#
# It knows what all workers know beforehand: method, tensors, seed and the step's
# number.
# Of a fused step, plan and sizes follow from these; any other method's exchange is run
# once more, on zeros, with the message for replies (`near.Coder`).


class PushReceiver(NamedTuple):
    """Decodes what workers push.

    Attributes:
        compressor: method without a state, of all tensors that are not exempt.
        tensors: descriptions of all tensors, each with a gradient in every step.
        feedback: whether workers keep what they do not send.
        seed: seed of all randomness; equal on all workers.
        use_native: whether the native operations can be used for the variables.
    """

    compressor: Compressor
    tensors: Sequence[TensorSpec]
    feedback: bool
    seed: int
    use_native: bool

    def receive(
        self, pushes: Sequence[tf.Tensor], workers: Sequence[tf.Tensor], step: tf.Tensor
    ) -> StepOutcome:
        """Return the sum of some pushes of one step; nothing of it is updated yet.

        Args:
            pushes: messages of `pushing.push`, int32 `[w]`.
            workers: index of the worker that each is from, scalar integer tensors.
            step: number of the step, scalar int64.

        Raises:
            ValueError, tf.errors.InvalidArgumentError: as `wire.decode`, when what the
                outcome says is used.
        """
        if type(self.compressor) is TopK and self.feedback:
            return self._fused(self.compressor, pushes, step)
        coder = NeighborCoder(self.compressor, self.tensors, self.seed, step)
        zeros = [tf.zeros([t.size], t.dtype) for t in self.tensors]
        sent = [coder.decode(p, zeros, w) for p, w in zip(pushes, workers, strict=True)]
        return StepOutcome(functools.partial(_add, sent), 0, 0)

    def _fused(
        self, compressor: TopK, pushes: Sequence[tf.Tensor], step: tf.Tensor
    ) -> StepOutcome:
        sparsity = schedules.sparsity_of_step(compressor.sparsity, step)
        named = compressor.value_dtype
        tensors = [t._replace(value_dtype=named) for t in self.tensors]
        arrived, missing, rest = [], [], list(pushes)
        for places in plans.split_uncompressed(tensors, NUM_WORKERS):
            layout = [tensors[i] for i in places]
            planned = plans.plan_step(layout, sparsity, NUM_WORKERS)
            parts = [_take(planned, words) for words in rest]
            totals, buffers, rest, found = map(list, zip(*parts, strict=True))
            both = DenseOrSparseReply(tf.add_n(totals), tf.stack(buffers))
            arrived.append((Share(places, planned), both))
            missing.append(tf.stack(found))
        arrived = _checked(arrived, tf.add_n(missing), rest)
        path = native if self.use_native else tensorflow_ops
        return StepOutcome(
            decode=lambda: top_k_step.decode_shares(path, arrived),
            entries=0,
            sent_bytes=0,
            apply=functools.partial(top_k_step.apply_shares, arrived)
            if self.use_native
            else None,
            touched=functools.partial(_touched, arrived),
        )


def _take(planned: StepPlan, words: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Return the vector and the buffer of a share, of which one is empty; and the rest.

    What is too short is filled with zeros, and how many of them is returned last.
    """
    dtype = planned.summed_dtype
    whole = num_words_of(dtype, planned.dense_entries)
    sparse = buffer.sparse_words(planned.layout, planned.counts)
    if not isinstance(sparse, int):
        sparse = tf.cast(sparse, tf.int32)
    if isinstance(planned.dense, bool):
        whole, sparse = (whole, 0) if planned.dense else (0, sparse)
    else:
        whole = tf.where(planned.dense, whole, 0)
        sparse = tf.where(planned.dense, 0, sparse)
    used = whole + sparse
    missing = tf.maximum(used - tf.size(words), 0)
    words = tf.pad(words, [[0, missing]])
    entries = whole // num_words_of(dtype, 1)
    vector = from_words(words[:whole], tf.zeros([entries], dtype))
    return vector, words[whole:used], words[used:], missing


def _checked(arrived: list, missing: tf.Tensor, rest: Sequence[tf.Tensor]) -> list:
    """Return the same, to be had only if nothing is missing and nothing follows."""
    left = tf.stack([tf.size(words) for words in rest])
    checks = [
        BufferCheck("words that are missing", missing, 0),
        BufferCheck("words behind the last tensor", left, 0),
    ]
    replies = require(checks, [tuple(both[:2]) for _, both in arrived])
    pairs = zip(arrived, replies, strict=True)
    return [(share, DenseOrSparseReply(*reply)) for (share, _), reply in pairs]


def _touched(arrived: list) -> TouchedEntries:
    """Return the positions that messages have, and whether some are of everything."""
    found: dict[int, tf.Tensor] = {}
    whole = tf.constant(False)
    for (places, planned), both in arrived:
        compressed = not all(t.uncompressed for t in planned.layout)
        whole = tf.logical_or(whole, compressed and planned.dense)
        none = [tf.zeros([0], tf.int32)] * len(places)
        positions = functools.partial(_positions, planned, both.buffers)
        parts = smart_cond(planned.dense, functools.partial(list, none), positions)
        found.update(zip(places, parts, strict=True))
    return [found[i] for i in sorted(found)], whole


def _positions(planned: StepPlan, buffers: tf.Tensor) -> list[tf.Tensor]:
    _, entries, _ = buffer.parse_buffers(buffers, planned.layout, planned.counts)
    none = tf.zeros([0], tf.int32)
    return [none if p is None else tf.reshape(p, [-1]) for p, _ in entries]


def _add(sent: Sequence[NeighborMessage]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return the sums, worker after worker, and how many were not finite."""
    totals = [
        functools.reduce(tf.add, values)
        for values in zip(*(s.values for s in sent), strict=True)
    ]
    missing = [tf.cast(tf.logical_not(s.finite), tf.int32) for s in sent]
    return totals, tf.add_n(missing)
