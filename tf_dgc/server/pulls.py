"""Pulls: all weights, or where they differ most from what a worker has.

What a sparse pull leaves out is kept back on the server, which knows the weights that
each worker has: that takes a copy of the model for each. Weights themselves are sent,
not differences, so that a worker has exactly what the server takes it to have.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import keras
import tensorflow as tf

from tf_dgc.codecs import bits, wire
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.codecs.wire import Selection
from tf_dgc.compressors import Compressor, TopK, num_sent, top_k
from tf_dgc.compressors.common.one_round import to_words


class Form(NamedTuple):
    """How a sparse pull is a buffer of entries, the same on both sides.

    Attributes:
        layout: descriptions of the variables.
        counts: number of entries of each that are sent.
    """

    layout: Sequence[Tensor]
    counts: Sequence[int]

    @property
    def num_words(self) -> int:
        """Words of a pull."""
        return wire.sparse_words(self.layout, self.counts)


def form_of(
    tensors: Sequence[Tensor],
    compressor: Compressor,
    num_workers: int,
    sparsity: float | None,
) -> Form:
    """Return the form of pulls.

    Args:
        tensors: descriptions of all variables.
        compressor: method of pushes.
        num_workers: number of workers, N.
        sparsity: share of entries that a pull leaves out; None for as many entries as N
            pushes of `TopK` have.
    """
    layout = [
        Tensor(t.label, t.shape, t.dtype, t.exempt or t.size == 0) for t in tensors
    ]

    def count(tensor: Tensor) -> int:
        if tensor.exempt:
            return tensor.size
        if sparsity is not None:
            return int(num_sent(tensor.size, sparsity))
        fixed: Any = cast(TopK, compressor).sparsity  # as was checked
        pushed = num_sent(tensor.size, fixed)
        return min(tensor.size, num_workers * int(pushed))

    return Form(layout, [count(t) for t in layout])


class Copies:
    """What the workers have of the server's variables.

    Args:
        variables: variables of the server.
        form: form of the pulls.
    """

    def __init__(self, variables: Sequence[keras.Variable], form: Form):
        self._variables, self._form = variables, form
        self._of: dict[int, list[tf.Variable]] = {}
        self._changed: dict[int, Any] = {}

    def reset(self, worker: int) -> None:
        """Note that a worker has been given all weights."""
        now = [tf.convert_to_tensor(v.value) for v in self._variables]
        if worker not in self._of:
            pairs = zip(now, self._form.layout, strict=True)
            some = [w[:0] if t.exempt and t.shape else w for w, t in pairs]
            copies = [tf.Variable(tf.reshape(w, [-1]), trainable=False) for w in some]
            self._of[worker] = copies
            self._changed[worker] = tf.function(lambda: self._pull(copies))
            return
        for copy, weight, tensor in zip(
            self._of[worker], now, self._form.layout, strict=True
        ):
            if not tensor.exempt:
                copy.assign(tf.reshape(weight, [-1]))

    def forget(self, worker: int) -> None:
        """Forget what a worker has, which is gone."""
        self._of.pop(worker, None)
        self._changed.pop(worker, None)

    def pull(self, worker: int) -> tf.Tensor:
        """Return what a worker is sent, which it has then, int32 `[num_words]`."""
        return self._changed[worker]()

    def _pull(self, copies: Sequence[tf.Variable]) -> tf.Tensor:
        layout, counts = self._form
        selections = [
            _select(*of_one)
            for of_one in zip(layout, counts, self._variables, copies, strict=True)
        ]
        return wire.encode(layout, counts, selections, tf.constant(True))


def _select(
    tensor: Tensor, k: int, variable: keras.Variable, copy: tf.Variable
) -> Selection:
    """Return what is sent of a variable, and put it into the worker's copy."""
    weights = tf.reshape(tf.convert_to_tensor(variable.value), [-1])
    wide = tf.cast(weights, tensor.dtype)
    if tensor.exempt:
        return Selection(None, to_words(wide))
    behind = wide - tf.cast(copy, tensor.dtype)
    positions, _ = top_k(behind, k, tf.constant(0))
    found = tf.gather(weights, positions)
    copy.scatter_nd_update(positions[:, tf.newaxis], found)
    return Selection(positions, to_words(tf.cast(found, tensor.dtype)))


def take(form: Form, variables: Sequence[keras.Variable], words: tf.Tensor) -> None:
    """Set those entries of a worker's variables that a sparse pull has.

    Args:
        form: form of the pulls.
        variables: variables of the worker.
        words: pull, int32 `[num_words]`.
    """
    words = tf.ensure_shape(words, [form.num_words])
    _, found = wire.read(words[tf.newaxis], *form)
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


def assign(variables: Sequence[keras.Variable], words: tf.Tensor) -> None:
    """Set variables by the bits of all of them, int32 `[w]`."""
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    parts = tf.split(words, [_num_words(v) for v in variables])
    for variable, spec, part in zip(variables, specs, parts, strict=True):
        variable.assign(bits.from_words(part, spec))


def collect(variables: Sequence[keras.Variable]) -> tf.Tensor:
    """Return the bits of all variables, end to end, int32 `[w]`."""
    values = [tf.convert_to_tensor(v.value) for v in variables]
    return tf.concat([bits.to_words(value) for value in values], axis=0)


def num_words(variables: Sequence[keras.Variable]) -> int:
    """Return the words of all variables."""
    return sum(map(_num_words, variables))


def _num_words(variable: keras.Variable) -> int:
    return bits.num_words(tf.as_dtype(variable.dtype), math.prod(variable.shape))
