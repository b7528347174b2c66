"""TensorFlow's collectives of groups of replicas, under keys of their own."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils
from tensorflow.python.ops import collective_ops

from tf_dgc._internals.launching import (
    CollectiveAllReduce,
    Counters,
    collective_key,
    remember_launch,
)

Members = tuple[int, ...]


class GroupLauncher:
    """Launches the collectives of one replica in one group.

    TensorFlow counts groups' keys in each process (`CollectiveKeys`), so that different
    groups would get the same: here a group's key follows from its members. All groups'
    collectives of a replica stand in one order, that of the strategy's own
    (`_ordering_token`): with the same key, two at once would get each other's values.

    Args:
        launcher: TensorFlow's `CollectiveReplicaLauncher` of the replica.
        members: indices of the replicas of the group, ascending.
        rank: place of this replica among them.
        lane: number of what goes on beside the steps; 0 for the steps themselves.
    """

    def __init__(self, launcher: Any, members: Members, rank: int, lane: int = 0):
        self._launcher = launcher
        self._members = members
        self._rank = rank
        self._lane = lane
        self.counters = Counters()
        self.kinds: set[tuple] = set()

    @property
    def on_gpu(self) -> bool:
        """Whether the replica is on a GPU, which has connections of its own."""
        return "GPU" in self._launcher._device

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """Launch one `CollectiveReduceV2` that sums."""
        return self._launch("sum", tensor, collective_ops.all_reduce_v2)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Launch one `CollectiveGatherV2`, which concatenates along the first axis."""
        return self._move("gather", tensor, collective_ops.all_gather_v2)

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        """Launch one `CollectiveAllToAllV2` of a row for each member."""
        return self._move("spread", tensor, collective_ops.all_to_all_v2)

    def broadcast(self, tensor: tf.Tensor, source: int) -> tf.Tensor:
        """Launch one `CollectiveBcastSendV2` or `CollectiveBcastRecvV2`.

        The source is part of the key: TensorFlow remembers that of the first time.
        """

        def launch(values: tf.Tensor, *keys: Any, **options: Any) -> tf.Tensor:
            del options["ordering_token"]  # which this collective does not know
            with tf.control_dependencies([values, *self._pass_token()]):
                if self._members[self._rank] == source:
                    got = collective_ops.broadcast_send_v2(values, *keys, **options)
                else:
                    got = collective_ops.broadcast_recv_v2(
                        tf.shape(values), values.dtype, *keys, **options
                    )
            with tf.control_dependencies([got]):
                passed = self._pass_token()
            with tf.control_dependencies(passed):
                return tf.ensure_shape(got, values.shape)

        return self._move(f"broadcast of {source}", tensor, launch)

    def _pass_token(self) -> list[tf.Operation]:
        """Return what stands behind all collectives so far, and before the next ones.

        TensorFlow orders whatever touches the token.
        """
        done = self._launcher._ordering_token.assign_add(0.0, read_value=False)
        return [] if done is None else [done]

    def _move(self, kind: str, tensor: tf.Tensor, launch: Callable) -> tf.Tensor:
        """Launch a collective that moves values and adds none up.

        Of these TensorFlow has none for bfloat16, whose bits travel as float16.
        """
        if tensor.dtype != tf.bfloat16:
            return self._launch(kind, tensor, launch)
        moved = self._launch(kind, tf.bitcast(tensor, tf.float16), launch)
        return tf.bitcast(moved, tf.bfloat16)

    def _launch(self, kind: str, tensor: tf.Tensor, launch: Callable) -> tf.Tensor:
        label = f"{kind} {self._members}"
        self.kinds.add((label, tensor.dtype.name, str(tensor.shape)))
        stock = self._launcher
        key = collective_key(label, tensor)
        remember_launch(f"{kind} of replicas {self._members}", tensor, key)
        with tf.device(stock._device):
            result = launch(
                tensor,
                len(self._members),
                group_key(self._members, self._lane),
                self.counters.start(tensor, key),
                communication_hint=stock._options.implementation.value,
                timeout=stock._options.timeout_seconds or 0,
                ordering_token=stock._get_ordering_token(),
            )
            return self.counters.finish(result, key)


def group_key(members: Sequence[int], lane: int = 0) -> int:
    """Return the key of a group in a lane, the same on all of its members."""
    name = f"group {tuple(members)}" + (f" of lane {lane}" if lane else "")
    return _FIRST_KEY + zlib.crc32(name.encode()) % _NUM_KEYS


def in_lane(collective_ops: Any, lane: int) -> Any:
    """Return another `CollectiveAllReduce` of the same replicas.

    It has a group key and ordering tokens of its own, so that its collectives and
    those of others neither meet nor wait for each other.

    Args:
        collective_ops: TensorFlow's `CollectiveAllReduce` for all replicas.
        lane: number of the lane, 1 or more, equal on all workers.
    """
    keys = cross_device_utils.CollectiveKeys(group_key_start=group_key((), lane))
    stock = collective_ops
    return CollectiveAllReduce(
        stock._devices,
        stock._group_size,
        stock._options,
        keys,
        stock._canonicalize_devices,
    )


# Above the keys that TensorFlow counts.
_FIRST_KEY = 1_000_000
_NUM_KEYS = 2_000_000_000
