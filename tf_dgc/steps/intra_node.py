"""Inside a machine: its workers add up their gradients before they compress.

Each of them owns a shard of every tensor that is compressed, and goes on with the sum
there, and zeros elsewhere. So what is accumulated has its usual shape, and what all
workers hold adds up to what it would have been.
"""

from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import clipping
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.requests import AllToAll, Reply, Request
from tf_dgc.steps.accumulation import scaled_dense_gradients
from tf_dgc.steps.base import StepInputs


def reduce_within_node(
    inputs: StepInputs,
) -> Generator[list[Request], list[Reply], tuple[StepInputs, tf.Tensor]]:
    """Return inputs with the machine's sums, and whether the own gradient was finite.

    Those of a gradient that is not finite are left out, as zeros.

    Args:
        inputs: inputs of a step of this worker.

    Yields:
        Shards for the workers of the machine, of each dtype.
    """
    gradients, finite = scaled_dense_gradients(
        inputs.tensors, inputs.gradients, inputs.scales
    )
    if not all(isinstance(s, float) for s in inputs.scales):  # products may overflow
        gradients, fits = clipping.multiply_or_zero(gradients, [1.0] * len(gradients))
        finite = tf.logical_and(finite, fits)
    tensors, machine = inputs.tensors, inputs.machine
    places = [i for i, t in enumerate(tensors) if not t.uncompressed]
    dtypes = list(dict.fromkeys(tensors[i].dtype for i in places))
    by_dtype = [[i for i in places if tensors[i].dtype == dtype] for dtype in dtypes]
    if not places:
        return _with(inputs, gradients), finite
    replies: Any = yield [
        AllToAll(_rows([gradients[i] for i in some], len(machine)), machine)
        for some in by_dtype
    ]
    rank = machine.index(int(tf.get_static_value(inputs.worker)))
    for some, rows in zip(by_dtype, replies, strict=True):
        total = tf.reduce_sum(rows, axis=0)
        widths = [_width(tensors[i], len(machine)) for i in some]
        for i, shard in zip(some, tf.split(total, widths), strict=True):
            gradients[i] = _place(shard, rank, tensors[i])
    return _with(inputs, gradients), finite


def _with(inputs: StepInputs, gradients: Sequence[tf.Tensor]) -> StepInputs:
    return inputs._replace(gradients=gradients, scales=[1.0] * len(gradients))


def _rows(gradients: Sequence[tf.Tensor], number: int) -> tf.Tensor:
    """Return a row for each worker: its shards of all tensors, end to end."""
    padded = [tf.pad(g, [[0, -g.shape[0] % number]]) for g in gradients]
    return tf.concat([tf.reshape(g, [number, -1]) for g in padded], axis=1)


def _width(tensor: TensorSpec, number: int) -> int:
    return -(-tensor.size // number)


def _place(shard: tf.Tensor, rank: int, tensor: TensorSpec) -> tf.Tensor:
    """Return a gradient, `[n]`, that is zero but for the shard of this rank."""
    begin = min(rank * shard.shape[0], tensor.size)
    own = shard[: tensor.size - begin]
    return tf.pad(own, [[begin, tensor.size - begin - own.shape[0]]])
