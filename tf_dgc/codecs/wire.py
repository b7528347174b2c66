"""Encode and decode: everything one worker sends in a sparse step, as one buffer.

A vector of int32 words: a header, then positions and values of every tensor, as
docs/wire_format.md specifies.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.codecs import bitstream, elias_fano, header, value_types
from tf_dgc.codecs.checks import Check, gate
from tf_dgc.codecs.tensor import Tensor


class Selection(NamedTuple):
    """What is sent of one tensor.

    Attributes:
        positions: positions, int32 `[k]`, distinct and ascending; None for a whole
            tensor.
        words: values there, coded by `value_types.encode`, int32 `[w]`.
    """

    positions: tf.Tensor | None
    words: tf.Tensor


def fingerprint(layout: Sequence[Tensor]) -> int:
    """Return the checksum of what must be equal on all workers, 0 to 2**32 - 1."""
    return header.fingerprint(t.agreed for t in layout)


def sparse_words(layout: Sequence[Tensor], counts: Sequence) -> int | tf.Tensor:
    """Return the length of the buffer of a sparse step, in words.

    Args:
        layout: sizes and value types of all tensors of the step.
        counts: entries sent of each, ints or scalar int32 tensors.

    Returns:
        An int, or a scalar int64 tensor if one of the counts is a tensor.
    """
    return header.NUM_WORDS + _body_words(layout, counts)


def exempt_words(layout: Sequence[Tensor]) -> int:
    """Return the words that exempt tensors have in a buffer, without its header."""
    return _body_words(layout, [t.size for t in layout])


def _body_words(layout: Sequence[Tensor], counts: Sequence) -> Any:
    pairs = [_streams(t, k) for t, k in zip(layout, counts, strict=True)]
    streams = [bits for pair in pairs for part in pair for bits in part]
    return sum(map(bitstream.num_words, streams))


def encode(
    layout: Sequence[Tensor],
    counts: Sequence,
    selections: Sequence[Selection],
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
        if not tensor.exempt:
            body.append(elias_fano.encode(selection.positions, tensor.size, k))
        body.append(selection.words)
    length = sparse_words(layout, counts)
    return header.seal(fingerprint(layout), length, body, finite)


def decode(
    buffers: tf.Tensor, layout: Sequence[Tensor], counts: Sequence
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
    flags, entries = read(buffers, layout, counts)
    totals = [_add_up(t, *found) for t, found in zip(layout, entries, strict=True)]
    return totals, tf.reduce_sum(flags)


def read(
    buffers: tf.Tensor, layout: Sequence[Tensor], counts: Sequence
) -> tuple[tf.Tensor, list[tuple[tf.Tensor | None, tf.Tensor]]]:
    """Check the buffers of some workers, and return what they hold.

    Arguments and errors are those of `decode`.

    Returns:
        Which gradients were not finite, int32 `[N]`, 0 or 1; and of each tensor the
        positions, int32 `[N, k]`, ascending, and the values there. Of an exempt one,
        None and all values, `[N, n]`.
    """
    flags, entries, checks = inspect(buffers, layout, counts)
    return gate(checks, (flags, entries))


def inspect(
    buffers: tf.Tensor, layout: Sequence[Tensor], counts: Sequence
) -> tuple[tf.Tensor, list[tuple[tf.Tensor | None, tf.Tensor]], list[Check]]:
    """Return what `read` does, unchecked, and what must hold before it may be used.

    Whatever the words are, the shapes are those.
    """
    streams, words = _sections(layout, counts)
    buffers = header.of_length(buffers, sum(words))
    head, *parts = tf.split(buffers, words, axis=1)
    checks = header.check(head, fingerprint(layout), sum(words))
    checks += _check_bits(buffers, [bits for part in streams for bits in part])
    entries = []
    for i, (tensor, k) in enumerate(zip(layout, counts, strict=True)):
        found, found_checks = _decode_tensor(tensor, k, *parts[2 * i : 2 * i + 2])
        entries.append(found)
        checks += [c._replace(what=f"{c.what} of tensor {i}") for c in found_checks]
    return head[:, header.FLAGS], entries, checks


def positions(
    words: tf.Tensor, layout: Sequence[Tensor], counts: Sequence
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
        None if t.exempt else elias_fano.decode(part, t.size, k)[0][0]
        for t, k, part in zip(layout, counts, parts, strict=True)
    ]


def values(
    words: tf.Tensor, layout: Sequence[Tensor], counts: Sequence
) -> list[tf.Tensor]:
    """Return the values, float `[k]`, that this worker's own buffer sends.

    The arguments are those of `positions`; of an exempt tensor all are returned.
    """
    parts = _own_parts(words, layout, counts)[1::2]
    return [
        value_types.decode(part, t.value_type, k, t.dtype)[0]
        for t, k, part in zip(layout, counts, parts, strict=True)
    ]


def _own_parts(
    words: tf.Tensor, layout: Sequence[Tensor], counts: Sequence
) -> list[tf.Tensor]:
    """Return the words of positions and values by turns, int32 `[1, w]`."""
    _, sections = _sections(layout, counts)
    return tf.split(words[tf.newaxis], sections, axis=1)[1:]


def _sections(layout: Sequence[Tensor], counts: Sequence) -> tuple[list, list]:
    """Return the bits of positions and values by turns, and the words of all sections.

    The header is the first section.
    """
    streams = [s for t, k in zip(layout, counts, strict=True) for s in _streams(t, k)]
    words = [header.NUM_WORDS, *(sum(map(bitstream.num_words, s)) for s in streams)]
    return streams, words


def _streams(tensor: Tensor, k: int | tf.Tensor) -> tuple[list, list]:
    """Return the bits of a tensor's streams: of its positions, and of its values."""
    if tensor.exempt:
        return [], value_types.stream_bits(tensor.value_type, tensor.size)
    positions = elias_fano.stream_bits(tensor.size, k)
    return positions, value_types.stream_bits(tensor.value_type, k)


def _check_bits(buffers: tf.Tensor, streams: Sequence) -> list[Check]:
    excess = bitstream.num_excess(buffers, header.NUM_WORDS, streams)
    return [
        header.check_sum(buffers),
        Check("streams followed by bits that should be 0", excess, 0),
    ]


def _decode_tensor(
    tensor: Tensor, k: int | tf.Tensor, positions: tf.Tensor, words: tf.Tensor
) -> tuple[tuple[tf.Tensor | None, tf.Tensor], list[Check]]:
    """Return positions `[N, k]` (None if whole) and values, with their checks."""
    found = value_types.decode(words, tensor.value_type, k, tensor.dtype)
    checks = value_types.checks(found, words, tensor.value_type, k)
    if tensor.exempt:
        return (None, found), checks
    where, where_checks = elias_fano.decode(positions, tensor.size, k)
    return (where, found), where_checks + checks


def _add_up(tensor: Tensor, positions: tf.Tensor | None, found: tf.Tensor) -> tf.Tensor:
    """Add N workers' entries in order, into `[n]`."""
    total = tf.zeros([tensor.size], tensor.dtype)
    if positions is None:
        for whole in tf.unstack(found):
            total += whole
        return total
    for where, part in zip(tf.unstack(positions), tf.unstack(found), strict=True):
        total = tf.tensor_scatter_nd_add(total, where[:, tf.newaxis], part)
    return total
