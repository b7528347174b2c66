"""The header of a buffer: version, fingerprint, flags, length, checksum.

docs/wire_format.md specifies it.
"""

import zlib
from collections.abc import Iterable, Sequence

import tensorflow as tf

from tf_dgc.codecs.checks import Check, gate, hold

_MAGIC = 0x44474301
NUM_WORDS = 5
FLAGS = 2  # the word that is 0 if the gradient was finite
_CHECKSUM = 4
_SAME_PROGRAM = "All workers must run the same version of tf_dgc on the same model."


def fingerprint(items: Iterable[str]) -> int:
    """Return the checksum of texts without spaces, 0 to 2**32 - 1."""
    return zlib.crc32(" ".join(["tf_dgc 1", *items]).encode("ascii"))


def seal(
    agreed: int, length: int | tf.Tensor, body: Sequence[tf.Tensor], finite: tf.Tensor
) -> tf.Tensor:
    """Put a header before words.

    Args:
        agreed: fingerprint of what all workers must have in common.
        length: words of the buffer, header included; an int or a scalar tensor.
        body: words behind the header, int32 vectors.
        finite: scalar bool, whether this worker's gradient was finite.

    Returns:
        int32 `[length]`.
    """
    before_checksum = tf.stack(
        [
            _as_word(_MAGIC),
            _as_word(agreed),
            tf.cast(tf.logical_not(finite), tf.int32),
            _as_word(length),
        ]
    )
    without = tf.concat([before_checksum, [0], *body], axis=0)
    checksum = _checksum(without[tf.newaxis])
    return tf.concat([before_checksum, checksum, *body], axis=0)


def add_flag(words: tf.Tensor, finite: tf.Tensor) -> tf.Tensor:
    """Return sealed words that say too that a gradient was not finite.

    Args:
        words: buffer of one worker, int32 `[length]`.
        finite: scalar bool, whether that gradient was finite.
    """
    added = tf.cast(tf.logical_not(finite), tf.int32) * (1 - words[FLAGS])
    changes = tf.stack([added, (2 * FLAGS + 1) * added])  # of the flag, the checksum
    return tf.tensor_scatter_nd_add(words, [[FLAGS], [_CHECKSUM]], changes)


def is_sound(words: tf.Tensor, agreed: int) -> tf.Tensor:
    """Return whether a header holds, and its checksum: a scalar bool.

    Args:
        words: buffer of one worker, int32 `[length]`.
        agreed: fingerprint, as it was sealed with.
    """
    head = words[tf.newaxis, :NUM_WORDS]
    checks = [*check(head, agreed, tf.size(words)), check_sum(words[tf.newaxis])]
    return hold(checks)


def spoil_unless_of(agreed: int, words: tf.Tensor) -> tf.Tensor:
    """Return words that all refuse if they say that they are of another model.

    As they are, they may be sound to others.

    Args:
        agreed: fingerprint, as buffers here are sealed with.
        words: buffer of one worker, int32 `[length]`.
    """
    known = tf.stack([_as_word(_MAGIC), _as_word(agreed)])
    return tf.where(tf.reduce_all(tf.equal(words[:2], known)), words, spoil(words))


def spoil(words: tf.Tensor) -> tf.Tensor:
    """Return words that nobody accepts, whatever model they are of.

    Their checksum is wrong; all else stays, and says what is wrong with them.

    Args:
        words: buffer of one worker, int32 `[length]`.
    """
    place = [[_CHECKSUM]]
    rest = tf.tensor_scatter_nd_update(words, place, [0])
    return tf.tensor_scatter_nd_update(words, place, _checksum(rest[tf.newaxis]) + 1)


def unseal(
    buffers: tf.Tensor, agreed: int, length: int | tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Check the headers of all workers' buffers and take them off.

    Args:
        buffers: buffers of all workers, int32 `[num_workers, length]`.
        agreed: fingerprint, as they were sealed with.
        length: words of a buffer, as it was sealed with.

    Returns:
        The words, int32 `[num_workers, length - NUM_WORDS]`, and the number of
        workers whose gradient was not finite, scalar int32.

    Raises:
        ValueError, tf.errors.InvalidArgumentError: as `wire.decode`.
    """
    buffers = of_length(buffers, length)
    checks = check(buffers[:, :NUM_WORDS], agreed, length)
    checks.append(check_sum(buffers))
    buffers = gate(checks, buffers)
    return buffers[:, NUM_WORDS:], tf.reduce_sum(buffers[:, FLAGS])


def of_length(buffers: tf.Tensor, words: int | tf.Tensor) -> tf.Tensor:
    """Return the buffers, refused unless they are of this length."""
    known = buffers.shape[1]
    if known is not None and isinstance(words, int):
        if known != words:
            raise ValueError(
                f"The buffers have the wrong length. {_SAME_PROGRAM} "
                f"Received: {known} words, expected: {words}"
            )
        return buffers
    received = tf.repeat(tf.shape(buffers)[1], buffers.shape[0])
    check = Check("words that arrived", received, words, _SAME_PROGRAM)
    buffers = gate([check], buffers)
    if isinstance(words, int):
        buffers.set_shape([None, words])
    return buffers


def check(header: tf.Tensor, agreed: int, length: int | tf.Tensor) -> list[Check]:
    """Return what must hold of words 0 to 3 of all workers, int32 `[N, 5]`."""
    flags = tf.bitwise.bitwise_and(header[:, FLAGS], ~1)
    return [
        Check("version of the wire format", header[:, 0], _MAGIC, _SAME_PROGRAM),
        Check("fingerprint of the tensors", header[:, 1], agreed, _SAME_PROGRAM),
        Check("unknown flags", flags, 0, _SAME_PROGRAM),
        Check("length in words", header[:, 3], length, _SAME_PROGRAM),
    ]


def check_sum(buffers: tf.Tensor) -> Check:
    """Return what must hold of whole buffers, int32 `[N, words]`."""
    checksum = buffers[:, _CHECKSUM]
    # It is over all words but itself, whose factor is 9.
    difference = _checksum(buffers) - 10 * checksum
    return Check("difference of the checksum", difference, 0)


def _as_word(number: int | tf.Tensor) -> tf.Tensor:
    """Return an unsigned number as int32 of the same bits."""
    return tf.bitcast(tf.cast(number, tf.uint32), tf.int32)


def _checksum(buffers: tf.Tensor) -> tf.Tensor:
    """Sum of `(2 i + 1) * word[i]`, int32 `[N]`, of int32 `[N, words]`; it wraps."""
    factors = 2 * tf.range(tf.shape(buffers)[1]) + 1
    return tf.reduce_sum(buffers * factors, axis=1)
