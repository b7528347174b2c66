"""Intra-node reduce: the workers of a machine sum their gradients before compression.

Each worker owns a shard of every compressed tensor. It continues with the machine's sum
in its shard and zeros elsewhere. So accumulators have their usual shape, and the sum
over all workers is unchanged.
"""

from collections.abc import Generator, Sequence

import tensorflow as tf

from tf_dgc import clipping
from tf_dgc.collectives.requests import AllToAll, Reply, Request
from tf_dgc.steps.accumulation import scaled_dense_gradients
from tf_dgc.steps.base import StepInputs


def reduce_within_node(
    inputs: StepInputs,
) -> Generator[list[Request], list[Reply], tuple[StepInputs, tf.Tensor]]:
    """Return inputs with the machine's sums, and whether this gradient was finite.

    A worker whose gradient is not finite contributes zeros.

    Yields:
        An all-to-all of shards among the machine's workers for each dtype.
    """
    tensors, machine = inputs.tensors, inputs.machine
    gradients, finite = scaled_dense_gradients(tensors, inputs.gradients, inputs.scales)
    if not all(isinstance(s, float) for s in inputs.scales):  # products may overflow
        gradients, fits = clipping.multiply_or_zero(gradients, [1.0] * len(gradients))
        finite = tf.logical_and(finite, fits)
    by_dtype: dict[tf.DType, list[int]] = {}
    for i, t in enumerate(tensors):
        if not t.uncompressed:
            by_dtype.setdefault(t.dtype, []).append(i)
    if by_dtype:
        replies = yield [
            AllToAll(_shard_rows([gradients[i] for i in places], len(machine)), machine)
            for places in by_dtype.values()
        ]
        rank = machine.index(int(tf.get_static_value(inputs.worker)))
        for places, rows in zip(by_dtype.values(), replies, strict=True):
            widths = [-(-tensors[i].size // len(machine)) for i in places]
            shards = tf.split(tf.reduce_sum(rows, axis=0), widths)
            for i, shard in zip(places, shards, strict=True):
                gradients[i] = _pad_shard(shard, rank, tensors[i].size)
    scales = [1.0] * len(gradients)
    return inputs._replace(gradients=gradients, scales=scales), finite


def _shard_rows(gradients: Sequence[tf.Tensor], num_workers: int) -> tf.Tensor:
    """Return a row for each worker: its shards of all tensors, concatenated."""
    padded = [tf.pad(g, [[0, -g.shape[0] % num_workers]]) for g in gradients]
    return tf.concat([tf.reshape(g, [num_workers, -1]) for g in padded], axis=1)


def _pad_shard(shard: tf.Tensor, rank: int, size: int) -> tf.Tensor:
    """Return a gradient `[size]` that is zero outside the shard of this rank."""
    begin = min(rank * shard.shape[0], size)
    shard = shard[: size - begin]  # the last shards may be padded
    return tf.pad(shard, [[begin, size - begin - shard.shape[0]]])
