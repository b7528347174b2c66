"""Buffers: everything one worker sends in a step (wire_format.md).

The buffer of a sparse step is a vector of int32 words: a header, then positions and
values of every tensor. The vector of a dense step is a flag and all entries.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc.codecs import elias_fano, value_types
from tf_dgc.codecs.bits import num_padding_bits_set, num_stream_words
from tf_dgc.codecs.checks import BufferCheck, all_hold, require
from tf_dgc.codecs.tensor_spec import TensorSpec

Counts: TypeAlias = Sequence[int | tf.Tensor]
"""Entries of each tensor in a buffer, ints or scalar int32 tensors."""

TensorEntries: TypeAlias = tuple[tf.Tensor | None, tf.Tensor]
"""Positions, `[N, k]`, and values, `[N, k]`, of N workers' entries of a tensor.

For an uncompressed tensor, None and all values, `[N, n]`.
"""

_StreamBits: TypeAlias = Sequence[int | tf.Tensor]

_MAGIC = 0x44474301
HEADER_WORDS = 5
FLAGS_WORD = 2  # index of the word that is 0 if the gradient was finite
_CHECKSUM = 4  # index of the checksum
_SAME_PROGRAM = "All workers must run the same version of tf_dgc on the same model."


class SelectedEntries(NamedTuple):
    """Entries of one tensor to send."""

    positions: tf.Tensor | None  # int32 `[k]`, distinct and ascending; None: all
    words: tf.Tensor  # by `value_types.encode_values`, int32 `[w]`


# Sparse steps


def encode_sparse(
    layout: Sequence[TensorSpec],
    counts: Counts,
    selections: Sequence[SelectedEntries],
    finite: tf.Tensor,
) -> tf.Tensor:
    """Pack the selected entries of all tensors into one buffer, int32 `[words]`."""
    body = []
    for tensor, k, selection in zip(layout, counts, selections, strict=True):
        if not tensor.uncompressed:
            body.append(elias_fano.encode(selection.positions, tensor.size, k))
        body.append(selection.words)
    length = sparse_words(layout, counts)
    return add_header(layout_fingerprint(layout), length, body, finite)


def decode_sparse(
    buffers: tf.Tensor, layout: Sequence[TensorSpec], counts: Counts
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Sum the buffers of all workers, int32 `[num_workers, words]`.

    Returns a dense float `[n]` per tensor, and the number of gradients not finite. Adds
    one worker after the other: positions within a buffer are distinct, so every bit is
    the same on all workers. Damaged buffers, and those of another model, raise
    `InvalidArgumentError` at run time, but not within XLA, which drops assertions.
    """
    flags, entries = read_buffers(buffers, layout, counts)
    totals = []
    for tensor, (positions, values) in zip(layout, entries, strict=True):
        total = tf.zeros([tensor.size], tensor.dtype)
        for worker, worker_values in enumerate(tf.unstack(values)):
            if positions is None:
                total += worker_values
            else:
                indices = positions[worker][:, tf.newaxis]
                total = tf.tensor_scatter_nd_add(total, indices, worker_values)
        totals.append(total)
    return totals, tf.reduce_sum(flags)


def read_buffers(
    buffers: tf.Tensor, layout: Sequence[TensorSpec], counts: Counts
) -> tuple[tf.Tensor, list[TensorEntries]]:
    """Check some workers' buffers; return flags, `[N]`, and entries, ascending."""
    flags, entries, checks = parse_buffers(buffers, layout, counts)
    content: tuple[tf.Tensor, list[TensorEntries]] = require(checks, (flags, entries))
    return content


def parse_buffers(
    buffers: tf.Tensor, layout: Sequence[TensorSpec], counts: Counts
) -> tuple[tf.Tensor, list[TensorEntries], list[BufferCheck]]:
    """Return the result of `read_buffers` unchecked, and its checks.

    The shapes are right even if the words are not.
    """
    streams, section_words = _sections(layout, counts)
    buffers = require_length(buffers, sum(section_words))
    header, *sections = tf.split(buffers, section_words, axis=1)
    checks = header_checks(header, layout_fingerprint(layout), sum(section_words))
    stream_bits = [bits for section in streams for bits in section]
    excess = num_padding_bits_set(buffers, HEADER_WORDS, stream_bits)
    checks += [
        checksum_check(buffers),
        BufferCheck("streams followed by bits that should be 0", excess, 0),
    ]
    entries = []
    for i, (tensor, k) in enumerate(zip(layout, counts, strict=True)):
        positions, words = sections[2 * i : 2 * i + 2]
        tensor_entries, tensor_checks = _decode_tensor(tensor, k, positions, words)
        entries.append(tensor_entries)
        checks += [c._replace(what=f"{c.what} of tensor {i}") for c in tensor_checks]
    return header[:, FLAGS_WORD], entries, checks


def sent_positions(
    words: tf.Tensor, layout: Sequence[TensorSpec], counts: Counts
) -> list[tf.Tensor | None]:
    """Return each tensor's positions in this worker's own buffer; None for all."""
    sections = _body_sections(words, layout, counts)[::2]
    return [
        None if t.uncompressed else elias_fano.decode(section, t.size, k)[0][0]
        for t, k, section in zip(layout, counts, sections, strict=True)
    ]


