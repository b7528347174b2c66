"""Collectives of large tensors in bounded chunks, one at a time.

TensorFlow's heartbeats share the connections of its collectives. After a whole model on
a slow link they come too late, and a healthy worker counts as gone. A chunk is queued
only when the previous one has arrived, so that at most one is ahead of a heartbeat.
Each chunk is a collective of its own, so progress is visible.

There are no loops in the graph: TensorFlow makes the name of a loop part of a
collective's key, and the names may differ between the workers' graphs.
"""

from collections.abc import Callable

import tensorflow as tf

CHUNK_BYTES = 2**20  # 0.8 s at 10 Mbit/s, less than half a heartbeat's interval

LaunchFunction = Callable[[tf.Tensor], tf.Tensor]


def chunked_all_reduce(
    launch: LaunchFunction, tensor: tf.Tensor, *, size: int = CHUNK_BYTES
) -> tf.Tensor:
    """Sum a tensor over all replicas, in chunks of about `size` bytes."""
    # Dtype and shape are equal on all. If the shape is not known yet, it is sent whole.
    count = _count(tensor, size)
    if count <= 1:
        return launch(tensor)
    total = tf.concat(_one_by_one(launch, tensor, count), axis=0)
    return tf.reshape(total, tensor.shape)


def chunked_all_reduce_of_unknown_length(
    launch: LaunchFunction,
    vector: tf.Tensor,
    num_bytes: int,
    *,
    size: int = CHUNK_BYTES,
) -> tf.Tensor:
    """Sum a vector `[n]` of about `num_bytes` whose length the graph computes."""
    count = -(-num_bytes // size)
    if count <= 1:
        return launch(vector)
    return tf.concat(_one_by_one(launch, vector, count), axis=0)


def chunked_all_gather(
    launch: LaunchFunction,
    tensor: tf.Tensor,
    num_replicas: int,
    *,
    size: int = CHUNK_BYTES,
) -> tf.Tensor:
    """Concatenate the tensors of all replicas along the first axis, chunk by chunk."""
    count = _count(tensor, size)
    if count <= 1:
        return launch(tensor)
    rows = _gather_rows(launch, tensor, num_replicas, count)
    first, *others = tensor.shape
    return tf.reshape(rows, [num_replicas * first, *others])


def chunked_all_gather_of_unknown_length(
    launch: LaunchFunction,
    vector: tf.Tensor,
    num_replicas: int,
    bound: int,
    *,
    size: int = CHUNK_BYTES,
) -> tf.Tensor:
    """Concatenate vectors `[n]`, n >= 1 computed by the graph and equal on all."""
    # Above `bound` bytes, chunks get larger than `size`.
    limits: list[int] = []  # above the jth, 2**(j + 1) chunks
    while size << len(limits) < bound:
        limits.append((size << len(limits)) // vector.dtype.size)

    def gather_in(count: int) -> Callable[[], tf.Tensor]:
        if count == 1:
            return lambda: launch(vector)
        return lambda: tf.reshape(
            _gather_rows(launch, vector, num_replicas, count), [-1]
        )

    if not limits:
        return launch(vector)
    above = tf.cast(tf.size(vector) > tf.constant(limits), tf.int32)
    branches = [gather_in(2**j) for j in range(len(limits) + 1)]
    return tf.switch_case(tf.reduce_sum(above), branches)


def chunked_all_to_all(
    launch: LaunchFunction, rows: tf.Tensor, *, size: int = CHUNK_BYTES
) -> tf.Tensor:
    """Send row i of `[members, ...]` to replica i; return the rows sent to this one."""
    count = _count(rows, size)
    if count <= 1:
        return launch(rows)
    flat = tf.reshape(rows, [rows.shape[0], -1])
    width = -(-flat.shape[1] // count)
    replies: list[tf.Tensor] = []
    for begin in range(0, flat.shape[1], width):
        with tf.control_dependencies(replies[-1:]):
            chunk = tf.identity(flat[:, begin : begin + width])
        replies.append(launch(chunk))
    return tf.reshape(tf.concat(replies, axis=1), rows.shape)


def _count(tensor: tf.Tensor, size: int) -> int:
    """Return the number of chunks of a tensor; 1 or less if its shape is not known."""
    entries = tensor.shape.num_elements() or 0
    return -(-entries * tensor.dtype.size // size)


def _gather_rows(
    launch: LaunchFunction, tensor: tf.Tensor, num_replicas: int, count: int
) -> tf.Tensor:
    """Return the flat tensors of all replicas, `[num_replicas, n]`."""
    replies = _one_by_one(launch, tensor, count)
    return tf.concat([tf.reshape(r, [num_replicas, -1]) for r in replies], axis=1)


def _one_by_one(
    launch: LaunchFunction, tensor: tf.Tensor, count: int
) -> list[tf.Tensor]:
    """Return the replies to all chunks; the last chunk contains the remainder."""
    flat = tf.reshape(tensor, [-1])
    length = (flat.shape[0] or tf.size(flat)) // count
    replies: list[tf.Tensor] = []
    for i in range(count):
        end = (i + 1) * length if i + 1 < count else None
        with tf.control_dependencies(replies[-1:]):
            chunk = tf.identity(flat[i * length : end])
        replies.append(launch(chunk))
    return replies
