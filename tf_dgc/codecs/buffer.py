"""Encode and decode: everything one worker sends in a sparse step, as one buffer.

A vector of int32 words: a header, then positions and values of every tensor, as
docs/wire_format.md specifies.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.codecs import elias_fano, value_types
from tf_dgc.codecs.bits import num_padding_bits_set, num_stream_words
from tf_dgc.codecs.checks import BufferCheck, all_hold, require
from tf_dgc.codecs.tensor_spec import TensorSpec

# --- The header of a buffer: version, fingerprint, flags, length, checksum.
#
# docs/wire_format.md specifies it.

_MAGIC = 0x44474301
HEADER_WORDS = 5
FLAGS_WORD = 2  # the word that is 0 if the gradient was finite
_CHECKSUM = 4
_SAME_PROGRAM = "All workers must run the same version of tf_dgc on the same model."


def text_fingerprint(items: Iterable[str]) -> int:
    """Return the checksum of texts without spaces, 0 to 2**32 - 1."""
    return zlib.crc32(" ".join(["tf_dgc 1", *items]).encode("ascii"))


def add_header(
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


def add_nonfinite_flag(words: tf.Tensor, finite: tf.Tensor) -> tf.Tensor:
    """Return sealed words that say too that a gradient was not finite.

    Args:
        words: buffer of one worker, int32 `[length]`.
        finite: scalar bool, whether that gradient was finite.
    """
    added = tf.cast(tf.logical_not(finite), tf.int32) * (1 - words[FLAGS_WORD])
    changes = tf.stack(
        [added, (2 * FLAGS_WORD + 1) * added]
    )  # of the flag, the checksum
    return tf.tensor_scatter_nd_add(words, [[FLAGS_WORD], [_CHECKSUM]], changes)


def is_valid(words: tf.Tensor, agreed: int) -> tf.Tensor:
    """Return whether a header holds, and its checksum: a scalar bool.

    Args:
        words: buffer of one worker, int32 `[length]`.
        agreed: fingerprint, as it was sealed with.
    """
    head = words[tf.newaxis, :HEADER_WORDS]
    checks = [
        *header_checks(head, agreed, tf.size(words)),
        checksum_check(words[tf.newaxis]),
    ]
    return all_hold(checks)


def invalidate_unless(agreed: int, words: tf.Tensor) -> tf.Tensor:
    """Return words that all refuse if they say that they are of another model.

    As they are, they may be sound to others.

    Args:
        agreed: fingerprint, as buffers here are sealed with.
        words: buffer of one worker, int32 `[length]`.
    """
    known = tf.stack([_as_word(_MAGIC), _as_word(agreed)])
    return tf.where(tf.reduce_all(tf.equal(words[:2], known)), words, invalidate(words))


def invalidate(words: tf.Tensor) -> tf.Tensor:
    """Return words that nobody accepts, whatever model they are of.

    Their checksum is wrong; all else stays, and says what is wrong with them.

    Args:
        words: buffer of one worker, int32 `[length]`.
    """
    place = [[_CHECKSUM]]
    rest = tf.tensor_scatter_nd_update(words, place, [0])
    return tf.tensor_scatter_nd_update(words, place, _checksum(rest[tf.newaxis]) + 1)


def remove_header(
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
    buffers = require_length(buffers, length)
    checks = header_checks(buffers[:, :HEADER_WORDS], agreed, length)
    checks.append(checksum_check(buffers))
    buffers = require(checks, buffers)
    return buffers[:, HEADER_WORDS:], tf.reduce_sum(buffers[:, FLAGS_WORD])


def require_length(buffers: tf.Tensor, words: int | tf.Tensor) -> tf.Tensor:
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
    check = BufferCheck("words that arrived", received, words, _SAME_PROGRAM)
    buffers = require([check], buffers)
    if isinstance(words, int):
        buffers.set_shape([None, words])
    return buffers


def header_checks(
    header: tf.Tensor, agreed: int, length: int | tf.Tensor
) -> list[BufferCheck]:
    """Return what must hold of words 0 to 3 of all workers, int32 `[N, 5]`."""
    flags = tf.bitwise.bitwise_and(header[:, FLAGS_WORD], ~1)
    return [
        BufferCheck("version of the wire format", header[:, 0], _MAGIC, _SAME_PROGRAM),
        BufferCheck("fingerprint of the tensors", header[:, 1], agreed, _SAME_PROGRAM),
        BufferCheck("unknown flags", flags, 0, _SAME_PROGRAM),
        BufferCheck("length in words", header[:, 3], length, _SAME_PROGRAM),
    ]


def checksum_check(buffers: tf.Tensor) -> BufferCheck:
    """Return what must hold of whole buffers, int32 `[N, words]`."""
    checksum = buffers[:, _CHECKSUM]
    # It is over all words but itself, whose factor is 9.
    difference = _checksum(buffers) - 10 * checksum
    return BufferCheck("difference of the checksum", difference, 0)


def _as_word(number: int | tf.Tensor) -> tf.Tensor:
    """Return an unsigned number as int32 of the same bits."""
    return tf.bitcast(tf.cast(number, tf.uint32), tf.int32)


def _checksum(buffers: tf.Tensor) -> tf.Tensor:
    """Sum of `(2 i + 1) * word[i]`, int32 `[N]`, of int32 `[N, words]`; it wraps."""
    factors = 2 * tf.range(tf.shape(buffers)[1]) + 1
    return tf.reduce_sum(buffers * factors, axis=1)


class SelectedEntries(NamedTuple):
    """What is sent of one tensor.

    Attributes:
        positions: positions, int32 `[k]`, distinct and ascending; None for a whole
            tensor.
        words: values there, coded by `value_types.encode`, int32 `[w]`.
    """

    positions: tf.Tensor | None
    words: tf.Tensor


def layout_fingerprint(layout: Sequence[TensorSpec]) -> int:
    """Return the checksum of what must be equal on all workers, 0 to 2**32 - 1."""
    return text_fingerprint(t.agreed for t in layout)


def sparse_words(layout: Sequence[TensorSpec], counts: Sequence) -> int | tf.Tensor:
    """Return the length of the buffer of a sparse step, in words.

    Args:
        layout: sizes and value types of all tensors of the step.
        counts: entries sent of each, ints or scalar int32 tensors.

    Returns:
        An int, or a scalar int64 tensor if one of the counts is a tensor.
    """
    return HEADER_WORDS + _body_words(layout, counts)


def uncompressed_words(layout: Sequence[TensorSpec]) -> int:
    """Return the words that exempt tensors have in a buffer, without its header."""
    return _body_words(layout, [t.size for t in layout])


def _body_words(layout: Sequence[TensorSpec], counts: Sequence) -> Any:
    pairs = [_streams(t, k) for t, k in zip(layout, counts, strict=True)]
    streams = [bits for pair in pairs for part in pair for bits in part]
    return sum(map(num_stream_words, streams))


def encode_sparse(
    layout: Sequence[TensorSpec],
    counts: Sequence,
    selections: Sequence[SelectedEntries],
    finite: tf.Tensor,
) -> tf.Tensor:
    """Pack the selections of all tensors into one buffer.

    Args:
        layout: sizes and value types of all tensors of the step.
        counts: entries sent of each, ints or scalar int32 tensors.
        selections: positions and words of each tensor.
        finite: scalar bool, whether this worker's gradient was finite.

    Returns:
        int32 `[sparse_words(layout, counts)]`.
    """
    body = []
    for tensor, k, selection in zip(layout, counts, selections, strict=True):
        if not tensor.uncompressed:
            body.append(elias_fano.encode(selection.positions, tensor.size, k))
        body.append(selection.words)
    length = sparse_words(layout, counts)
    return add_header(layout_fingerprint(layout), length, body, finite)


def decode_sparse(
    buffers: tf.Tensor, layout: Sequence[TensorSpec], counts: Sequence
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Sum the buffers of all workers.

    Workers are added one after the other: positions are distinct within one buffer,
    so the order of additions, and with it every bit of the result, is the same on all
    workers.

    Args:
        buffers: buffers of all workers, int32 `[num_workers, words]`, equal on all
            workers.
        layout: sizes and value types of all tensors of the step.
        counts: entries sent of each, ints or scalar int32 tensors.

    Returns:
        One dense float `[n]` per tensor, and the number of workers whose gradient was
        not finite, scalar int32.

    Raises:
        ValueError: if the buffers are known while tracing to be of another length.
        tf.errors.InvalidArgumentError: when run, if a buffer is not what was agreed
            upon or was damaged; nothing is returned then. Not within XLA, which drops
            assertions.
    """
    flags, entries = read_buffers(buffers, layout, counts)
    totals = [_add_up(t, *found) for t, found in zip(layout, entries, strict=True)]
    return totals, tf.reduce_sum(flags)


