"""What a server makes of pushes: sums, as workers make of what they gather.

It knows what all workers know beforehand: method, tensors, seed and the step's number.
Of a fused step, plan and sizes follow from these; any other method's exchange is run
once more, on zeros, with the message for replies (`near.Coder`).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_dgc.choice import choose
from tf_dgc.codecs import wire
from tf_dgc.codecs.bits import from_words, num_words
from tf_dgc.codecs.checks import Check, gate
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.collectives.requests import Both
from tf_dgc.compressors import TopK
from tf_dgc.compressors.base import Compressor
from tf_dgc.schedules import asking
from tf_dgc.steps import fused, native, operations
from tf_dgc.steps import plan as plans
from tf_dgc.steps.base import Outcome, Touched
from tf_dgc.steps.fused import Share
from tf_dgc.steps.near import Coder, Sent
from tf_dgc.steps.plan import Plan
from tf_dgc.steps.pushing import NUM_WORKERS


class Receiver(NamedTuple):
    """Decodes what workers push.

    Attributes:
        compressor: method without a state, of all tensors that are not exempt.
        tensors: descriptions of all tensors, each with a gradient in every step.
        feedback: whether workers keep what they do not send.
        seed: seed of all randomness; equal on all workers.
        natively: whether the native operations can be used for the variables.
    """

    compressor: Compressor
    tensors: Sequence[Tensor]
    feedback: bool
    seed: int
    natively: bool

    def receive(
        self, pushes: Sequence[tf.Tensor], workers: Sequence[tf.Tensor], step: tf.Tensor
    ) -> Outcome:
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
        coder = Coder(self.compressor, self.tensors, self.seed, step)
        zeros = [tf.zeros([t.size], t.dtype) for t in self.tensors]
        sent = [coder.decode(p, zeros, w) for p, w in zip(pushes, workers, strict=True)]
        return Outcome(functools.partial(_add, sent), 0, 0)

    def _fused(
        self, compressor: TopK, pushes: Sequence[tf.Tensor], step: tf.Tensor
    ) -> Outcome:
        sparsity = asking.of_step(compressor.sparsity, step)
        named = compressor.value_dtype
        tensors = [t._replace(value_dtype=named) for t in self.tensors]
        arrived, missing, rest = [], [], list(pushes)
        for places in plans.shares(tensors, NUM_WORKERS):
            layout = [tensors[i] for i in places]
            planned = plans.plan(layout, sparsity, NUM_WORKERS)
            parts = [_take(planned, words) for words in rest]
            totals, buffers, rest, found = map(list, zip(*parts, strict=True))
            both = Both(tf.add_n(totals), tf.stack(buffers))
            arrived.append((Share(places, planned), both))
            missing.append(tf.stack(found))
        arrived = _checked(arrived, tf.add_n(missing), rest)
        path = native if self.natively else operations
        return Outcome(
            decode=lambda: fused.decode(path, arrived),
            entries=0,
            sent_bytes=0,
            apply=functools.partial(fused.apply, arrived) if self.natively else None,
            touched=functools.partial(_touched, arrived),
        )


def _take(planned: Plan, words: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Return the vector and the buffer of a share, of which one is empty; and the rest.

    What is too short is filled with zeros, and how many of them is returned last.
    """
    dtype = planned.summed_dtype
    whole = num_words(dtype, planned.dense_entries)
    sparse = wire.sparse_words(planned.layout, planned.counts)
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
    entries = whole // num_words(dtype, 1)
    vector = from_words(words[:whole], tf.zeros([entries], dtype))
    return vector, words[whole:used], words[used:], missing


def _checked(arrived: list, missing: tf.Tensor, rest: Sequence[tf.Tensor]) -> list:
    """Return the same, to be had only if nothing is missing and nothing follows."""
    left = tf.stack([tf.size(words) for words in rest])
    checks = [
        Check("words that are missing", missing, 0),
        Check("words behind the last tensor", left, 0),
    ]
    replies = gate(checks, [tuple(both[:2]) for _, both in arrived])
    pairs = zip(arrived, replies, strict=True)
    return [(share, Both(*reply)) for (share, _), reply in pairs]


def _touched(arrived: list) -> Touched:
    """Return the positions that messages have, and whether some are of everything."""
    found: dict[int, tf.Tensor] = {}
    whole = tf.constant(False)
    for (places, planned), both in arrived:
        compressed = not all(t.exempt for t in planned.layout)
        whole = tf.logical_or(whole, compressed and planned.dense)
        none = [tf.zeros([0], tf.int32)] * len(places)
        positions = functools.partial(_positions, planned, both.buffers)
        parts = choose(planned.dense, functools.partial(list, none), positions)
        found.update(zip(places, parts, strict=True))
    return [found[i] for i in sorted(found)], whole


def _positions(planned: Plan, buffers: tf.Tensor) -> list[tf.Tensor]:
    _, entries, _ = wire.inspect(buffers, planned.layout, planned.counts)
    none = tf.zeros([0], tf.int32)
    return [none if p is None else tf.reshape(p, [-1]) for p, _ in entries]


def _add(sent: Sequence[Sent]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return the sums, worker after worker, and how many were not finite."""
    totals = [
        functools.reduce(tf.add, values)
        for values in zip(*(s.values for s in sent), strict=True)
    ]
    missing = [tf.cast(tf.logical_not(s.finite), tf.int32) for s in sent]
    return totals, tf.add_n(missing)