def sent_values(
    words: tf.Tensor, layout: Sequence[TensorSpec], counts: Counts
) -> list[tf.Tensor]:
    """Return each tensor's values in this worker's own buffer, which is not checked."""
    sections = _body_sections(words, layout, counts)[1::2]
    return [
        value_types.decode_values(section, t.value_type, k, t.dtype)[0]
        for t, k, section in zip(layout, counts, sections, strict=True)
    ]


def sparse_words(layout: Sequence[TensorSpec], counts: Counts) -> int | tf.Tensor:
    """Return a sparse buffer's length; scalar int64 if any count is a tensor."""
    return sum(_sections(layout, counts)[1])


def uncompressed_words(layout: Sequence[TensorSpec]) -> int:
    """Return the words of uncompressed tensors in a buffer, without its header."""
    _, (_, *words) = _sections(layout, [t.size for t in layout])
    total: int = sum(words)
    return total


def layout_fingerprint(layout: Sequence[TensorSpec]) -> int:
    """Return the fingerprint of a sparse step's tensors, 0 to 2**32 - 1."""
    return text_fingerprint(t.signature for t in layout)


def _body_sections(
    words: tf.Tensor, layout: Sequence[TensorSpec], counts: Counts
) -> list[tf.Tensor]:
    """Return the words of positions and of values in turn, int32 `[1, w]`."""
    _, section_words = _sections(layout, counts)
    sections: list[tf.Tensor] = tf.split(words[tf.newaxis], section_words, axis=1)
    return sections[1:]


def _sections(
    layout: Sequence[TensorSpec], counts: Counts
) -> tuple[list[_StreamBits], list[int | tf.Tensor]]:
    """Return the bits of each stream, and the words of each section.

    The header is the first section and has no streams. Each tensor has a section of
    positions and a section of values.
    """
    streams: list[_StreamBits] = []
    for tensor, k in zip(layout, counts, strict=True):
        if tensor.uncompressed:
            streams += [[], value_types.value_bits(tensor.value_type, tensor.size)]
        else:
            streams.append(elias_fano.stream_bits(tensor.size, k))
            streams.append(value_types.value_bits(tensor.value_type, k))
    words = [HEADER_WORDS, *(sum(map(num_stream_words, s)) for s in streams)]
    return streams, words


def _decode_tensor(
    tensor: TensorSpec, k: int | tf.Tensor, positions: tf.Tensor, words: tf.Tensor
) -> tuple[TensorEntries, list[BufferCheck]]:
    values = value_types.decode_values(words, tensor.value_type, k, tensor.dtype)
    checks = value_types.value_checks(values, words, tensor.value_type, k)
    if tensor.uncompressed:
        return (None, values), checks
    positions, position_checks = elias_fano.decode(positions, tensor.size, k)
    return (positions, values), position_checks + checks


# Headers: version, fingerprint, flags, length, checksum


def add_header(
    fingerprint: int,
    length: int | tf.Tensor,
    body: Sequence[tf.Tensor],
    finite: tf.Tensor,
) -> tf.Tensor:
    """Put a header before int32 vectors; `length` includes the header.

    The fingerprint is that of what must be the same on all workers.
    """
    header = tf.stack(
        [
            _as_word(_MAGIC),
            _as_word(fingerprint),
            tf.cast(tf.logical_not(finite), tf.int32),
            _as_word(length),
        ]
    )
    checksum = _checksum(tf.concat([header, [0], *body], axis=0)[tf.newaxis])
    return tf.concat([header, checksum, *body], axis=0)


