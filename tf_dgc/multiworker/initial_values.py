"""Initial values: variables start alike on all workers, and only what differs is sent.

TensorFlow sends every variable from the first worker when it is created. Here the
workers compare checksums, in one small collective. What is equal already, as weights
from the same seed and slots of zeros, is not sent; the rest goes in pieces.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc._internals import tf_collectives
from tf_dgc._internals.tf_collectives import WorkerGroup, replace_initial_values
from tf_dgc.multiworker import chunks, consensus, failures, workers

WaitingContext = Callable[[str], contextlib.AbstractContextManager[None]]

_PURPOSE = "the creation of variables"
_DIGEST_BYTES = 16
_MAX_RANK = 8


class InitialValues:
    """Compares and sends the values that variables of a strategy start with.

    Args:
        strategy: strategy of several workers; its instance is changed.
        waiting: context in which this worker waits for others, of the purpose.
    """

    def __init__(
        self,
        strategy: tf.distribute.MultiWorkerMirroredStrategy,
        waiting: WaitingContext,
    ):
        self._strategy = strategy
        self._waiting = waiting
        self._group = WorkerGroup(strategy)
        self._pending: list[np.ndarray] | None = None
        replace_initial_values(strategy, self._settle, self._wait_for)

    @contextlib.contextmanager
    def zeros_expected(self) -> Iterator[None]:
        """Compare all zeros that variables start with within at once, at the end.

        Raises:
            ValueError: on all workers, at the end, if they did not create as many.
        """
        if self._pending is not None:
            yield
            return
        self._pending = []
        try:
            yield
            created = self._pending
        finally:
            self._pending = None
        with tf.init_scope():  # a step may be being traced
            self._check_at_once(created)

    def _check_at_once(self, created: list[np.ndarray]) -> None:
        digest = _digest(np.concatenate([np.zeros(1, np.int64), *created]))
        rows = self._gather(np.concatenate([digest, [len(created)]]))
        if (rows == rows[0]).all():
            return
        raise ValueError(
            "The workers created different variables for the state of the optimizer. "
            "All must run the same program with the same arguments."
        )

    def _wait_for(self, broadcast: Callable[[], tf.Tensor]) -> tf.Tensor:
        with self._waiting(_PURPOSE):
            return broadcast()

    def _settle(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """Return the first worker's value.

        Raises:
            ValueError: on all workers, if theirs are of different types or shapes.
        """
        content = _bytes(value)
        kind = _kind(value)
        if self._pending is not None and not content.any():
            self._pending.append(kind)
            return value
        rows = self._gather(np.concatenate([kind, _digest(content)]))
        self._check_alike(rows[:, : len(kind)], name)
        return value if (rows == rows[0]).all() else self._send(value)

    def _gather(self, note: np.ndarray) -> np.ndarray:
        with self._waiting(_PURPOSE):
            rows = self._group.all_gather(tf.constant(note.view(np.int32)))
            return rows.numpy().view(np.int64)

    def _check_alike(self, rows: np.ndarray, name: str) -> None:
        kinds = [_say(row) for row in rows]
        if len(set(kinds)) == 1:
            return
        who = workers.all_names(self._strategy)
        found = ", ".join(f"{k} on {w}" for k, w in zip(kinds, who, strict=True))
        raise ValueError(
            f"Could not create the variable {name}: it is {found}. Do all workers "
            "build the same model? All must run the same program with the same "
            "arguments."
        )

    def _send(self, value: tf.Tensor) -> tf.Tensor:
        """Return the first worker's value, which is equal in type and shape."""
        words = _to_words(value)
        length = chunks.CHUNK_BYTES // words.itemsize
        for start in range(0, len(words), length):
            piece = words[start : start + length]
            with self._waiting(_PURPOSE):
                piece[:] = self._group.broadcast(tf.constant(piece)).numpy()
        if self._group.is_first:
            return value
        content = words.view(np.uint8)[: len(_bytes(value))]
        array = content.view(value.dtype.as_numpy_dtype).reshape(value.shape)
        return tf.constant(array, value.dtype)


def report_failed_variables(
    strategy: tf.distribute.MultiWorkerMirroredStrategy,
) -> None:
    """Tell all workers why one could not create a variable, which takes all of them."""

    def wrap(create: Callable) -> Callable:
        def create_variable(next_creator: Any, **kwargs: Any) -> Any:
            try:
                with failures.naming_workers(strategy):
                    return create(next_creator, **kwargs)
            except tf.errors.OpError as error:
                name = kwargs.get("name") or "without a name"
                raise consensus.worker_failure(
                    strategy,
                    f"could not create the variable {name}. Do all workers build the "
                    f"same model? TensorFlow says: {error.message}",
                ) from error

        return create_variable

    tf_collectives.wrap_variable_creation(strategy, wrap)


def _kind(value: tf.Tensor) -> np.ndarray:
    """Return dtype and shape as int64, always as many."""
    shape = list(value.shape)[:_MAX_RANK]
    kind = [value.dtype.as_datatype_enum, value.shape.rank, *shape]
    return np.array(kind + [0] * (2 + _MAX_RANK - len(kind)), np.int64)


def _say(kind: np.ndarray) -> str:
    dtype, rank, *shape = map(int, kind)
    return f"{tf.as_dtype(dtype).name} [{','.join(map(str, shape[:rank]))}]"


def _digest(content: np.ndarray) -> np.ndarray:
    """Return a checksum, int64, that two different arrays never share."""
    found = hashlib.blake2b(content.data, digest_size=_DIGEST_BYTES).digest()
    return np.frombuffer(found, np.int64)


def _bytes(value: tf.Tensor) -> np.ndarray:
    return np.ascontiguousarray(value.numpy()).reshape(-1).view(np.uint8)


def _to_words(value: tf.Tensor) -> np.ndarray:
    """Return the bits of a value as int32, filled up with zeros."""
    content = _bytes(value)
    words = np.zeros(-(-len(content) // 4), np.int32)
    words.view(np.uint8)[: len(content)] = content
    return words
