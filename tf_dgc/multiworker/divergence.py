"""Divergence: whether all workers still hold the same model, asked every n steps.

Everything assumes that they do, bit for bit. In a step that asks, a checksum of every
variable travels with what is exchanged anyway; all workers then see all checksums, and
come to the same verdict before anything is updated.
"""

import collections
import sys
import zlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.arguments import check_whole, show
from tf_dgc.multiworker import consensus, workers
from tf_dgc.smart_cond import BoolOrTensor, smart_cond

_BYTES = 4  # of a checksum
_NAMED = 5  # variables; more are counted
_CAUSES = (
    "All must hold the same weights, bit for bit: what is trained from here on is "
    "wrong. Causes are weights that one worker alone has loaded or assigned, a layer "
    "that updates a trainable variable by itself, and workers that round differently "
    "(other processors, other builds)."
)
_ADVICE = {
    "raise": " Mend the cause, and start all workers again, from a checkpoint of "
    'before. With `on_divergence="warn"` training goes on; `check_every=None` does not '
    "look.",
    "warn": "",
}


def check_divergence_settings(check_every: int | None, on_divergence: str) -> None:
    """Raise `ValueError` for settings that mean nothing."""
    if check_every is not None:
        rest = ", or None never to look whether workers differ"
        check_whole("check_every", check_every, 1, " of steps", rest)
    if on_divergence not in _ADVICE:
        raise ValueError(
            '`on_divergence` must be "raise" or "warn". '
            f"Received: on_divergence={show(on_divergence)}"
        )


def create_check(
    strategy: tf.distribute.Strategy,
    variables: Sequence[keras.Variable],
    iteration: tf.Tensor,
    every: int | None,
    on_divergence: str,
) -> "DivergenceCheck | None":
    """Return the `Check` of a step; None if there are no others, or for never."""
    if strategy.num_replicas_in_sync == 1 or not every:
        return None
    return DivergenceCheck(strategy, variables, iteration, every, on_divergence)


