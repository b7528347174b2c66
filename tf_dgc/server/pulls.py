"""Pulls: all weights, or some entries of them (`copies.py` chooses which).

What a sparse pull leaves out is kept back on the server, which knows the weights that
each worker has: that takes a copy of the model for each. Weights themselves are sent,
not differences, so that a worker has exactly what the server takes it to have.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.codecs import bits, buffer
from tf_dgc.codecs.buffer import SelectedEntries
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.compressors import Compressor, TopK, num_sent, top_k
from tf_dgc.compressors.common.one_round import to_words
from tf_dgc.steps import native
from tf_dgc.steps.plan import StepPlan


class PullLayout(NamedTuple):
    """How a sparse pull is a buffer of entries, the same on both sides.

    Attributes:
        layout: descriptions of the variables.
        counts: number of entries of each that are sent.
    """

    layout: Sequence[TensorSpec]
    counts: Sequence[int]

    @property
    def num_words(self) -> int:
        """Words of a pull."""
        return buffer.sparse_words(self.layout, self.counts)


def pull_layout(
    tensors: Sequence[TensorSpec],
    compressor: Compressor,
    num_workers: int,
    sparsity: float | None,
) -> PullLayout:
    """Return the form of pulls.

    Args:
        tensors: descriptions of all variables.
        compressor: method of pushes.
        num_workers: number of workers, N.
        sparsity: share of entries that a pull leaves out; None for as many entries as N
            pushes of `TopK` have.
    """
    layout = [
        TensorSpec(t.label, t.shape, t.dtype, t.uncompressed or t.size == 0)
        for t in tensors
    ]

    def count(tensor: TensorSpec) -> int:
        if tensor.uncompressed:
            return tensor.size
        if sparsity is not None:
            return int(num_sent(tensor.size, sparsity))
        fixed: Any = cast(TopK, compressor).sparsity  # as was checked
        pushed = num_sent(tensor.size, fixed)
        return min(tensor.size, num_workers * int(pushed))

    return PullLayout(layout, [count(t) for t in layout])


def take_entries(
    form: PullLayout, variables: Sequence[keras.Variable], words: tf.Tensor
) -> None:
    """Set those entries of a worker's variables that a sparse pull has.

    Args:
        form: form of the pulls.
        variables: variables of the worker.
        words: pull, int32 `[num_words]`.
    """
    words = tf.ensure_shape(words, [form.num_words])
    if _is_native(form, variables):
        native.assign_entries(StepPlan(*form, dense=False), words, variables)
        return
    _, found = buffer.read_buffers(words[tf.newaxis], *form)
    for variable, (positions, values) in zip(variables, found, strict=True):
        new = tf.cast(values[0], variable.dtype)
        if positions is None:
            variable.assign(tf.reshape(new, variable.shape))
            continue
        shape = tf.constant(tuple(variable.shape), tf.int32)
        indices = tf.transpose(tf.unravel_index(positions[0], shape))
        tf.raw_ops.ResourceScatterNdUpdate(
            ref=variable.value.handle, indices=indices, updates=new
        )


def _is_native(form: PullLayout, variables: Sequence[keras.Variable]) -> bool:
    dtypes = [
        v.dtype == t.dtype.name for v, t in zip(variables, form.layout, strict=True)
    ]
    live = native.rules_available(variables) and not tracing.in_xla_context()
    return live and all(dtypes)


def assign_entries(variables: Sequence[keras.Variable], words: tf.Tensor) -> None:
    """Set variables by the bits of all of them, int32 `[w]`."""
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    parts = tf.split(words, [_num_words(v) for v in variables])
    for variable, spec, part in zip(variables, specs, parts, strict=True):
        variable.assign(bits.from_words(part, spec))


def collect_entries(variables: Sequence[keras.Variable]) -> tf.Tensor:
    """Return the bits of all variables, end to end, int32 `[w]`."""
    values = [tf.convert_to_tensor(v.value) for v in variables]
    return tf.concat([bits.to_words(value) for value in values], axis=0)


def pull_words(variables: Sequence[keras.Variable]) -> int:
    """Return the words of all variables."""
    return sum(map(_num_words, variables))


def _num_words(variable: keras.Variable) -> int:
    return bits.num_words_of(tf.as_dtype(variable.dtype), math.prod(variable.shape))


# --- Which entries a worker may lack, as far as that is known.

_SHARE = 1 / 16
"""Of a model's entries, of which it is still quicker to have a list than to look."""


