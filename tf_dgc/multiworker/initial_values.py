"""Initial values of variables, equal on all workers.

TensorFlow sends every variable from the first worker when it is created. Here the
workers compare checksums, in one small collective. Values that are already equal, such
as weights from the same seed and slots of zeros, are not sent; others go in chunks.
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
    """Compares and sends the initial values of a strategy's variables."""

    def __init__(
        self,
        strategy: tf.distribute.MultiWorkerMirroredStrategy,
        waiting: WaitingContext,
    ):
        self._strategy = strategy
        self._waiting = waiting
        self._group = WorkerGroup(strategy)
        self._zeros: list[np.ndarray] | None = None  # specs, within `zeros_expected`
        replace_initial_values(strategy, self._synchronize, self._wait_for)

    @contextlib.contextmanager
    def zeros_expected(self) -> Iterator[None]:
        """Compare variables that start with zeros once, at the end of the context."""
        if self._zeros is not None:
            yield
            return
        self._zeros = []
        try:
            yield
            specs = self._zeros
        finally:
            self._zeros = None
        with tf.init_scope():  # a step may be being traced
            self._compare_zeros(specs)

    def _compare_zeros(self, specs: list[np.ndarray]) -> None:
        digest = _digest(np.concatenate([np.zeros(1, np.int64), *specs]))
        rows = self._gather(np.concatenate([digest, [len(specs)]]))
        if (rows == rows[0]).all():
            return
        names = workers.all_names(self._strategy)
        counts = [f"{row[-1]} on {name}" for row, name in zip(rows, names, strict=True)]
        raise ValueError(
            "The workers created optimizer variables of different numbers, shapes or "
            "dtypes. Run the same program with the same arguments on all workers. "
            f"Received: optimizer variables: {', '.join(counts)}"
        )

    def _wait_for(self, broadcast: Callable[[], tf.Tensor]) -> tf.Tensor:
        with self._waiting(_PURPOSE):
            return broadcast()

    def _synchronize(self, value: tf.Tensor, name: str) -> tf.Tensor:
        content = _bytes(value)
        spec = _spec(value)
        if self._zeros is not None and not content.any():
            self._zeros.append(spec)
            return value
        rows = self._gather(np.concatenate([spec, _digest(content)]))
        self._check_specs(rows[:, : len(spec)], name)
        return value if (rows == rows[0]).all() else self._broadcast(value)

    def _gather(self, row: np.ndarray) -> np.ndarray:
        with self._waiting(_PURPOSE):
            rows = self._group.all_gather(tf.constant(row.view(np.int32)))
            return rows.numpy().view(np.int64)

    def _check_specs(self, rows: np.ndarray, name: str) -> None:
        specs = [_format_spec(row) for row in rows]
        if len(set(specs)) == 1:
            return
        names = workers.all_names(self._strategy)
        listed = ", ".join(f"{s} on {w}" for s, w in zip(specs, names, strict=True))
        raise ValueError(
            "A variable must have the same shape and dtype on all workers. Build the "
            "same model on all: run the same program with the same arguments. "
            f"Received: variable {name}, {listed}"
        )

    def _broadcast(self, value: tf.Tensor) -> tf.Tensor:
        words = _to_words(value)
        length = chunks.CHUNK_BYTES // words.itemsize
        for start in range(0, len(words), length):
            chunk = words[start : start + length]
            with self._waiting(_PURPOSE):
                chunk[:] = self._group.broadcast(tf.constant(chunk)).numpy()
        if self._group.is_first:
            return value
        content = words.view(np.uint8)[: len(_bytes(value))]
        array = content.view(value.dtype.as_numpy_dtype).reshape(value.shape)
        return tf.constant(array, value.dtype)


def report_failed_variables(
    strategy: tf.distribute.MultiWorkerMirroredStrategy,
) -> None:
    """Report to all workers if one of them cannot create a variable."""

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


def _spec(value: tf.Tensor) -> np.ndarray:
    shape = list(value.shape)[:_MAX_RANK]
    spec = [value.dtype.as_datatype_enum, value.shape.rank, *shape]
    return np.array(spec + [0] * (2 + _MAX_RANK - len(spec)), np.int64)


def _format_spec(spec: np.ndarray) -> str:
    dtype, rank, *shape = map(int, spec)
    return f"{tf.as_dtype(dtype).name} [{','.join(map(str, shape[:rank]))}]"


def _digest(content: np.ndarray) -> np.ndarray:
    """Return a collision-resistant checksum, int64 `[2]`."""
    digest = hashlib.blake2b(content.data, digest_size=_DIGEST_BYTES).digest()
    return np.frombuffer(digest, np.int64)


def _bytes(value: tf.Tensor) -> np.ndarray:
    return np.ascontiguousarray(value.numpy()).reshape(-1).view(np.uint8)


def _to_words(value: tf.Tensor) -> np.ndarray:
    """Return the bits of a value as int32, padded with zeros."""
    content = _bytes(value)
    words = np.zeros(-(-len(content) // 4), np.int32)
    words.view(np.uint8)[: len(content)] = content
    return words
