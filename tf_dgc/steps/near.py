"""What a worker sends to its neighbours, and what it makes of what they send.

A method's exchange is asked as if its worker were alone. All that it asks for, in all
rounds, is one message; who receives it lets the exchange run again, with that for
replies, and has what was sent.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.choice import add_up
from tf_dgc.codecs.bits import from_words, to_words
from tf_dgc.codecs.checks import Check, gate
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.collectives.requests import Gather, Message, whole
from tf_dgc.compressors.base import Compressor
from tf_dgc.compressors.draws import Draw, draw_ties
from tf_dgc.steps.composed import run_exchanges


class Sent(NamedTuple):
    """What one worker sent.

    Attributes:
        values: values that were sent of each tensor, `[n]`.
        finite: whether its values were finite, scalar bool; else they are zeros.
        entries: number of entries, an int or a scalar int64 tensor.
    """

    values: list[tf.Tensor]
    finite: tf.Tensor
    entries: int | tf.Tensor


class Coder:
    """Codes the tensors of one worker in one round, and decodes those of others.

    Args:
        compressor: method without a state, of all tensors that are not exempt.
        tensors: descriptions of all tensors.
        seed: seed of all randomness; equal on all workers.
        number: number of the round, scalar int64.
    """

    def __init__(
        self,
        compressor: Compressor,
        tensors: Sequence[Tensor],
        seed: int,
        number: tf.Tensor,
    ):
        self._compressor, self._tensors = compressor, tensors
        self._seeds = seed, number
        self._ties = draw_ties(seed, number, len(tensors))

    def encode(
        self, values: Sequence[tf.Tensor], finite: tf.Tensor, worker: int
    ) -> tuple[tf.Tensor, Sent]:
        """Return the message of this worker, int32 `[w]`, and what is in it.

        Args:
            values: values of each tensor, `[n]`, finite.
            finite: whether they were, scalar bool, or are zeros in place of others.
            worker: index of this worker.
        """
        messages: list[Message] = []

        def reply(asked: list[Message]) -> list[tf.Tensor]:
            messages.extend(asked)
            return [_as_reply(message, message[0]) for message in asked]

        sent = self._run(values, finite, worker, reply)
        return tf.concat([to_words(m[0]) for m in messages], axis=0), sent

    def decode(
        self, words: tf.Tensor, values: Sequence[tf.Tensor], worker: int | tf.Tensor
    ) -> Sent:
        """Return what is in a message.

        Args:
            words: message of another worker, int32 `[w]`.
            values: values of the same tensors on this worker.
            worker: index of the other worker.
        """
        rest = [words]

        def reply(asked: list[Message]) -> list[tf.Tensor]:
            found = []
            for message in asked:
                size = tf.size(to_words(message[0]))
                mine, rest[0] = rest[0][:size], rest[0][size:]
                found.append(_as_reply(message, from_words(mine, message[0])))
            return found

        sent = self._run(values, tf.constant(True), worker, reply)
        if rest[0].shape == (0,):
            return sent
        left = tf.size(rest[0])[tf.newaxis]
        check = Check("words behind the last tensor", left, 0)
        return sent._replace(values=gate([check], sent.values))

    def given(
        self, values: Sequence[tf.Tensor], finite: tf.Tensor, worker: int | tf.Tensor
    ) -> tuple:
        """Return the arguments of `run_exchanges`."""
        draws = [Draw(*self._seeds, i, worker, self._ties) for i in range(len(values))]
        nothing: list[dict[str, tf.Tensor]] = [{} for _ in values]
        return self._compressor, self._tensors, values, nothing, {}, draws, finite

    def _run(
        self,
        values: Sequence[tf.Tensor],
        finite: tf.Tensor,
        worker: int | tf.Tensor,
        reply: Callable[[list[Message]], list[tf.Tensor]],
    ) -> Sent:
        step = run_exchanges(*self.given(values, finite, worker))
        replies: Any = None
        while True:
            try:
                asked = step.send(replies)
            except StopIteration as end:
                merged, _ = end.value
                break
            replies = reply(asked)
        pairs = list(zip(self._tensors, merged.results, strict=True))
        return Sent(
            [tf.reshape(whole(r.sum), [t.size]) for t, r in pairs],
            tf.equal(merged.nonfinite, 0),
            add_up([t.size if r.entries is None else r.entries for t, r in pairs]),
        )


def _as_reply(message: Message, value: tf.Tensor) -> tf.Tensor:
    """Return the reply to who is alone, and has this."""
    return value[tf.newaxis] if isinstance(message, Gather) else value
