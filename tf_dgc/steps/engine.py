"""The step of methods that the native engine knows: all of a worker's part in one call.

What a composed step (`composed.py`) does by TensorFlow operations, tensor by tensor:
the same words in the same requests, so workers with and without it understand each
other.
"""

import math
from collections.abc import Sequence

import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.choice import add_up
from tf_dgc.codecs import value_types
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.collectives.packs import num_bytes
from tf_dgc.compressors.base import Native
from tf_dgc.ops import loader
from tf_dgc.steps import engine_on_gpu, native
from tf_dgc.steps.accumulation import divide
from tf_dgc.steps.base import Inputs, Outcome, Step
from tf_dgc.steps.engine_calls import Call


def begin(inputs: Inputs) -> Step | None:
    """Return the step; None for methods and machines that the engine is not for."""
    if not _suits(inputs):
        return None
    apart = inputs.sums_exempt
    methods = [_method(inputs, t, apart) for t in inputs.tensors]
    known = [m for m in methods if m is not None]
    by_some = any(m.by_all for m in known) and not inputs.by_all
    if len(known) < len(methods) or by_some:
        return None
    if tracing.in_xla_context():
        native.warn_of_xla()
        return None
    if engine_on_gpu.is_wanted() and not engine_on_gpu.suits(inputs, known):
        return None
    if not native.knows(inputs.divisors):
        inputs = _divided(inputs)
    if not engine_on_gpu.is_wanted():
        return _step(inputs, known)
    return _step(engine_on_gpu.simplify(inputs), known, updates=False)


def _divided(inputs: Inputs) -> Inputs:
    """Return the same step with its divisions done, which the engine does not know."""
    given, scales = divide(
        inputs.tensors, inputs.gradients, inputs.scales, inputs.divisors
    )
    return inputs._replace(gradients=given, scales=scales, divisors=())


def _suits(inputs: Inputs) -> bool:
    """Return whether the engine has what the step needs, whatever the method."""
    plain = all(
        t.dtype == tf.float32 and t.narrow is None and t.exempt_dtype is None
        for t in inputs.tensors
    )
    watched = inputs.memory.last_sent is not None
    live = loader.native().library is not None
    # By a schedule it is known only when the step runs; an operation is told before.
    known = isinstance(inputs.factor_masking, bool)
    return plain and live and known and not watched


def _method(inputs: Inputs, tensor: Tensor, apart: bool) -> Native | None:
    """Return what a tensor is sent by; exempt ones are summed if they are apart."""
    compressor = inputs.compressor
    if tensor.exempt:
        summed = apart or compressor.aggregation == "sum"
        return Native("whole", [tensor.largest], (), tf.float32 if summed else None)
    # What a class derives from is native; what it does otherwise is not.
    if compressor.together or "native" not in vars(type(compressor)):
        return None
    method = compressor.native(tensor.shape)
    if method is None:
        return None
    if method.takes_term:
        term = value_types.largest_term(method.summed_as, inputs.num_workers)
        method = method._replace(parameters=[*method.parameters, term])
    if not compressor.respects_largest:
        return method
    if method.bounded:
        return method._replace(parameters=[*method.parameters, tensor.largest])
    return None if tensor.largest < math.inf else method


def _step(inputs: Inputs, methods: Sequence[Native], updates: bool = True) -> Step:
    call = Call(inputs, methods)
    sent = [call.encode(0)]
    inputs.memory.warn_of(sent[0].finite, inputs.iteration)
    replies = [(yield sent[0].requests)]
    if call.num_rounds > 1:
        call.agree(sent[0], replies[0])
        sent.append(call.encode(1))
        call.heed(sent[1])
        replies.append((yield sent[1].requests))
    requests = [request for s in sent for request in s.requests]
    return Outcome(
        decode=lambda: call.decode(replies),
        entries=add_up([s.entries for s in sent]),
        sent_bytes=add_up([num_bytes(request[0]) for request in requests]),
        apply=(lambda rule: call.apply(replies, rule)) if updates else None,
    )