class ChangedEntries:
    """Entries that pushes have changed since one worker was sent them.

    Args:
        sizes: number of entries of each tensor; 0 for those that always come whole.
    """

    def __init__(self, sizes: Sequence[int]):
        self._most = _SHARE * sum(sizes)
        self._sizes = sizes
        self.clear()

    def clear(self) -> None:
        """Note that the worker lacks nothing."""
        self._known = True
        self._number = 0
        self._parts: list[list[np.ndarray]] = [[] for _ in self._sizes]

    def add(self, touched: Sequence[np.ndarray] | None) -> None:
        """Note which entries may have changed.

        Args:
            touched: positions of each tensor, int32 `[m]`, in any order and more than
                once if so; None if it may be any.
        """
        if not self._known:
            return
        if touched is None:
            self._forget()
            return
        for i, (size, positions) in enumerate(zip(self._sizes, touched, strict=True)):
            if size:
                self.keep(i, positions)
        if self._number > self._most:
            self._count_once()

    def _count_once(self) -> None:
        for i, positions in enumerate(self._distinct()):
            self._parts[i] = [positions]
        self._number = sum(len(positions) for (positions,) in self._parts)
        if self._number > self._most / 2:  # else pushes would have to be sorted often
            self._forget()

    def _distinct(self) -> list[np.ndarray]:
        none = np.zeros([0], np.int32)
        return [np.unique(np.concatenate([none, *parts])) for parts in self._parts]

    def keep(self, index: int, positions: np.ndarray) -> None:
        """Note entries of one tensor."""
        self._parts[index].append(positions)
        self._number += len(positions)

    def _forget(self) -> None:
        self.clear()
        self._known = False

    def take(self) -> list[np.ndarray] | None:
        """Return all of them, of each tensor ascending and once, and note none.

        None if it may be any, which is then still noted.
        """
        if not self._known:
            return None
        found = self._distinct()
        self.clear()
        return found


# --- What workers have of the server's variables, by which sparse pulls are chosen.


