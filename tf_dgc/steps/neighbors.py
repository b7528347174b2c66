"""What a worker sends to its neighbours, and what it makes of what they send.

A method's exchange is asked as if its worker were alone. All that it asks for, in all
rounds, is one message; who receives it lets the exchange run again, with that for
replies, and has what was sent.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.codecs.bits import from_words, to_words
from tf_dgc.codecs.checks import BufferCheck, require
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.requests import AllGather, Request, to_dense_tensor
from tf_dgc.compressors.base import Compressor
from tf_dgc.compressors.random_keys import RandomKeys, tie_break_key
from tf_dgc.smart_cond import add_counts
from tf_dgc.steps.generic_step import StateTensors, aggregate_tensors


class NeighborMessage(NamedTuple):
    """What one worker sent.

    Attributes:
        values: values that were sent of each tensor, `[n]`.
        finite: whether its values were finite, scalar bool; else they are zeros.
        entries: number of entries, an int or a scalar int64 tensor.
        states: state of the method by name, of each tensor, as it is then; as it was
            if the values were not finite.
    """

    values: list[tf.Tensor]
    finite: tf.Tensor
    entries: int | tf.Tensor
    states: list[StateTensors]


class NeighborCoder:
    """Codes the tensors of one worker in one round, and decodes those of others.

    Args:
        compressor: method without a state that a worker has alone, of all tensors that
            are not exempt.
        tensors: descriptions of all tensors.
        seed: seed of all randomness; equal on all workers.
        number: number of the round, scalar int64.
    """

    def __init__(
        self,
        compressor: Compressor,
        tensors: Sequence[TensorSpec],
        seed: int,
        number: tf.Tensor,
    ):
        self._compressor, self._tensors = compressor, tensors
        self._seeds = seed, number
        self._ties = tie_break_key(seed, number, len(tensors))

    def encode(
        self,
        values: Sequence[tf.Tensor],
        finite: tf.Tensor,
        worker: int,
        states: Sequence[StateTensors] | None = None,
    ) -> tuple[tf.Tensor, NeighborMessage]:
        """Return the message of this worker, int32 `[w]`, and what is in it.

        Args:
            values: values of each tensor, `[n]`, finite.
            finite: whether they were, scalar bool, or are zeros in place of others.
            worker: index of this worker.
            states: state of the method by name, of each tensor; None for none.
        """
        messages: list[Request] = []

        def reply(asked: list[Request]) -> list[tf.Tensor]:
            messages.extend(asked)
            return [_as_reply(message, message[0]) for message in asked]

        sent = self._run(values, finite, worker, reply, states)
        return tf.concat([to_words(m[0]) for m in messages], axis=0), sent

    def decode(
        self,
        words: tf.Tensor,
        values: Sequence[tf.Tensor],
        worker: int | tf.Tensor,
        states: Sequence[StateTensors] | None = None,
    ) -> NeighborMessage:
        """Return what is in a message.

        Args:
            words: message of another worker, int32 `[w]`.
            values: values of the same tensors on this worker.
            worker: index of the other worker.
            states: state of the method of the other worker, as in `encode`.
        """
        rest = [words]

        def reply(asked: list[Request]) -> list[tf.Tensor]:
            found = []
            for message in asked:
                size = tf.size(to_words(message[0]))
                mine, rest[0] = rest[0][:size], rest[0][size:]
                found.append(_as_reply(message, from_words(mine, message[0])))
            return found

        sent = self._run(values, tf.constant(True), worker, reply, states)
        if rest[0].shape == (0,):
            return sent
        left = tf.size(rest[0])[tf.newaxis]
        check = BufferCheck("words behind the last tensor", left, 0)
        return sent._replace(values=require([check], sent.values))

    def given(
        self,
        values: Sequence[tf.Tensor],
        finite: tf.Tensor,
        worker: int | tf.Tensor,
        states: Sequence[StateTensors] | None = None,
    ) -> tuple:
        """Return the arguments of `run_exchanges`."""
        keys_per_tensor = [
            RandomKeys(*self._seeds, i, worker, self._ties) for i in range(len(values))
        ]
        known = [{} for _ in values] if states is None else states
        return (
            self._compressor,
            self._tensors,
            values,
            known,
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
        step = aggregate_tensors(*self.given(values, finite, worker, states))
        replies: Any = None
        while True:
            try:
                asked = step.send(replies)
            except StopIteration as end:
                merged, _ = end.value
                break
            replies = reply(asked)
        pairs = list(zip(self._tensors, merged.results, strict=True))
        sound = tf.equal(merged.nonfinite, 0)
        new = [
            {name: tf.where(sound, (r.state or {})[name], old[name]) for name in old}
            for old, r in zip(states or [], merged.results, strict=states is not None)
        ]
        return NeighborMessage(
            [tf.reshape(to_dense_tensor(r.sum), [t.size]) for t, r in pairs],
            sound,
            add_counts([t.size if r.entries is None else r.entries for t, r in pairs]),
            new,
        )


def _as_reply(message: Request, value: tf.Tensor) -> tf.Tensor:
    """Return the reply to who is alone, and has this."""
    return value[tf.newaxis] if isinstance(message, AllGather) else value
