"""One-way messages: everything that one worker sends in a step, and its decoding.

A method's exchange runs as if its worker were alone. All its requests, of all rounds,
form one message. The receiver runs the same exchange with the message as replies, and
so obtains what was sent.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.codecs.bits import from_words, to_words
from tf_dgc.codecs.checks import BufferCheck, require
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.packing import PackedOutcome
from tf_dgc.collectives.requests import AllGather, Reply, Request, to_dense_tensor
from tf_dgc.compressors.base import Compressor
from tf_dgc.compressors.random_keys import RandomKeys, tie_break_key
from tf_dgc.conditions import add_counts
from tf_dgc.steps.generic_step import StateTensors, aggregate_tensors


class NeighborMessage(NamedTuple):
    """The content of one worker's message."""

    values: list[tf.Tensor]  # of each tensor, `[n]`; zeros if not finite
    finite: tf.Tensor  # scalar bool
    entries: int | tf.Tensor
    states: list[StateTensors]  # of the method by name; the old ones if not finite


class NeighborCoder:
    """Encodes the tensors of one worker in one round, and decodes those of others.

    The method has no per-worker state; all workers have the same seed and round number.
    """

    def __init__(
        self,
        compressor: Compressor,
        tensors: Sequence[TensorSpec],
        seed: int,
        round_number: tf.Tensor,
    ):
        self._compressor, self._tensors = compressor, tensors
        self._seed, self._round_number = seed, round_number
        self._tie_break_key = tie_break_key(seed, round_number, len(tensors))

    def encode(
        self,
        values: Sequence[tf.Tensor],
        finite: tf.Tensor,
        worker: int,
        states: Sequence[StateTensors] | None = None,
    ) -> tuple[tf.Tensor, NeighborMessage]:
        """Return the message of this worker, int32 `[w]`, and its content.

        Values are `[n]`, and zeros if they are not finite.
        """
        requests: list[Request] = []

        def reply(new_requests: list[Request]) -> list[tf.Tensor]:
            requests.extend(new_requests)
            return [_reply_to_lone_worker(r, r[0]) for r in new_requests]

        content = self._run(values, finite, worker, reply, states)
        return tf.concat([to_words(r[0]) for r in requests], axis=0), content

    def decode(
        self,
        words: tf.Tensor,
        values: Sequence[tf.Tensor],
        worker: int | tf.Tensor,
        states: Sequence[StateTensors] | None = None,
    ) -> NeighborMessage:
        """Return a message's content; only the shapes of `values` are used."""
        rest = words

        def reply(requests: list[Request]) -> list[tf.Tensor]:
            nonlocal rest
            replies = []
            for request in requests:
                size = tf.size(to_words(request[0]))
                value = from_words(rest[:size], request[0])
                rest = rest[size:]
                replies.append(_reply_to_lone_worker(request, value))
            return replies

        content = self._run(values, tf.constant(True), worker, reply, states)
        if rest.shape == (0,):
            return content
        check = BufferCheck("words after the last tensor", tf.size(rest)[tf.newaxis], 0)
        return content._replace(values=require([check], content.values))

    def start_step(
        self,
        values: Sequence[tf.Tensor],
        finite: tf.Tensor,
        worker: int | tf.Tensor,
        states: Sequence[StateTensors] | None = None,
    ) -> Generator[list[Request], list[Reply], tuple[PackedOutcome, StateTensors]]:
        """Start the exchange of one worker's tensors."""
        keys_per_tensor = [
            RandomKeys(self._seed, self._round_number, i, worker, self._tie_break_key)
            for i in range(len(values))
        ]
        return aggregate_tensors(
            self._compressor,
            self._tensors,
            values,
            [{} for _ in values] if states is None else states,
            {},
            keys_per_tensor,
            finite,
        )

    def _run(
        self,
        values: Sequence[tf.Tensor],
        finite: tf.Tensor,
        worker: int | tf.Tensor,
        reply: Callable[[list[Request]], list[tf.Tensor]],
        states: Sequence[StateTensors] | None,
    ) -> NeighborMessage:
        step = self.start_step(values, finite, worker, states)
        replies: Any = None
        while True:
            try:
                requests = step.send(replies)
            except StopIteration as end:
                outcome, _ = end.value
                break
            replies = reply(requests)
        results = outcome.results
        was_finite = tf.equal(outcome.nonfinite, 0)
        new_states = [
            {
                name: tf.where(was_finite, (r.state or {})[name], value)
                for name, value in old.items()
            }
            for old, r in zip(states or [], results, strict=states is not None)
        ]
        return NeighborMessage(
            [
                tf.reshape(to_dense_tensor(r.sum), [t.size])
                for t, r in zip(self._tensors, results, strict=True)
            ],
            was_finite,
            add_counts(
                [
                    t.size if r.entries is None else r.entries
                    for t, r in zip(self._tensors, results, strict=True)
                ]
            ),
            new_states,
        )


def _reply_to_lone_worker(request: Request, value: tf.Tensor) -> tf.Tensor:
    return value[tf.newaxis] if isinstance(request, AllGather) else value