def read_buffers(
    buffers: tf.Tensor, layout: Sequence[TensorSpec], counts: Sequence
) -> tuple[tf.Tensor, list[tuple[tf.Tensor | None, tf.Tensor]]]:
    """Check the buffers of some workers, and return what they hold.

    Arguments and errors are those of `decode`.

    Returns:
        Which gradients were not finite, int32 `[N]`, 0 or 1; and of each tensor the
        positions, int32 `[N, k]`, ascending, and the values there. Of an exempt one,
        None and all values, `[N, n]`.
    """
    flags, entries, checks = parse_buffers(buffers, layout, counts)
    return require(checks, (flags, entries))


def parse_buffers(
    buffers: tf.Tensor, layout: Sequence[TensorSpec], counts: Sequence
) -> tuple[tf.Tensor, list[tuple[tf.Tensor | None, tf.Tensor]], list[BufferCheck]]:
    """Return what `read` does, unchecked, and what must hold before it may be used.

    Whatever the words are, the shapes are those.
    """
    streams, words = _sections(layout, counts)
    buffers = require_length(buffers, sum(words))
    head, *parts = tf.split(buffers, words, axis=1)
    checks = header_checks(head, layout_fingerprint(layout), sum(words))
    checks += _check_bits(buffers, [bits for part in streams for bits in part])
    entries = []
    for i, (tensor, k) in enumerate(zip(layout, counts, strict=True)):
        found, found_checks = _decode_tensor(tensor, k, *parts[2 * i : 2 * i + 2])
        entries.append(found)
        checks += [c._replace(what=f"{c.what} of tensor {i}") for c in found_checks]
    return head[:, FLAGS_WORD], entries, checks


