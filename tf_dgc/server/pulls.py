"""Pulls: all weights, or some entries of them (`copies.py` chooses which).

What a sparse pull leaves out is kept back on the server, which knows the weights that
each worker has: that takes a copy of the model for each. Weights themselves are sent,
not differences, so that a worker has exactly what the server takes it to have.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import keras
import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.codecs import bits, wire
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.compressors import Compressor, TopK, num_sent
from tf_dgc.steps import native_update
from tf_dgc.steps.plan import Plan


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


def take(form: Form, variables: Sequence[keras.Variable], words: tf.Tensor) -> None:
    """Set those entries of a worker's variables that a sparse pull has.

    Args:
        form: form of the pulls.
        variables: variables of the worker.
        words: pull, int32 `[num_words]`.
    """
    words = tf.ensure_shape(words, [form.num_words])
    if _is_native(form, variables):
        native_update.put(Plan(*form, dense=False), words, variables)
        return
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


def _is_native(form: Form, variables: Sequence[keras.Variable]) -> bool:
    dtypes = [
        v.dtype == t.dtype.name for v, t in zip(variables, form.layout, strict=True)
    ]
    live = native_update.is_live(variables) and not tracing.in_xla_context()
    return live and all(dtypes)


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
