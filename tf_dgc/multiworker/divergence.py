"""Check every n steps that all workers hold the same weights, bit for bit.

In a step that checks, the checksum of every variable is added to the message that is
exchanged anyway. All workers then compare all checksums, before anything is updated.
"""

import collections
import sys
import zlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.conditions import ASSERTION, BoolOrTensor, smart_cond
from tf_dgc.multiworker import consensus, workers

_BYTES = 4  # of a checksum
_MAX_LISTED = 5  # variables; more are counted
_CAUSES = (
    "All must hold the same weights, bit for bit; from here on the training is "
    "wrong. Causes are weights that one worker alone has loaded or assigned, a layer "
    "that updates a trainable variable by itself, and workers that round differently "
    "(other processors, other builds)."
)
_ADVICE = {
    "raise": " Fix the cause, and start all workers again from an earlier checkpoint. "
    'With `on_divergence="warn"` training continues; `check_every=None` turns the '
    "check off.",
    "warn": "",
}


def create_check(
    strategy: tf.distribute.Strategy,
    variables: Sequence[keras.Variable],
    iteration: tf.Tensor,
    every: int | None,
    on_divergence: str,
) -> "ChecksumComparison | None":
    """Return the check of a step; None without other replicas, or if it is off."""
    if strategy.num_replicas_in_sync == 1 or not every:
        return None
    return ChecksumComparison(strategy, variables, iteration, every, on_divergence)