def sent_positions(
    words: tf.Tensor, layout: Sequence[TensorSpec], counts: Sequence
) -> list[tf.Tensor | None]:
    """Return the positions, int32 `[k]`, that this worker's own buffer sends.

    Args:
        words: buffer of this worker as encoded here, int32 `[sparse_words(layout,
            counts)]`; it is not checked.
        layout: sizes and value types of all tensors of the step.
        counts: entries sent of each, ints or scalar int32 tensors.

    Returns:
        One per tensor; None if it is exempt.
    """
    parts = _own_parts(words, layout, counts)[::2]
    return [
        None if t.uncompressed else elias_fano.decode(part, t.size, k)[0][0]
        for t, k, part in zip(layout, counts, parts, strict=True)
    ]


def sent_values(
    words: tf.Tensor, layout: Sequence[TensorSpec], counts: Sequence
) -> list[tf.Tensor]:
    """Return the values, float `[k]`, that this worker's own buffer sends.

    The arguments are those of `positions`; of an exempt tensor all are returned.
    """
    parts = _own_parts(words, layout, counts)[1::2]
    return [
        value_types.decode_values(part, t.value_type, k, t.dtype)[0]
        for t, k, part in zip(layout, counts, parts, strict=True)
    ]


def _own_parts(
    words: tf.Tensor, layout: Sequence[TensorSpec], counts: Sequence
) -> list[tf.Tensor]:
    """Return the words of positions and values by turns, int32 `[1, w]`."""
    _, sections = _sections(layout, counts)
    return tf.split(words[tf.newaxis], sections, axis=1)[1:]


def _sections(layout: Sequence[TensorSpec], counts: Sequence) -> tuple[list, list]:
    """Return the bits of positions and values by turns, and the words of all sections.

    The header is the first section.
    """
    streams = [s for t, k in zip(layout, counts, strict=True) for s in _streams(t, k)]
    words = [HEADER_WORDS, *(sum(map(num_stream_words, s)) for s in streams)]
    return streams, words


