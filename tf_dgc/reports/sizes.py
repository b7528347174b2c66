"""Sizes: what a worker sends of each variable."""

from typing import NamedTuple, cast

import tensorflow as tf

from tf_dgc.codecs import wire
from tf_dgc.codecs.header import NUM_WORDS
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.compressors import Compressor, TopK
from tf_dgc.local.optimizer import LocalOptimizer
from tf_dgc.optimizers.compressed import CompressedOptimizer
from tf_dgc.schedules import asking
from tf_dgc.steps import plan as plans


class Size(NamedTuple):
    """What is sent of a variable in one step, or one exchange of local steps.

    Attributes:
        tensor: tensor of the variable.
        dense_bytes: number of bytes of its whole gradient.
        sent_bytes: number of bytes that a worker hands to the collectives, without what
            a message has once; None if that is known only while it runs.
    """

    tensor: Tensor
    dense_bytes: int
    sent_bytes: int | None


def of_each(optimizer: CompressedOptimizer | LocalOptimizer) -> list[Size]:
    """Return the sizes of all variables in the last step; none before it is built."""
    made = optimizer.kept
    if made is None:
        return []
    compressor = made.chosen.compressor
    dense = [t.size * (t.narrow or t.dtype).size for t in made.tensors]
    if type(compressor) is TopK:
        last = max(0, int(optimizer.iterations) - 1)
        sent = _by_top_k(compressor, made.tensors, last, optimizer.num_workers)
    else:
        sent = _by_method(compressor, made.tensors)
    return list(map(Size, made.tensors, dense, sent))


def _by_top_k(
    compressor: TopK, tensors: list[Tensor], iteration: int, num_workers: int
) -> list[int | None]:
    sparsity = compressor.sparsity
    if callable(sparsity):
        sparsity = float(asking.at(sparsity, tf.constant(iteration, tf.int64)))
    found: dict[int, int | None] = {}
    for places in plans.shares(tensors, num_workers):
        layout = [
            tensors[i]._replace(value_dtype=compressor.value_dtype) for i in places
        ]
        sent = plans.plan(layout, sparsity, num_workers)
        for i, tensor, count in zip(places, layout, sent.counts, strict=True):
            words = cast(int, wire.sparse_words([tensor], [count])) - NUM_WORDS
            found[i] = tensor.size * sent.summed_dtype.size if sent.dense else 4 * words
    return [found[i] for i in range(len(tensors))]


def _by_method(compressor: Compressor, tensors: list[Tensor]) -> list[int | None]:
    exempt = [t.size * t.dtype.size for t in tensors]
    if not compressor.together:
        return [
            whole if t.exempt else compressor.bytes(t.shape, t.dtype)
            for t, whole in zip(tensors, exempt, strict=True)
        ]
    others = [t for t in tensors if not t.exempt]
    size = sum(t.size for t in others)
    # Of all together a method says one number: in equal shares of an entry.
    total = compressor.bytes((size,), others[0].dtype) if others else 0
    return [
        whole if t.exempt else total and round(total * t.size / size)
        for t, whole in zip(tensors, exempt, strict=True)
    ]
