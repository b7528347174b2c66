"""Pieces: what is large goes in pieces of bounded size, each when the last has come.

TensorFlow's heartbeats share the connections of its collectives. Behind a whole model
on a slow link they come too late, and a healthy worker counts as gone. A piece is
queued only when the one before has come, so that no more than one is ever before a
heartbeat. Each is a collective of its own, so progress is seen.

There are no loops in the graph: TensorFlow makes the name of a loop part of a
collective's key, and the names in the workers' graphs may differ.
"""

from collections.abc import Callable

import tensorflow as tf

CHUNK_BYTES = (
    2**20
)  # 0.8 s at 10 Mbit/s, which is less than half a heartbeat's interval

Launch = Callable[[tf.Tensor], tf.Tensor]


def chunked_all_reduce(
    launch: Launch, tensor: tf.Tensor, *, size: int = CHUNK_BYTES
) -> tf.Tensor:
    """Sum a tensor over all replicas, in as many collectives as it takes.

    Args:
        launch: function that sums a tensor in one collective.
        tensor: tensor of this replica, equal in dtype and shape on all. If the shape is
            not known while tracing, it is sent whole.
        size: largest size of a piece in bytes, about.

    Returns:
        The sum, of the shape of `tensor`.
    """
    count = _count(tensor, size)
    if count <= 1:
        return launch(tensor)
    total = tf.concat(_one_by_one(launch, tensor, count), axis=0)
    return tf.reshape(total, tensor.shape)


def chunked_all_reduce_of_unknown_length(
    launch: Launch, vector: tf.Tensor, num_bytes: int, *, size: int = CHUNK_BYTES
) -> tf.Tensor:
    """Do what `all_reduce` does with a vector whose length the graph computes.

    Args:
        launch: function as in `all_reduce`.
        vector: vector of this replica, `[n]`, n equal on all.
        num_bytes: number of bytes that the vector has, about.
        size: largest size of a piece in bytes, about.
    """
    count = -(-num_bytes // size)
    if count <= 1:
        return launch(vector)
    return tf.concat(_one_by_one(launch, vector, count), axis=0)


def chunked_all_gather(
    launch: Launch, tensor: tf.Tensor, num_replicas: int, *, size: int = CHUNK_BYTES
) -> tf.Tensor:
    """Concatenate the tensors of all replicas along the first axis, as `all_reduce`.

    Args:
        launch: function that concatenates tensors in one collective.
        tensor: tensor of this replica, of rank 1 or more.
        num_replicas: number of replicas that take part.
        size: largest size of a piece in bytes, about.
    """
    count = _count(tensor, size)
    if count <= 1:
        return launch(tensor)
    rows = _gather_rows(launch, tensor, num_replicas, count)
    first, *others = tensor.shape
    return tf.reshape(rows, [num_replicas * first, *others])


def chunked_all_gather_of_unknown_length(
    launch: Launch,
    vector: tf.Tensor,
    num_replicas: int,
    bound: int,
    *,
    size: int = CHUNK_BYTES,
) -> tf.Tensor:
    """Do what `all_gather` does with a vector whose length the graph computes.

    Args:
        launch: function as in `all_gather`.
        vector: vector of this replica, `[n]`, n equal on all, and 1 or more.
        num_replicas: number of replicas that take part.
        bound: largest size of the vector in bytes; with more, pieces get larger.
        size: largest size of a piece in bytes, about.
    """
    limits: list[int] = []  # above the j-th, 2**(j + 1) pieces
    while size << len(limits) < bound:
        limits.append((size << len(limits)) // vector.dtype.size)

    def pieces(count: int) -> Callable[[], tf.Tensor]:
        if count == 1:
            return lambda: launch(vector)
        return lambda: tf.reshape(
            _gather_rows(launch, vector, num_replicas, count), [-1]
        )

    if not limits:
        return launch(vector)
    above = tf.cast(tf.size(vector) > tf.constant(limits), tf.int32)
    branches = [pieces(2**j) for j in range(len(limits) + 1)]
    return tf.switch_case(tf.reduce_sum(above), branches)


def chunked_all_to_all(
    launch: Launch, rows: tf.Tensor, *, size: int = CHUNK_BYTES
) -> tf.Tensor:
    """Hand row i to the i-th replica, and return what all have for this one.

    Args:
        launch: function that does so in one collective.
        rows: row for each replica, `[members, ...]`, as in `all_reduce`.
        size: largest size of a piece in bytes, about.
    """
    count = _count(rows, size)
    if count <= 1:
        return launch(rows)
    flat = tf.reshape(rows, [rows.shape[0], -1])
    width = -(-flat.shape[1] // count)
    replies: list[tf.Tensor] = []
    for begin in range(0, flat.shape[1], width):
        with tf.control_dependencies(replies[-1:]):
            piece = tf.identity(flat[:, begin : begin + width])
        replies.append(launch(piece))
    return tf.reshape(tf.concat(replies, axis=1), rows.shape)


def _count(tensor: tf.Tensor, size: int) -> int:
    """Return how many pieces a tensor goes in; 1 if its shape is not known."""
    entries = tensor.shape.num_elements() or 0
    return -(-entries * tensor.dtype.size // size)


def _gather_rows(
    launch: Launch, tensor: tf.Tensor, num_replicas: int, count: int
) -> tf.Tensor:
    """Return the flat tensors of all replicas, `[num_replicas, n]`."""
    replies = _one_by_one(launch, tensor, count)
    return tf.concat([tf.reshape(r, [num_replicas, -1]) for r in replies], axis=1)


def _one_by_one(launch: Launch, tensor: tf.Tensor, count: int) -> list[tf.Tensor]:
    """Return the replies to all pieces, of which the last has what is left over."""
    flat = tf.reshape(tensor, [-1])
    length = (flat.shape[0] or tf.size(flat)) // count
    replies: list[tf.Tensor] = []
    for i in range(count):
        end = (i + 1) * length if i + 1 < count else None
        with tf.control_dependencies(replies[-1:]):
            piece = tf.identity(flat[i * length : end])
        replies.append(launch(piece))
    return replies
