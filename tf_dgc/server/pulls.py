"""Pulls: all weights, or the entries that differ most from the worker's.

A sparse pull leaves out entries, so the server stores a copy of the weights that each
worker has. A pull contains weights, not differences: the worker's weights equal the
server's copy bit for bit.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.codecs import bits, buffer
from tf_dgc.codecs.bits import to_words
from tf_dgc.codecs.buffer import SelectedEntries
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.compressors import Compressor, TopK, num_sent, top_k
from tf_dgc.steps import native
from tf_dgc.steps.base import StepPlan


class PullLayout(NamedTuple):
    """Layout of a sparse pull, equal on the server and the worker."""

    tensors: Sequence[TensorSpec]
    counts: Sequence[int]  # number of entries of each that are sent

    @property
    def num_words(self) -> int:
        """Number of words of a pull."""
        return buffer.sparse_words(self.tensors, self.counts)


def pull_layout(
    tensors: Sequence[TensorSpec],
    compressor: Compressor,
    num_workers: int,
    sparsity: float | None,
) -> PullLayout:
    """Return the layout of sparse pulls; by default as large as N pushes of `TopK`."""
    tensors = [
        TensorSpec(t.label, t.shape, t.dtype, t.uncompressed or t.size == 0)
        for t in tensors
    ]

    def count(tensor: TensorSpec) -> int:
        if tensor.uncompressed:
            return tensor.size
        if sparsity is not None:
            return int(num_sent(tensor.size, sparsity))
        constant: Any = cast(TopK, compressor).sparsity  # see `validation.check_pull`
        return min(tensor.size, num_workers * int(num_sent(tensor.size, constant)))

    return PullLayout(tensors, [count(t) for t in tensors])


def assign_sparse(
    layout: PullLayout, variables: Sequence[keras.Variable], words: tf.Tensor
) -> None:
    """Assign the entries of a sparse pull to a worker's variables."""
    words = tf.ensure_shape(words, [layout.num_words])
    if _use_native(layout, variables):
        native.assign_entries(StepPlan(*layout, dense=False), words, variables)
        return
    _, entries = buffer.read_buffers(words[tf.newaxis], *layout)
    for variable, (positions, values) in zip(variables, entries, strict=True):
        weights = tf.cast(values[0], variable.dtype)
        if positions is None:
            variable.assign(tf.reshape(weights, variable.shape))
            continue
        shape = tf.constant(tuple(variable.shape), tf.int32)
        indices = tf.transpose(tf.unravel_index(positions[0], shape))
        tf.raw_ops.ResourceScatterNdUpdate(
            ref=variable.value.handle, indices=indices, updates=weights
        )


def _use_native(layout: PullLayout, variables: Sequence[keras.Variable]) -> bool:
    return (
        native.rules_available(variables)
        and not tracing.in_xla_context()
        and all(
            v.dtype == t.dtype.name
            for v, t in zip(variables, layout.tensors, strict=True)
        )
    )


def assign_words(variables: Sequence[keras.Variable], words: tf.Tensor) -> None:
    """Assign variables from their concatenated bits, int32 `[w]`."""
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    parts = tf.split(words, [_num_words(v) for v in variables])
    for variable, spec, part in zip(variables, specs, parts, strict=True):
        variable.assign(bits.from_words(part, spec))


def collect_words(variables: Sequence[keras.Variable]) -> tf.Tensor:
    """Return the concatenated bits of all variables, int32 `[w]`."""
    values = [tf.convert_to_tensor(v.value) for v in variables]
    return tf.concat([bits.to_words(value) for value in values], axis=0)


def num_words(variables: Sequence[keras.Variable]) -> int:
    """Return the total number of words of variables."""
    return sum(map(_num_words, variables))


def _num_words(variable: keras.Variable) -> int:
    return bits.num_words_of(tf.as_dtype(variable.dtype), math.prod(variable.shape))


_LISTED_SHARE = 1 / 16
"""Share of a model's entries up to which a list is faster than comparing weights."""


class ChangedEntries:
    """Entries that pushes changed since a worker's last pull; size 0: always sent."""

    def __init__(self, sizes: Sequence[int]):
        self._limit = _LISTED_SHARE * sum(sizes)
        self._sizes = sizes
        self.clear()

    def clear(self) -> None:
        """Set that no entry has changed."""
        self._is_listed = True
        self._count = 0
        self._positions: list[list[np.ndarray]] = [[] for _ in self._sizes]

    def add(self, touched: Sequence[np.ndarray] | None) -> None:
        """Add positions, int32 `[m]` per tensor, maybe repeated; None for all."""
        if not self._is_listed:
            return
        if touched is None:
            self._stop_listing()
            return
        for i, (size, positions) in enumerate(zip(self._sizes, touched, strict=True)):
            if size:
                self.add_positions(i, positions)
        if self._count > self._limit:
            self._remove_duplicates()

    def add_positions(self, index: int, positions: np.ndarray) -> None:
        """Add entries of one tensor."""
        self._positions[index].append(positions)
        self._count += len(positions)

    def take(self) -> list[np.ndarray] | None:
        """Return ascending, distinct positions and clear them; None for all, kept."""
        if not self._is_listed:
            return None
        positions = self._distinct()
        self.clear()
        return positions

    def _remove_duplicates(self) -> None:
        distinct = self._distinct()
        self._positions = [[positions] for positions in distinct]
        self._count = sum(map(len, distinct))
        if self._count > self._limit / 2:  # sorting would soon be needed again
            self._stop_listing()

    def _distinct(self) -> list[np.ndarray]:
        empty = np.zeros([0], np.int32)
        return [np.unique(np.concatenate([empty, *p])) for p in self._positions]

    def _stop_listing(self) -> None:
        self.clear()
        self._is_listed = False


