"""Regions: the entries of all tensors are split among workers, by position."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc.codecs.tensor import Tensor
from tf_dgc.collectives.requests import Form
from tf_dgc.collectives.space import Space


class _Split(NamedTuple):
    """How the K entries of a worker are split, NumPy's or tensors.

    Attributes:
        ranks: number of the first entry of each region, int64 `[N]`.
        rooms: entries of each tensor that there is room for, int32 `[N, tensors]`.
        capacity: entries that there is room for in any region, scalar int32.
    """

    ranks: Any
    rooms: Any
    capacity: Any


class Regions:
    """Where each worker's region is, and what travels to its owner and from it.

    All tensors that are not exempt stand one behind the other, and a worker's K entries
    are split evenly in this order: region i of N begins with number i K / N. In which
    tensor that is, follows from the form; where in it, from all workers' positions.

    A message, and what an owner makes of those that it has received, has room for
    `1 + slack` times the entries that an even split gives, of each tensor in the
    region. They are buffers like others, of one tensor, the whole space; in what is
    left of the room stand positions behind it, of zeros.

    Args:
        form: form of a worker's words, with a tensor that is not exempt.
        num_workers: number of workers, N.
        slack: share of room beyond an even split.

    Attributes:
        form: form of a worker's words.
        space: space of all places.
        size: number of places.
        num_workers: number of workers, N.
        rooms: entries of each tensor that there is room for, int32 `[N, tensors]`.
        capacity: entries of a message, an int or a scalar int32 tensor.
        message: form of messages, and of what owners send.

    Raises:
        ValueError: if the space is too large for the positions on the wire.
    """

    def __init__(self, form: Form, num_workers: int, slack: float):
        self.form = form
        self.space = Space(form)
        self.size = sum(self.space.sizes)
        self.num_workers = num_workers
        if all(isinstance(k, int) for k in form.counts):
            with tf.init_scope():  # numbers, not tensors of the graph
                split = _split(Space(form).counts, num_workers, slack)
            self._ranks, self.rooms, capacity = (np.array(part) for part in split)
            self.capacity = behind = int(capacity)
        else:
            split = _split(self.space.counts, num_workers, slack)
            self._ranks, self.rooms, self.capacity = split
            behind = self.size
        self.message = _form_of_messages(self, behind)

    def offsets(self, positions: tf.Tensor) -> tf.Tensor:
        """Return where one worker would let regions begin.

        Args:
            positions: places of its entries, int64 `[K]`.

        Returns:
            From the beginning of the tensor, of all regions but the first, float32
            `[N - 1]`; 0 for those that begin with the first entry of a tensor.
        """
        tensors, firsts = self._tensors_of_ranks()
        places = tf.gather(positions, self._ranks[1:]) - tf.gather(
            self.space.bases, tensors
        )
        return tf.cast(tf.where(firsts, tf.zeros_like(places), places), tf.float32)

    def starts(self, offsets: tf.Tensor) -> tf.Tensor:
        """Return where regions begin, ascending, int64 `[N]`.

        Args:
            offsets: sum over workers of `offsets`, float32 `[N - 1]`.
        """
        tensors, _ = self._tensors_of_ranks()
        mean = tf.cast(tf.floor(offsets / self.num_workers), tf.int64)
        last = tf.gather(tf.constant(self.space.sizes, tf.int64), tensors) - 1
        places = tf.clip_by_value(mean, tf.zeros_like(last), last)
        places = tf.sort(places + tf.gather(self.space.bases, tensors))
        starts = tf.concat([tf.zeros([1], tf.int64), places], axis=0)
        # Regions that nothing is left for are where the next one begins.
        return tf.gather(starts, tf.searchsorted(self._ranks, self._ranks))

    def owners(self, starts: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Return in which region each place is, int32."""
        return tf.searchsorted(starts, positions, side="right") - 1

    def _tensors_of_ranks(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return in which tensor regions begin, and whether with its first entry."""
        begins = tf.cumsum(self.space.counts, exclusive=True)
        ranks = self._ranks[1:]
        tensors = tf.searchsorted(begins, ranks, side="right") - 1
        return tensors, tf.equal(tf.gather(begins, tensors), ranks)


def _split(counts: tf.Tensor, num_workers: int, slack: float) -> _Split:
    """Split evenly as many entries of each tensor, int64 `[tensors]`."""
    ends = tf.cumsum(counts)
    ranks = tf.range(num_workers + 1, dtype=tf.int64) * ends[-1] // num_workers
    low = tf.maximum(ranks[:-1, tf.newaxis], ends - counts)
    high = tf.minimum(ranks[1:, tf.newaxis], ends)
    shares = tf.cast(tf.maximum(high - low, 0), tf.float64)
    wider = tf.math.ceil(shares * (1 + slack))  # perhaps more than any int holds
    rooms = tf.cast(tf.minimum(wider, tf.cast(counts, tf.float64)), tf.int32)
    capacity = tf.reduce_max(tf.reduce_sum(rooms, axis=1))
    return _Split(ranks[:-1], rooms, capacity)


def _form_of_messages(regions: Regions, behind: int) -> Form:
    """Return it, of positions in the space, and so many behind it."""
    size = regions.size + behind
    if size > 2**31 - 1:
        raise ValueError(
            "Regions have at most 2**31 - 1 places, some of which are for what is left "
            "over of the room. Use another `exchange`, as `gtopk`. Received: "
            f"{regions.size} entries in all tensors"
        )
    tensor = Tensor("entries of a region", (size,), regions.space.dtype, False)
    return Form([tensor], [regions.capacity])
