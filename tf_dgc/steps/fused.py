"""The fused step of `TopK` with error feedback: one pass over memory, one request.

By the native operations where they can be used (`native.py`), else by TensorFlow's
(`operations.py`), which hand over the same words.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import schedules
from tf_dgc._internals import tracing
from tf_dgc.choice import choose
from tf_dgc.codecs import wire
from tf_dgc.collectives.packs import num_bytes
from tf_dgc.collectives.requests import Either
from tf_dgc.compressors import TopK, tie_offsets
from tf_dgc.steps import native, operations
from tf_dgc.steps.base import Inputs, Outcome, Step
from tf_dgc.steps.plan import LocalStep, Plan, plan


def begin(inputs: Inputs) -> Step | None:
    """Return the step; None for other methods, and without a residual.

    XLA has it composed: whether to go dense, and how much is sent, may be decided only
    at run time.
    """
    if type(inputs.compressor) is not TopK or not inputs.memory.residual:
        return None
    if tracing.in_xla_context():
        native.warn_of_xla()
        return None
    return _step(inputs, inputs.compressor)


def _step(inputs: Inputs, compressor: TopK) -> Step:
    sparsity = schedules.current(compressor.sparsity, inputs.iteration)
    layout = [t._replace(value_dtype=compressor.value_dtype) for t in inputs.tensors]
    sent = plan(layout, sparsity, inputs.num_workers)
    path = native if native.is_live(inputs.memory.residual) else operations
    # correct, compress, mask, encode
    vector, words, finite = path.compress(_local_step(inputs, sent))
    inputs.memory.warn_of(finite, inputs.iteration)
    _record(inputs, sent, words)
    ((total, buffers),) = yield [Either(sent.dense, vector, words, sent.dense_entries)]
    # decode, sum
    return Outcome(
        decode=lambda: path.unpack(sent, total, buffers),
        entries=sent.entries,
        sent_bytes=num_bytes(vector) + num_bytes(words),
        descend=_descend(sent, total, buffers) if path is native else None,
    )


def _local_step(inputs: Inputs, sent: Plan) -> LocalStep:
    offsets = tie_offsets(inputs.sizes, inputs.seed, inputs.iteration)
    return LocalStep(
        sent,
        inputs.gradients,
        inputs.scales,
        inputs.memory.velocity or None,
        inputs.memory.residual,
        [offsets[i] for i in inputs.indices],
        inputs.momentum,
        inputs.nesterov,
        inputs.factor_masking,
    )


def _record(inputs: Inputs, sent: Plan, words: tf.Tensor) -> None:
    """Remember for `staleness` what this worker is about to send."""
    recorder = inputs.memory.last_sent
    if recorder is None:
        return
    recorder.count_step()
    choose(
        sent.dense,
        lambda: recorder.record_all(inputs.indices),
        lambda: recorder.record_positions(
            inputs.indices, wire.positions(words, sent.layout, sent.counts)
        ),
    )


def _descend(sent: Plan, total: tf.Tensor, buffers: tf.Tensor) -> Callable:
    def descend(variables: Sequence[keras.Variable], rate: Any) -> tf.Tensor:
        return native.descend(sent, total, buffers, variables, rate)

    return descend
