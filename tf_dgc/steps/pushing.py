"""A step of a worker that pushes to a server: one message, and nobody is asked.

A step's requests are answered as if its worker were alone (as in `near.py`), and all of
them are the message; `receiving.py` makes of it what was sent.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.choice import choose
from tf_dgc.codecs import header
from tf_dgc.codecs.bits import to_words
from tf_dgc.collectives.requests import Either, Gather, Message, Sum
from tf_dgc.distribute.groups import alone
from tf_dgc.steps import kinds
from tf_dgc.steps.base import Inputs, Outcome

NUM_WORKERS = 2
"""N by which a step is planned: what is pushed goes over one link, as between two.

So a step is dense where that is shorter, however many workers push.
"""


class Pushed(NamedTuple):
    """What a worker pushes.

    Attributes:
        words: message, int32 `[w]`.
        outcome: outcome of its step, as if it were alone.
        nonfinite: whether its gradient was left out, scalar int32, 0 or 1.
    """

    words: tf.Tensor
    outcome: Outcome
    nonfinite: tf.Tensor


def push(inputs: Inputs) -> Pushed:
    """Run the step, which stores what is not sent, and return what is.

    Args:
        inputs: inputs of the step, with `NUM_WORKERS` for `num_workers`.
    """
    step = kinds.begin(inputs)
    messages: list[Message] = []
    replies: Any = None
    while True:
        try:
            asked = step.send(replies)
        except StopIteration as end:
            words = [words_of(message) for message in messages]
            flag = _flag_of(messages[0])
            return Pushed(tf.concat(words, axis=0), end.value, flag)
        messages += asked
        replies = [alone(message) for message in asked]


def _flag_of(message: Any) -> tf.Tensor:
    """Return the flag that goes with every message; first among what is summed."""
    if isinstance(message, Gather):
        return message.words[header.FLAGS]
    if isinstance(message, Sum):
        return tf.cast(message.values[0], tf.int32)
    return choose(
        message.dense,
        lambda: tf.cast(message.vector[0], tf.int32),
        lambda: message.words[header.FLAGS],
    )


def words_of(message: Message) -> tf.Tensor:
    """Return the bits of a request, int32 `[w]`."""
    if isinstance(message, Either):  # what is not asked for is empty
        return tf.concat([to_words(message.vector), message.words], axis=0)
    return to_words(message[0])