def _streams(tensor: TensorSpec, k: int | tf.Tensor) -> tuple[list, list]:
    """Return the bits of a tensor's streams: of its positions, and of its values."""
    if tensor.uncompressed:
        return [], value_types.value_bits(tensor.value_type, tensor.size)
    positions = elias_fano.stream_bits(tensor.size, k)
    return positions, value_types.value_bits(tensor.value_type, k)


def _check_bits(buffers: tf.Tensor, streams: Sequence) -> list[BufferCheck]:
    excess = num_padding_bits_set(buffers, HEADER_WORDS, streams)
    return [
        checksum_check(buffers),
        BufferCheck("streams followed by bits that should be 0", excess, 0),
    ]


def _decode_tensor(
    tensor: TensorSpec, k: int | tf.Tensor, positions: tf.Tensor, words: tf.Tensor
) -> tuple[tuple[tf.Tensor | None, tf.Tensor], list[BufferCheck]]:
    """Return positions `[N, k]` (None if whole) and values, with their checks."""
    found = value_types.decode_values(words, tensor.value_type, k, tensor.dtype)
    checks = value_types.value_checks(found, words, tensor.value_type, k)
    if tensor.uncompressed:
        return (None, found), checks
    where, where_checks = elias_fano.decode(positions, tensor.size, k)
    return (where, found), where_checks + checks


def _add_up(
    tensor: TensorSpec, positions: tf.Tensor | None, found: tf.Tensor
) -> tf.Tensor:
    """Add N workers' entries in order, into `[n]`."""
    total = tf.zeros([tensor.size], tensor.dtype)
    if positions is None:
        for whole in tf.unstack(found):
            total += whole
        return total
    for where, part in zip(tf.unstack(positions), tf.unstack(found), strict=True):
        total = tf.tensor_scatter_nd_add(total, where[:, tf.newaxis], part)
    return total


# --- Encode and decode a dense step: everything, uncoded, in a vector for an
# all-reduce.
#
# A flag comes first, 1 if this worker's gradient was not finite, then all entries.


def dense_words(layout: Sequence[TensorSpec]) -> int:
    """Return the length of the vector, in words of 32 bits."""
    return -(-dense_entries(layout) * summed_dtype(layout).size // 4)


def dense_entries(layout: Sequence[TensorSpec]) -> int:
    """Return the length of the vector."""
    return 1 + sum(t.size for t in layout)


def encode_dense(
    tensors: Sequence[tf.Tensor], finite: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """Concatenate all tensors whole.

    Args:
        tensors: values of each tensor, float `[n]`.
        finite: scalar bool, whether this worker's gradient was finite.
        dtype: dtype of the vector, `summed_dtype` of the layout.

    Returns:
        `[1 + sum of n]`.
    """
    flag = tf.cast(tf.logical_not(finite), dtype)[tf.newaxis]
    return tf.concat([flag, *(tf.cast(t, dtype) for t in tensors)], axis=0)


def decode_dense(
    vector: tf.Tensor, layout: Sequence[TensorSpec]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Split the sum over workers of what `encode` made.

    Args:
        vector: vector of a dense step, float `[1 + sum of n]`.
        layout: sizes and dtypes of all tensors of the step.

    Returns:
        One float `[n]` per tensor, and the number of workers whose gradient was not
        finite, scalar int32.
    """
    flag, *parts = tf.split(vector, [1, *(t.size for t in layout)])
    totals = [tf.cast(p, t.dtype) for p, t in zip(parts, layout, strict=True)]
    return totals, tf.cast(flag[0], tf.int32)


def summed_dtype(layout: Sequence[TensorSpec]) -> tf.DType:
    """Return the type in which tensors are summed together.

    Of exempt ones alone that are coded it is bfloat16: there is no sum of codes. Beside
    others, nothing is coded.
    """
    if all(t.uncompressed and t.uncompressed_dtype for t in layout):
        return tf.bfloat16
    wide = any(t.dtype == tf.float64 for t in layout)
    return tf.float64 if wide else tf.float32