class DivergenceCheck:
    """The checksums of a step's variables, on their way with a collective.

    Create it in replica context, while the step is built.

    Args:
        strategy: strategy of more than one replica.
        variables: variables that the step updates.
        iteration: number of the step, a scalar integer tensor.
        every: number of steps from one that asks to the next, 1 or more.
        on_divergence: reaction to a difference, "raise" or "warn".

    Attributes:
        due: whether this step asks: a bool, or a scalar bool tensor.
    """

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
        self._speaks = tf.equal(self._replica % num_local, 0)  # once per process
        self.due: BoolOrTensor = every == 1 or tf.equal(self._iteration % every, 0)
        self._mine = smart_cond(
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
        """Append the checksums to what is exchanged, if this step asks.

        Args:
            dense: whether `vector` is summed over workers; else `words` is gathered.
            vector: values to be summed, `[n]`, int32 or of any float type: bytes are
                exact in all of them.
            words: words to be gathered, int32 `[w]`.

        Returns:
            Both, of which one may be longer than it was.
        """

        def with_slots() -> tuple[tf.Tensor, tf.Tensor]:
            mine = tf.reshape(tf.bitcast(self._mine, tf.uint8), [1, -1])
            here = tf.one_hot([self._replica], len(self._replicas), dtype=vector.dtype)
            slots = tf.transpose(here) * tf.cast(mine, vector.dtype)
            return tf.concat([vector, tf.reshape(slots, [-1])], axis=0), words

        def with_words() -> tuple[tf.Tensor, tf.Tensor]:
            return vector, tf.concat([words, [self._replica], self._mine], axis=0)

        return smart_cond(
            self.due,
            lambda: smart_cond(dense, with_slots, with_words),
            lambda: (vector, words),
        )

    def leave(
        self, dense: BoolOrTensor, total: tf.Tensor, buffers: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Take the checksums off again, and compare them.

        Args:
            dense: choice that `board` was given.
            total: sum of the vectors, `[n]` and the checksums.
            buffers: words of all workers, int32 `[num_workers, w]` and the checksums.

        Returns:
            Both as they would be without; to be had only if all workers have the same
            variables, or differences are only warned of.

        Raises:
            tf.errors.InvalidArgumentError: when run, on all workers alike.
        """
        shape = [len(self._replicas), len(self._variables)]
        width = 1 + len(self._variables)

        def of_total() -> tuple[tf.Tensor, ...]:
            slots = tf.cast(total[-self._size :], tf.uint8)
            found = tf.bitcast(tf.reshape(slots, [*shape, _BYTES]), tf.int32)
            return found, total[: -self._size], buffers

        def of_buffers() -> tuple[tf.Tensor, ...]:
            rows = buffers[:, -width:]
            found = tf.gather(rows, tf.argsort(rows[:, 0]))[:, 1:]
            return tf.ensure_shape(found, shape), total, buffers[:, :-width]

        def compared() -> tuple[tf.Tensor, ...]:
            found, *results = smart_cond(dense, of_total, of_buffers)
            with tf.control_dependencies([self._judge(found)]):
                return tuple(map(tf.identity, results))

        return smart_cond(self.due, compared, lambda: (total, buffers))

    def num_bytes(self, dense: BoolOrTensor, dtype: tf.DType) -> tf.Tensor:
        """Return by how much the message is longer, scalar int64.

        Args:
            dense: choice that `board` was given.
            dtype: dtype of `vector`.
        """

        def asked() -> tf.Tensor:
            in_words = 4 * (1 + len(self._variables))
            return smart_cond(
                dense, lambda: _int64(self._size * dtype.size), lambda: _int64(in_words)
            )

        return smart_cond(self.due, asked, lambda: _int64(0))

    def _judge(self, found: tf.Tensor) -> tf.Tensor:
        """Warn or raise if the rows of int32 `[num_workers, variables]` differ."""
        differ = tf.reduce_any(tf.not_equal(found, found[:1]))

        def speak() -> tf.Tensor:
            text = tf.numpy_function(
                self._describe, [found, self._iteration], tf.string
            )
            text = tf.ensure_shape(text, [])
            if self._warns:
                line = tf.strings.join(["WARNING: tf_dgc: ", text])
                said = tf.print(line, output_stream=sys.stderr)
            else:
                said = tf.raw_ops.Assert(condition=False, data=[text])
            with tf.control_dependencies([] if said is None else [said]):
                return tf.constant(True)

        speaks = tf.logical_and(differ, self._speaks) if self._warns else differ
        return tf.cond(speaks, speak, lambda: tf.constant(False))

    def _describe(self, found: np.ndarray, iteration: np.ndarray) -> bytes:
        differences = describe_differences(found, self._replicas, self._variables)
        text = f"Workers differ at iteration {iteration}: {differences}. {self._advice}"
        return text.encode()


def checksums(variables: Sequence[keras.Variable]) -> tf.Tensor:
    """Return a checksum of every variable's bits on this replica, int32 `[variables]`.

    All NaNs count as the same one: which bits it has is left to the processor. One
    operation, in Python: for hundreds of variables, TensorFlow's own would take longer
    to trace and optimize than all the rest of a step.
    """
    values = [tf.convert_to_tensor(v.value) for v in variables]
    # Of a bfloat16 scalar, `numpy_function` makes no array when executed eagerly.
    values = [tf.reshape(v, [-1]) if v.shape.rank == 0 else v for v in values]
    found = tf.numpy_function(_checksums, values, tf.int32, stateful=False)
    return tf.ensure_shape(found, [len(values)])


def _checksums(*arrays: np.ndarray) -> np.ndarray:
    found = [_checksum(np.ascontiguousarray(a)) for a in arrays]
    return np.array(found, np.uint32).view(np.int32)


def _checksum(values: np.ndarray) -> int:
    with np.errstate(all="ignore"):
        if np.isnan(values.sum()):  # or infinities of both signs
            values = np.where(np.isnan(values), np.array(np.nan, values.dtype), values)
    return zlib.crc32(values.reshape(-1).view(np.uint8).data)


def replica_names(strategy: tf.distribute.Strategy) -> list[str]:
    """Return what all replicas in sync are called, in their order."""
    devices = strategy.extended.worker_devices
    if not consensus.is_multi_worker(strategy):
        return [f"replica {i} ({device})" for i, device in enumerate(devices)]
    names = [workers.full_name(strategy, name) for name in workers.all_names(strategy)]
    per_worker = strategy.num_replicas_in_sync // len(names)
    if per_worker == 1:
        return names
    return [f"{n}, device {i}" for n in names for i in range(per_worker)]


def describe_differences(
    found: np.ndarray, replicas: list[str], variables: list[str]
) -> str:
    """Say which replicas differ in which variables from what most of them hold.

    Args:
        found: checksums, integers `[replicas, variables]`.
        replicas: names of the replicas.
        variables: names of the variables.
    """
    different: dict[tuple[str, str], list[str]] = {}
    for column, variable in zip(found.T, variables, strict=True):
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
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _int64(number: int) -> tf.Tensor:
    return tf.constant(number, tf.int64)
