"""Sealing: requests and replies of `messages.py` by TensorFlow operations."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc.server import messages
from tf_dgc.server.messages import REPLY, REQUEST

_SIZE = REPLY.itemsize // 4


class Asked(NamedTuple):
    """What a request is, but for its number and body.

    Attributes:
        kind: kind of it, scalar int32.
        step: server's clock as it was seen last, scalar int64.
        rate: learning rate, scalar float64, NaN for a schedule.
        part: number of this part of the body, scalar int32.
        parts: number of its parts, scalar int32.
    """

    kind: tf.Tensor
    step: tf.Tensor
    rate: tf.Tensor
    part: tf.Tensor
    parts: tf.Tensor


class Answer(NamedTuple):
    """What a reply says.

    Attributes:
        status: status, scalar int32.
        clock: number of updates that the weights have had, scalar int64.
        parts: number of parts of the whole body, scalar int32.
        body: words of this part, int32 `[w]`.
    """

    status: tf.Tensor
    clock: tf.Tensor
    parts: tf.Tensor
    body: tf.Tensor


def seal(
    asked: Asked, body: tf.Tensor, number: tf.Tensor, worker: int, incarnation: int
) -> tf.Tensor:
    """Return a request, int32 `[w]`.

    Args:
        asked: contents of the head.
        body: words, int32 `[w]`.
        number: number of the request, scalar int64.
        worker: index of this worker.
        incarnation: number of this process.
    """
    empty = messages.seal(
        REQUEST,
        np.zeros([0], np.int32),
        secret=messages.secret_words(),
        worker=worker,
        incarnation=incarnation,
    )
    head = tf.unstack(tf.constant(empty))
    changed = {
        "kind": asked.kind,
        "number": number,
        "step": asked.step,
        "rate": asked.rate,
        "part": asked.part,
        "parts": asked.parts,
        "length": tf.size(body),
        "checksum": tf.constant(0),
    }
    for name, value in changed.items():
        flat = tf.reshape(tf.bitcast(value, tf.int32), [-1])
        words = tf.unstack(flat, num=REQUEST[name].itemsize // 4)
        at = _offset(REQUEST, name)
        head[at : at + len(words)] = words
    words = tf.concat([tf.stack(head), body], axis=0)
    return tf.tensor_scatter_nd_update(words, [[len(head) - 1]], [_checksum(words)])


def unseal(
    words: tf.Tensor, number: tf.Tensor, incarnation: int
) -> tuple[tf.Tensor, Answer]:
    """Return whether this is the reply to a request, and what it says.

    Args:
        words: reply, int32 `[w]`; of any length, if it is damaged.
        number: number of the request, scalar int64.
        incarnation: number of this process.
    """
    length = tf.size(words)
    words = tf.pad(words, [[0, tf.maximum(_SIZE - length, 0)]])
    head, body = words[:_SIZE], words[_SIZE:]
    empty = messages.seal(REPLY, np.zeros([0], np.int32), incarnation=incarnation)
    told = _field(head, "checksum")
    status = _field(head, "status")
    clean = tf.tensor_scatter_nd_update(words, [[_SIZE - 1]], [0])
    whole = tf.reduce_all(
        [
            tf.equal(head[0], int(empty[0])),
            tf.equal(_field(head, "length"), length - _SIZE),
            tf.equal(_checksum(clean), told),
        ]
    )
    process = tf.equal(_field(head, "incarnation"), incarnation)
    mine = tf.logical_and(process, tf.equal(_field(head, "number"), number))
    clock, parts = _field(head, "clock"), _field(head, "parts")
    return tf.logical_and(whole, mine), Answer(status, clock, parts, body)


def text_of(body: tf.Tensor) -> tf.Tensor:
    """Return what `messages.to_body` made words of, a scalar string."""
    letters = tf.reshape(tf.bitcast(body, tf.uint8), [-1])
    text = tf.strings.unicode_encode(tf.cast(letters, tf.int32), "UTF-8")
    return tf.strings.strip(text)


def _checksum(words: tf.Tensor) -> tf.Tensor:
    """Return `messages.checksum` of int32 `[w]`, a scalar int32."""
    return tf.reduce_sum(words * (2 * tf.range(tf.size(words)) + 1))


def _field(head: tf.Tensor, name: str) -> tf.Tensor:
    """Return a field of a reply's head, a scalar."""
    dtype = tf.as_dtype(REPLY[name])
    at, width = _offset(REPLY, name), dtype.size // 4
    words = head[at : at + width]
    return tf.bitcast(words if width > 1 else words[0], dtype)


def _offset(kind: np.dtype, name: str) -> int:
    assert kind.fields is not None
    return kind.fields[name][1] // 4