class WorkerCopies:
    """Copies of the weights that the workers have, to choose sparse pulls by."""

    # Where an update changes only entries that were pushed, the candidates of a pull
    # are listed; otherwise the pull compares all weights with the copy.

    def __init__(self, variables: Sequence[keras.Variable], layout: PullLayout):
        self._variables, self._layout = variables, layout
        self._copies: dict[int, list[keras.Variable]] = {}
        self._changed: dict[int, ChangedEntries] = {}
        self._compare_functions: dict[int, Callable] = {}
        self._send_functions: dict[int, Callable] = {}
        self._sizes = [0 if t.uncompressed else t.size for t in layout.tensors]
        self._counts = [  # entries of each tensor that are chosen
            0 if tensor.uncompressed else k for tensor, k in zip(*layout, strict=True)
        ]

    def reset(self, worker: int) -> None:
        """Record that a worker has all current weights."""
        if worker in self._copies:
            for copy, variable in zip(
                self._copies[worker], self._variables, strict=True
            ):
                copy.assign(variable.value)
            self._changed[worker].clear()
            return
        weights = [tf.convert_to_tensor(v.value) for v in self._variables]
        copies = [keras.Variable(w, trainable=False) for w in weights]
        signature = [[tf.TensorSpec([k], tf.int32) for k in self._counts]]
        self._copies[worker] = copies
        self._changed[worker] = ChangedEntries(self._sizes)
        # Concrete functions: otherwise TensorFlow takes those of several workers for
        # retracing of one, and warns about it.
        self._compare_functions[worker] = tf.function(
            lambda: self._compare(copies), autograph=False
        ).get_concrete_function()
        self._send_functions[worker] = tf.function(
            lambda positions: self._send(copies, positions),
            input_signature=signature,
            autograph=False,
        ).get_concrete_function()

    def record(self, touched: Sequence[np.ndarray] | None) -> None:
        """Record which entries an update may have changed; see `ChangedEntries.add`."""
        for changed in self._changed.values():
            changed.add(touched)

    def forget(self, worker: int) -> None:
        """Delete the copy of a worker that is gone."""
        self._copies.pop(worker, None)
        self._changed.pop(worker, None)
        self._compare_functions.pop(worker, None)
        self._send_functions.pop(worker, None)

    def pull(self, worker: int) -> tf.Tensor:
        """Return a worker's pull, int32 `[num_words]`, and update its copy."""
        changed = self._changed[worker]
        candidates = changed.take()
        if candidates is None:
            words, more_differ = self._compare_functions[worker]()
            if not more_differ:
                changed.clear()
            return words
        chosen = []
        for i, (k, positions) in enumerate(zip(self._counts, candidates, strict=True)):
            if len(positions) > k:
                weights = tf.gather(_flatten(self._variables[i]), positions)
                copied = tf.gather(_flatten(self._copies[worker][i]), positions)
                distances = np.abs((weights - copied).numpy())
                order = np.argpartition(distances, len(positions) - k)
                changed.add_positions(i, positions[order[: len(positions) - k]])
                chosen.append(np.sort(positions[order[len(positions) - k :]]))
            else:
                chosen.append(_pad_positions(positions, k))
        return self._send_functions[worker]([tf.constant(c, tf.int32) for c in chosen])

    def _compare(self, copies: Sequence[keras.Variable]) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the pull of the largest differences, and whether others remain."""
        chosen, more_differ = [], tf.constant(False)
        for tensor, k, variable, copy in zip(
            *self._layout, self._variables, copies, strict=True
        ):
            if tensor.uncompressed:
                chosen.append(tf.zeros([0], tf.int32))
                continue
            weights = tf.cast(_flatten(variable), tensor.dtype)
            distances = weights - tf.cast(_flatten(copy), tensor.dtype)
            positions, _ = top_k(distances, k, tf.constant(0))
            more_differ = tf.logical_or(
                more_differ, tf.math.count_nonzero(distances) > k
            )
            chosen.append(positions)
        return self._send(copies, chosen), more_differ

    def _send(
        self, copies: Sequence[keras.Variable], positions: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Return the pull of the entries at some positions, and update the copies."""
        tensors, counts = self._layout
        entries = [
            _select(tensor, variable, chosen)
            for tensor, variable, chosen in zip(
                tensors, self._variables, positions, strict=True
            )
        ]
        words = buffer.encode_sparse(tensors, counts, entries, tf.constant(True))
        assign_sparse(self._layout, copies, words)
        return words


def _select(
    tensor: TensorSpec, variable: keras.Variable, positions: tf.Tensor
) -> SelectedEntries:
    weights = _flatten(variable)
    if tensor.uncompressed:
        return SelectedEntries(None, to_words(tf.cast(weights, tensor.dtype)))
    values = tf.cast(tf.gather(weights, positions), tensor.dtype)
    return SelectedEntries(positions, to_words(values))


def _flatten(variable: keras.Variable) -> tf.Tensor:
    return tf.reshape(tf.convert_to_tensor(variable.value), [-1])


def _pad_positions(positions: np.ndarray, k: int) -> np.ndarray:
    """Return ascending positions, padded to k with the lowest others."""
    others = np.setdiff1d(np.arange(k, dtype=np.int32), positions, assume_unique=True)
    return np.sort(np.concatenate([positions, others[: k - len(positions)]]))