def remove_header(
    buffers: tf.Tensor, fingerprint: int, length: int | tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Check all headers; return the words after them, and how many were not finite."""
    buffers = require_length(buffers, length)
    checks = header_checks(buffers[:, :HEADER_WORDS], fingerprint, length)
    checks.append(checksum_check(buffers))
    buffers = require(checks, buffers)
    return buffers[:, HEADER_WORDS:], tf.reduce_sum(buffers[:, FLAGS_WORD])


def add_nonfinite_flag(words: tf.Tensor, finite: tf.Tensor) -> tf.Tensor:
    """Set a buffer's flag for non-finite gradients unless `finite`, a scalar bool."""
    increment = tf.cast(tf.logical_not(finite), tf.int32) * (1 - words[FLAGS_WORD])
    changes = tf.stack([increment, (2 * FLAGS_WORD + 1) * increment])
    return tf.tensor_scatter_nd_add(words, [[FLAGS_WORD], [_CHECKSUM]], changes)


def is_valid(words: tf.Tensor, fingerprint: int) -> tf.Tensor:
    """Return whether a buffer's header and checksum are valid, a scalar bool."""
    header = words[tf.newaxis, :HEADER_WORDS]
    checks = [
        *header_checks(header, fingerprint, tf.size(words)),
        checksum_check(words[tf.newaxis]),
    ]
    return all_hold(checks)


def invalidate_unless(fingerprint: int, words: tf.Tensor) -> tf.Tensor:
    """Invalidate a buffer of another model, which might be valid to other workers."""
    expected = tf.stack([_as_word(_MAGIC), _as_word(fingerprint)])
    is_same = tf.reduce_all(tf.equal(words[:2], expected))
    return tf.where(is_same, words, invalidate(words))


def invalidate(words: tf.Tensor) -> tf.Tensor:
    """Make the checksum of a buffer wrong, so that every worker rejects it.

    All other words stay, so that the error can say what is wrong with them.
    """
    index = [[_CHECKSUM]]
    without = tf.tensor_scatter_nd_update(words, index, [0])
    wrong = _checksum(without[tf.newaxis]) + 1
    return tf.tensor_scatter_nd_update(words, index, wrong)


def text_fingerprint(items: Iterable[str]) -> int:
    """Return the checksum of texts without spaces, 0 to 2**32 - 1."""
    return zlib.crc32(" ".join(["tf_dgc 1", *items]).encode("ascii"))


def require_length(buffers: tf.Tensor, words: int | tf.Tensor) -> tf.Tensor:
    """Return the buffers; reading them raises unless they have this length."""
    length = buffers.shape[1]
    if length is not None and isinstance(words, int):
        if length != words:
            raise ValueError(
                f"The buffers have the wrong length. {_SAME_PROGRAM} "
                f"Received: {length} words, expected: {words}"
            )
        return buffers
    received = tf.repeat(tf.shape(buffers)[1], buffers.shape[0])
    check = BufferCheck("words that arrived", received, words, _SAME_PROGRAM)
    buffers = require([check], buffers)
    if isinstance(words, int):
        buffers.set_shape([None, words])
    return buffers


def header_checks(
    header: tf.Tensor, fingerprint: int, length: int | tf.Tensor
) -> list[BufferCheck]:
    """Return the checks of all workers' headers, int32 `[N, 5]`, but the checksum."""
    flags = tf.bitwise.bitwise_and(header[:, FLAGS_WORD], ~1)
    return [
        BufferCheck("version of the wire format", header[:, 0], _MAGIC, _SAME_PROGRAM),
        BufferCheck(
            "fingerprint of the tensors", header[:, 1], fingerprint, _SAME_PROGRAM
        ),
        BufferCheck("unknown flags", flags, 0, _SAME_PROGRAM),
        BufferCheck("length in words", header[:, 3], length, _SAME_PROGRAM),
    ]


def checksum_check(buffers: tf.Tensor) -> BufferCheck:
    """Return the check of the checksums of whole buffers, int32 `[N, words]`."""
    checksum = buffers[:, _CHECKSUM]
    # A checksum covers all words but itself, whose factor is 9 in `_checksum`.
    difference = _checksum(buffers) - 10 * checksum
    return BufferCheck("difference of the checksum", difference, 0)


def _as_word(number: int | tf.Tensor) -> tf.Tensor:
    """Return an unsigned number as int32 of the same bits."""
    return tf.bitcast(tf.cast(number, tf.uint32), tf.int32)


def _checksum(buffers: tf.Tensor) -> tf.Tensor:
    """Return the sum of `(2 i + 1) * word[i]`, int32 `[N]`, which wraps around."""
    factors = 2 * tf.range(tf.shape(buffers)[1]) + 1
    return tf.reduce_sum(buffers * factors, axis=1)


# Dense steps


def encode_dense(
    tensors: Sequence[tf.Tensor], finite: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """Concatenate a flag, 1 if not finite, and all tensors, `[n]`, of a dense step."""
    flag = tf.cast(tf.logical_not(finite), dtype)[tf.newaxis]
    return tf.concat([flag, *(tf.cast(t, dtype) for t in tensors)], axis=0)


def decode_dense(
    vector: tf.Tensor, layout: Sequence[TensorSpec]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Split the sum over workers of the results of `encode_dense`."""
    flag, *parts = tf.split(vector, [1, *(t.size for t in layout)])
    totals = [tf.cast(p, t.dtype) for p, t in zip(parts, layout, strict=True)]
    return totals, tf.cast(flag[0], tf.int32)


def dense_words(layout: Sequence[TensorSpec]) -> int:
    """Return the length of a dense step's vector in words of 32 bits."""
    words: int = -(-dense_entries(layout) * summed_dtype(layout).size // 4)
    return words


def dense_entries(layout: Sequence[TensorSpec]) -> int:
    """Return the length of a dense step's vector."""
    return 1 + sum(t.size for t in layout)


def summed_dtype(layout: Sequence[TensorSpec]) -> tf.DType:
    """Return the dtype in which a dense step sums its tensors.

    bfloat16 if all tensors are uncompressed ones with an `uncompressed_dtype`: codes
    cannot be summed. Together with other tensors, they are summed unrounded.
    """
    if all(t.uncompressed and t.uncompressed_dtype for t in layout):
        return tf.bfloat16
    has_float64 = any(t.dtype == tf.float64 for t in layout)
    return tf.float64 if has_float64 else tf.float32