class WorkerCopies:
    """What the workers have of the server's variables.

    Where a rule changes only what was pushed, what a worker may lack is known without
    a look at the model; else the two are compared.

    Args:
        variables: variables of the server.
        form: form of the pulls.
    """

    def __init__(self, variables: Sequence[keras.Variable], form: PullLayout):
        self._variables, self._form = variables, form
        self._of: dict[int, list[keras.Variable]] = {}
        self._changed: dict[int, ChangedEntries] = {}
        self._compared: dict[int, Callable] = {}
        self._sent: dict[int, Callable] = {}

    def reset(self, worker: int) -> None:
        """Note that a worker has been given all weights."""
        if worker in self._of:
            for copy, variable in zip(self._of[worker], self._variables, strict=True):
                copy.assign(variable.value)
            self._changed[worker].clear()
            return
        now = [tf.convert_to_tensor(v.value) for v in self._variables]
        copies = [keras.Variable(w, trainable=False) for w in now]
        signature = [[tf.TensorSpec([k], tf.int32) for k in self._counts]]
        self._of[worker] = copies
        self._changed[worker] = ChangedEntries(self._sizes)
        self._compared[worker] = tf.function(lambda: self._compare(copies))
        send = functools.partial(self._send, copies)
        self._sent[worker] = tf.function(send, input_signature=signature)

    @property
    def _counts(self) -> list[int]:
        """Entries of each tensor that are chosen: none of exempt ones."""
        pairs = zip(*self._form, strict=True)
        return [0 if tensor.uncompressed else k for tensor, k in pairs]

    @property
    def _sizes(self) -> list[int]:
        return [0 if t.uncompressed else t.size for t in self._form.layout]

    def note(self, touched: Sequence[np.ndarray] | None) -> None:
        """Note which entries an update may have changed.

        Args:
            touched: positions of each tensor, int32 `[m]`, which may come more than
                once; those of exempt ones are not needed. None if it may be any.
        """
        for changed in self._changed.values():
            changed.add(touched)

    def forget(self, worker: int) -> None:
        """Forget what a worker has, which is gone."""
        for kept in (self._of, self._changed, self._compared, self._sent):
            kept.pop(worker, None)

    def pull(self, worker: int) -> tf.Tensor:
        """Return what a worker is sent, which it has then, int32 `[num_words]`."""
        changed = self._changed[worker]
        candidates = changed.take()
        if candidates is None:
            words, is_left = self._compared[worker]()
            if not is_left:
                changed.clear()
            return words
        chosen = []
        every = zip(self._counts, candidates, self._variables, strict=True)
        for i, (k, found, variable) in enumerate(every):
            if len(found) > k:
                distance = np.abs(_behind(variable, self._of[worker][i], found).numpy())
                order = np.argpartition(distance, len(found) - k)
                changed.keep(i, found[order[: len(found) - k]])
                chosen.append(np.sort(found[order[len(found) - k :]]))
            else:
                chosen.append(_filled(found, k))
        return self._sent[worker]([tf.constant(c, tf.int32) for c in chosen])

    def _compare(self, copies: Sequence[keras.Variable]) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the pull of what differs most, and whether more may differ."""
        chosen, is_left = [], tf.constant(False)
        every = zip(*self._form, self._variables, copies, strict=True)
        for tensor, k, variable, copy in every:
            if tensor.uncompressed:
                chosen.append(tf.zeros([0], tf.int32))
                continue
            weights, had = (tf.cast(_flat(v), tensor.dtype) for v in (variable, copy))
            distances = weights - had
            positions, _ = top_k(distances, k, tf.constant(0))
            is_left = tf.logical_or(is_left, tf.math.count_nonzero(distances) > k)
            chosen.append(positions)
        return self._send(copies, chosen), is_left

    def _send(
        self, copies: Sequence[keras.Variable], positions: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Return the pull of these positions, and put them into the worker's copy."""
        layout, counts = self._form
        every = zip(layout, self._variables, positions, strict=True)
        sent = [_select(*of_one) for of_one in every]
        words = buffer.encode_sparse(layout, counts, sent, tf.constant(True))
        take_entries(self._form, copies, words)
        return words


def _select(
    tensor: TensorSpec, variable: keras.Variable, positions: tf.Tensor
) -> SelectedEntries:
    weights = _flat(variable)
    if tensor.uncompressed:
        return SelectedEntries(None, to_words(tf.cast(weights, tensor.dtype)))
    found = tf.cast(tf.gather(weights, positions), tensor.dtype)
    return SelectedEntries(positions, to_words(found))


def _flat(variable: keras.Variable) -> tf.Tensor:
    return tf.reshape(tf.convert_to_tensor(variable.value), [-1])


def _behind(
    variable: keras.Variable, copy: keras.Variable, positions: np.ndarray
) -> tf.Tensor:
    """Return how far a worker's copy is from the weights at some positions."""
    return tf.gather(_flat(variable), positions) - tf.gather(_flat(copy), positions)


def _filled(positions: np.ndarray, k: int) -> np.ndarray:
    """Return ascending positions and the first others, k in all."""
    others = np.setdiff1d(np.arange(k, dtype=np.int32), positions, assume_unique=True)
    return np.sort(np.concatenate([positions, others[: k - len(positions)]]))