class ChecksumComparison:
    """The checksums of a step's variables, sent with the step's collective."""

    # Create it in replica context, while the step is traced.

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        variables: Sequence[keras.Variable],
        iteration: tf.Tensor,
        every: int,
        on_divergence: str,
    ):
        context = tf.distribute.get_replica_context()
        self._replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
        self._replicas = replica_names(strategy)
        self._variables = [v.path for v in variables]
        self._iteration = tf.convert_to_tensor(iteration)
        self._warns = on_divergence == "warn"
        self._advice = _CAUSES + _ADVICE[on_divergence]
        num_local = len(strategy.extended.worker_devices)
        self._is_first_local = tf.equal(self._replica % num_local, 0)
        self.due: BoolOrTensor = every == 1 or tf.equal(self._iteration % every, 0)
        self._checksums = smart_cond(
            self.due,
            lambda: checksums(variables),
            lambda: tf.zeros([len(variables)], tf.int32),
        )

    @property
    def _size(self) -> int:
        return len(self._replicas) * len(self._variables) * _BYTES

    def board(
        self, dense: BoolOrTensor, vector: tf.Tensor, words: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Append the checksums to the message, if this step checks."""
        # `vector` is summed (if `dense`): bytes are exact in int32 and any float type.

        def with_slots() -> tuple[tf.Tensor, tf.Tensor]:
            row = tf.reshape(tf.bitcast(self._checksums, tf.uint8), [1, -1])
            rank = tf.one_hot([self._replica], len(self._replicas), dtype=vector.dtype)
            slots = tf.transpose(rank) * tf.cast(row, vector.dtype)
            return tf.concat([vector, tf.reshape(slots, [-1])], axis=0), words

        def with_words() -> tuple[tf.Tensor, tf.Tensor]:
            return vector, tf.concat([words, [self._replica], self._checksums], axis=0)

        return smart_cond(
            self.due,
            lambda: smart_cond(dense, with_slots, with_words),
            lambda: (vector, words),
        )

    def leave(
        self, dense: BoolOrTensor, total: tf.Tensor, buffers: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Remove the checksums again, and compare them."""
        shape = [len(self._replicas), len(self._variables)]
        width = 1 + len(self._variables)

        def from_total() -> tuple[tf.Tensor, ...]:
            slots = tf.cast(total[-self._size :], tf.uint8)
            sums = tf.bitcast(tf.reshape(slots, [*shape, _BYTES]), tf.int32)
            return sums, total[: -self._size], buffers

        def from_buffers() -> tuple[tf.Tensor, ...]:
            rows = buffers[:, -width:]
            sums = tf.gather(rows, tf.argsort(rows[:, 0]))[:, 1:]
            return tf.ensure_shape(sums, shape), total, buffers[:, :-width]

        def compare() -> tuple[tf.Tensor, ...]:
            sums, *results = smart_cond(dense, from_total, from_buffers)
            with tf.control_dependencies([self._report(sums)]):
                return tuple(map(tf.identity, results))

        return smart_cond(self.due, compare, lambda: (total, buffers))

    def num_bytes(self, dense: BoolOrTensor, dtype: tf.DType) -> tf.Tensor:
        """Return how many bytes the checksums add to the message, scalar int64."""

        def added() -> tf.Tensor:
            dense_bytes = self._size * dtype.size
            sparse_bytes = 4 * (1 + len(self._variables))
            return smart_cond(
                dense, lambda: _int64(dense_bytes), lambda: _int64(sparse_bytes)
            )

        return smart_cond(self.due, added, lambda: _int64(0))

    def _report(self, sums: tf.Tensor) -> tf.Tensor:
        differ = tf.reduce_any(tf.not_equal(sums, sums[:1]))

        def report() -> tf.Tensor:
            text = tf.numpy_function(self._describe, [sums, self._iteration], tf.string)
            text = tf.ensure_shape(text, [])
            if self._warns:
                line = tf.strings.join(["WARNING: tf_dgc: ", text])
                operation = tf.print(line, output_stream=sys.stderr)
            else:
                operation = tf.raw_ops.Assert(condition=False, data=[ASSERTION, text])
            with tf.control_dependencies([] if operation is None else [operation]):
                return tf.constant(True)

        if self._warns:  # once per process
            differ = tf.logical_and(differ, self._is_first_local)
        return tf.cond(differ, report, lambda: tf.constant(False))

    def _describe(self, sums: np.ndarray, iteration: np.ndarray) -> bytes:
        differences = describe_differences(sums, self._replicas, self._variables)
        text = f"Workers differ at iteration {iteration}: {differences}. {self._advice}"
        return text.encode()


def checksums(variables: Sequence[keras.Variable]) -> tf.Tensor:
    """Return a checksum of every variable's bits on this replica, int32 `[v]`."""
    # All NaNs count as equal, because their bits depend on the processor. This is one
    # Python operation: for hundreds of variables, TensorFlow operations would take
    # longer to trace and optimize than the rest of a step.
    values = [tf.convert_to_tensor(v.value) for v in variables]
    # `numpy_function` does not convert a bfloat16 scalar to an array in eager mode.
    values = [tf.reshape(v, [-1]) if v.shape.rank == 0 else v for v in values]
    sums = tf.numpy_function(_checksums, values, tf.int32, stateful=False)
    return tf.ensure_shape(sums, [len(values)])


def _checksums(*arrays: np.ndarray) -> np.ndarray:
    sums = [_checksum(np.ascontiguousarray(a)) for a in arrays]
    return np.array(sums, np.uint32).view(np.int32)


def _checksum(values: np.ndarray) -> int:
    with np.errstate(all="ignore"):
        if np.isnan(values.sum()):  # or infinities of both signs
            values = np.where(np.isnan(values), np.array(np.nan, values.dtype), values)
    return zlib.crc32(values.reshape(-1).view(np.uint8).data)


def replica_names(strategy: tf.distribute.Strategy) -> list[str]:
    """Return the names of all replicas, in order."""
    devices = strategy.extended.worker_devices
    if not consensus.is_multi_worker(strategy):
        return [f"replica {i} ({device})" for i, device in enumerate(devices)]
    names = [workers.full_name(strategy, name) for name in workers.all_names(strategy)]
    per_worker = strategy.num_replicas_in_sync // len(names)
    if per_worker == 1:
        return names
    return [f"{n}, device {i}" for n in names for i in range(per_worker)]


def describe_differences(
    sums: np.ndarray, replicas: list[str], variables: list[str]
) -> str:
    """Return who differs, by checksums `[replicas, variables]`, from most replicas."""
    different: dict[tuple[str, str], list[str]] = {}
    for column, variable in zip(sums.T, variables, strict=True):
        usual, _ = collections.Counter(column.tolist()).most_common(1)[0]
        others = " and ".join(
            name for x, name in zip(column, replicas, strict=True) if x != usual
        )
        reference = replicas[column.tolist().index(usual)]
        if others:
            different.setdefault((others, reference), []).append(variable)
    return "; ".join(
        f"{others} from {reference} in {_list(names)}, {len(names)} of "
        f"{len(variables)} variables"
        for (others, reference), names in different.items()
    )


def _list(names: list[str]) -> str:
    return ", ".join(names[:_MAX_LISTED]) + (
        ", ..." if len(names) > _MAX_LISTED else ""
    )


def _int64(number: int) -> tf.Tensor:
    return tf.constant(number, tf.int64)
