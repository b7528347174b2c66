"""Messages between workers and server: heads, checksums and parts.

A message is int32 words: a head, then a body, which may be one part of a longer one.
Every request of a worker has a number, one more than the last, and gets one reply that
bears it.
"""

import enum
import hashlib
import os
from typing import Any, NamedTuple

import numpy as np

from tf_dgc._internals import rpc

SECRET_VARIABLE = "TF_DGC_SECRET"
_MAGIC = 0x44475301

REQUEST = np.dtype(
    [
        ("magic", "<i4"),
        ("secret", "<i4", 4),
        ("kind", "<i4"),
        ("worker", "<i4"),
        ("incarnation", "<i8"),
        ("number", "<i8"),
        ("step", "<i8"),
        ("rate", "<f8"),
        ("part", "<i4"),
        ("parts", "<i4"),
        ("length", "<i4"),
        ("checksum", "<i4"),
    ]
)
"""Head of a request.

`incarnation` is a random number of this process of the worker. `step` is the server's
clock as the worker saw it last, `rate` its learning rate, NaN for a schedule. `length`
is that of the body, in words.
"""

REPLY = np.dtype(
    [
        ("magic", "<i4"),
        ("status", "<i4"),
        ("incarnation", "<i8"),
        ("number", "<i8"),
        ("clock", "<i8"),
        ("part", "<i4"),
        ("parts", "<i4"),
        ("length", "<i4"),
        ("checksum", "<i4"),
    ]
)
"""Head of a reply. `clock` is the number of updates that the weights have had."""

MAX_WORDS = rpc.MOST_WORDS - max(REQUEST.itemsize, REPLY.itemsize) // 4
"""Words of one part at the most."""


class Kind(enum.IntEnum):
    """What a worker asks for."""

    JOIN = 1  # to take part; with what the server is to be, as text
    GIVE = 2  # nothing: it has the first weights
    START = 3  # the weights, when all are there
    PUSH = 4  # the weights, behind its push, when it may go on
    ASK = 5  # the same again, after "wait"
    MORE = 6  # a further part of the last reply
    PULL = 7  # the weights now
    LEAVE = 8  # nothing any more; with the reason as text, if there is one
    BEAT = 9  # nothing: it lives; with a word, 1 if it computes, else 0


class Status(enum.IntEnum):
    """What a reply says."""

    DONE = 0
    WAIT = 1  # and ask again
    REFUSED = 2  # with the reason as text
    AGAIN = 3  # join again: who was to give the first weights is gone
    LATE = 4  # done, but for the push, which came when its step had been taken


class Push(NamedTuple):
    """What a worker pushed.

    Attributes:
        words: message, int32 `[w]`.
        worker: index of the worker.
        step: number of the step that it was planned by.
    """

    words: np.ndarray
    worker: int
    step: int


class DamagedError(Exception):
    """A message that is none, or not from who knows the secret."""


def secret_words(secret: str | None = None) -> list[int]:
    """Return what a head says of the secret that all processes share.

    Args:
        secret: secret; None for that of the environment variable `TF_DGC_SECRET`.
    """
    secret = os.environ.get(SECRET_VARIABLE, "") if secret is None else secret
    if not secret:
        return [0] * 4
    digest = hashlib.sha256(b"tf_dgc server " + secret.encode()).digest()
    return np.frombuffer(digest[:16], "<i4").tolist()


def add_frame(form: np.dtype, body: np.ndarray, **fields: Any) -> np.ndarray:
    """Return a message.

    Args:
        form: type of the head.
        body: words, int32 `[w]`.
        **fields: fields of the head but the magic number, length and checksum.
    """
    head = np.zeros((), form)
    for name, value in {**fields, "magic": _MAGIC, "length": len(body)}.items():
        head[name] = value
    words = np.concatenate([np.frombuffer(head.tobytes(), "<i4"), body])
    words[form.itemsize // 4 - 1] = checksum(words)
    return words


def remove_frame(form: np.dtype, words: np.ndarray) -> tuple[Any, np.ndarray]:
    """Return head and body of a message.

    Args:
        form: type of the head.
        words: message, int32 `[w]`.

    Raises:
        DamagedError: if it is none.
    """
    size = form.itemsize // 4
    if len(words) < size:
        raise DamagedError(f"it has {len(words)} words, and a head has {size}")
    head, body = np.frombuffer(words[:size].tobytes(), form)[0], words[size:]
    if head["magic"] != _MAGIC:
        raise DamagedError(
            "it is of another program or version (first word "
            f"{int(head['magic']) & 0xFFFFFFFF:#x})"
        )
    if head["length"] != len(body):
        raise DamagedError(f"it has {len(body)} words where {head['length']} are told")
    clean = words.copy()
    clean[size - 1] = 0
    if checksum(clean) != head["checksum"]:
        raise DamagedError("its checksum is wrong")
    return head, body


def head_of(words: np.ndarray) -> Any:
    """Return the head of a request that may be none, with zeros if it is too short."""
    size = REQUEST.itemsize // 4
    padded = np.zeros([size], "<i4")
    padded[: len(words[:size])] = words[:size]
    return np.frombuffer(padded.tobytes(), REQUEST)[0]


def checksum(words: np.ndarray) -> np.int32:
    """Return the sum of `(2 i + 1) * word[i]`, which wraps, of int32 `[w]`."""
    factors = 2 * np.arange(len(words), dtype=np.int32) + np.int32(1)
    return np.dot(factors, words)


def to_body(text: str) -> np.ndarray:
    """Return text as words."""
    raw = text.encode("ascii", "backslashreplace")
    return np.frombuffer(raw.ljust(-(-len(raw) // 4) * 4), "<i4")


def to_text(body: np.ndarray) -> str:
    """Return what `to_body` made words of, without spaces around it."""
    return body.tobytes().decode("ascii", "replace").strip()


def num_parts(num_words: int) -> int:
    """Return in how many parts a body goes."""
    return max(1, -(-num_words // MAX_WORDS))


def part_of(body: np.ndarray, part: int) -> np.ndarray:
    """Return one of the parts of a body."""
    return body[part * MAX_WORDS : (part + 1) * MAX_WORDS]


def brief(error: Exception) -> str:
    """Return class and text of an error, in a line that is not too long."""
    text = str(getattr(error, "message", error)).split("\n", maxsplit=1)[0]
    return f"{type(error).__name__}: {text:.500}"


def gist(text: str) -> str:
    """Return what this package says in an error of TensorFlow, or its first line.

    Args:
        text: text of the error.
    """
    begin = max(text.find("tf_dgc: "), 0)
    return text[begin:].split("\n", maxsplit=1)[0].rstrip("] ")
