"""Messages between workers and server.

A message is int32 words: a head, then a body or one part of a longer body. A worker
numbers its requests consecutively; each gets one reply with the same number.
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

`incarnation` is a random number that identifies the worker's process. `step` is the
server's clock as the worker last saw it, `rate` the worker's learning rate, NaN for a
schedule, `length` the number of words of the body.
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
"""Head of a reply. `clock` is the number of updates applied to the weights."""

MAX_WORDS = rpc.MOST_WORDS - max(REQUEST.itemsize, REPLY.itemsize) // 4
"""Maximum number of words of one part."""


class Kind(enum.IntEnum):
    """Kind of a request."""

    JOIN = 1  # take part; the body is the model spec, as text
    INITIALIZE = 2  # set the initial weights, which are the body
    START = 3  # return all weights once every worker has joined
    PUSH = 4  # apply the body; return the weights once the worker may continue
    POLL = 5  # repeat START or PUSH, after a reply WAIT
    NEXT_PART = 6  # return a further part of the last reply
    PULL = 7  # return all weights now
    LEAVE = 8  # take part no longer; the body is an error's text or empty
    HEARTBEAT = 9  # the worker is alive; the body is 1 if it computes, else 0


class Status(enum.IntEnum):
    """Status of a reply."""

    DONE = 0
    WAIT = 1  # poll again
    REFUSED = 2  # the body is the reason, as text
    REJOIN = 3  # the worker that was to send the initial weights is gone
    LATE = 4  # done, but the push arrived after its step and was not applied


class Push(NamedTuple):
    """A worker's push."""

    words: np.ndarray  # message, int32 `[w]`
    worker: int
    step: int  # the server's clock by which the push was planned


class InvalidMessageError(Exception):
    """A message that is malformed or does not carry the secret."""


def secret_words(secret: str | None = None) -> list[int]:
    """Return the four words that a request's head has for a shared secret."""
    secret = os.environ.get(SECRET_VARIABLE, "") if secret is None else secret
    if not secret:
        return [0] * 4
    digest = hashlib.sha256(b"tf_dgc server " + secret.encode()).digest()
    return np.frombuffer(digest[:16], "<i4").tolist()


def add_frame(form: np.dtype, body: np.ndarray, **fields: Any) -> np.ndarray:
    """Return a message of a head (`REQUEST` or `REPLY`) with `fields` and a body."""
    head = np.zeros((), form)
    for name, value in {**fields, "magic": _MAGIC, "length": len(body)}.items():
        head[name] = value
    words = np.concatenate([np.frombuffer(head.tobytes(), "<i4"), body])
    words[form.itemsize // 4 - 1] = checksum(words)
    return words


def frame_refusal(head: Any, reason: str) -> np.ndarray:
    """Return the reply that refuses the request with a head."""
    return add_frame(
        REPLY,
        encode_text(reason),
        status=Status.REFUSED,
        parts=1,
        incarnation=head["incarnation"],
        number=head["number"],
    )


def remove_frame(form: np.dtype, words: np.ndarray) -> tuple[Any, np.ndarray]:
    """Return head and body of a message; raise `InvalidMessageError` if malformed."""
    size = form.itemsize // 4
    if len(words) < size:
        raise InvalidMessageError(f"it has {len(words)} words, and a head has {size}")
    head, body = np.frombuffer(words[:size].tobytes(), form)[0], words[size:]
    if head["magic"] != _MAGIC:
        raise InvalidMessageError(
            "it is of another program or version (first word "
            f"{int(head['magic']) & 0xFFFFFFFF:#x})"
        )
    if head["length"] != len(body):
        raise InvalidMessageError(
            f"its head states {head['length']} words, and it has {len(body)}"
        )
    unsigned = words.copy()
    unsigned[size - 1] = 0
    if checksum(unsigned) != head["checksum"]:
        raise InvalidMessageError("its checksum is wrong")
    return head, body


def read_head(words: np.ndarray) -> Any:
    """Return the head of a possibly malformed request, padded with zeros."""
    size = REQUEST.itemsize // 4
    padded = np.zeros([size], "<i4")
    padded[: len(words[:size])] = words[:size]
    return np.frombuffer(padded.tobytes(), REQUEST)[0]


def checksum(words: np.ndarray) -> np.int32:
    """Return the sum of `(2 i + 1) * word[i]`, with wrap-around, of int32 `[w]`."""
    factors = 2 * np.arange(len(words), dtype=np.int32) + np.int32(1)
    return np.dot(factors, words)


def encode_text(text: str) -> np.ndarray:
    """Return text as words, padded with spaces."""
    raw = text.encode("ascii", "backslashreplace")
    return np.frombuffer(raw.ljust(-(-len(raw) // 4) * 4), "<i4")


def decode_text(body: np.ndarray) -> str:
    """Return the text that `encode_text` encoded, without surrounding spaces."""
    return body.tobytes().decode("ascii", "replace").strip()


def num_parts(num_words: int) -> int:
    """Return the number of parts of a body."""
    return max(1, -(-num_words // MAX_WORDS))


def part_of(body: np.ndarray, part: int) -> np.ndarray:
    """Return one part of a body."""
    return body[part * MAX_WORDS : (part + 1) * MAX_WORDS]


def summarize_error(error: Exception) -> str:
    """Return an error's class and text as one line of bounded length."""
    text = str(getattr(error, "message", error)).split("\n", maxsplit=1)[0]
    return f"{type(error).__name__}: {text:.500}"


def extract_message(text: str) -> str:
    """Return this package's message within a TensorFlow error, or the first line."""
    begin = max(text.find("tf_dgc: "), 0)
    return text[begin:].split("\n", maxsplit=1)[0].rstrip("] ")
