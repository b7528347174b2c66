"""The step of methods that the native engine knows: all of a worker's part in one call.

What a composed step (`composed.py`) does by TensorFlow operations, tensor by tensor:
the same words in the same requests, so workers with and without it understand each
other.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.choice import add_up
from tf_dgc.codecs import checks, header
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.collectives.packs import num_bytes
from tf_dgc.collectives.requests import Gather, Message, Reply, Sum
from tf_dgc.collectives.rounds import fingerprint
from tf_dgc.compressors.base import Compressor, Native
from tf_dgc.ops import loader
from tf_dgc.steps import native, native_update
from tf_dgc.steps.accumulation import flatten
from tf_dgc.steps.base import Inputs, Outcome, Step
from tf_dgc.steps.native_update import UpdateRule
from tf_dgc.steps.plan import shares
from tf_dgc.transforms import clipping


def begin(inputs: Inputs) -> Step | None:
    """Return the step; None for methods and machines that the engine is not for."""
    if not _suits(inputs):
        return None
    apart = len(shares(inputs.tensors, inputs.num_workers)) > 1
    methods = [_method(inputs.compressor, t, apart) for t in inputs.tensors]
    known = [m for m in methods if m is not None]
    if len(known) < len(methods):
        return None
    if tracing.in_xla_context():
        native.warn_of_xla()
        return None
    return _step(inputs, known)


def _suits(inputs: Inputs) -> bool:
    """Return whether the engine has what the step needs, whatever the method."""
    plain = all(t.dtype == tf.float32 and t.narrow is None for t in inputs.tensors)
    watched = inputs.memory.last_sent is not None
    on_cpu = not tf.config.get_visible_devices("GPU")
    live = loader.native().library is not None
    return plain and on_cpu and live and not watched


def _method(compressor: Compressor, tensor: Tensor, apart: bool) -> Native | None:
    """Return what a tensor is sent by; exempt ones are summed if they are apart."""
    if tensor.exempt:
        summed = apart or compressor.aggregation == "sum"
        return Native("whole", [tensor.largest], (), tf.float32 if summed else None)
    bounded = compressor.respects_largest and tensor.largest < math.inf
    if compressor.together or bounded:
        return None
    return compressor.native(tensor.shape)


def _step(inputs: Inputs, methods: Sequence[Native]) -> Step:
    call = _Call(inputs, methods)
    requests, finite, entries = call.encode()
    inputs.memory.warn_of(finite, inputs.iteration)
    replies = yield requests
    return Outcome(
        decode=lambda: call.decode(replies),
        entries=entries,
        sent_bytes=add_up([num_bytes(request[0]) for request in requests]),
        apply=lambda rule: call.apply(replies, rule),
    )


class _Call:
    """The engine's operations on the tensors of a step.

    Args:
        inputs: variables, gradients and settings of the step.
        methods: native method of each tensor.
    """

    def __init__(self, inputs: Inputs, methods: Sequence[Native]):
        self._inputs = inputs
        self._methods = methods
        # Those that are summed as one dtype travel in one vector.
        self._dtypes = list(dict.fromkeys(m.summed_as for m in methods if m.summed_as))
        self._gathers = any(m.summed_as is None for m in methods)
        self._agreed = self._make_agreed()

    def _make_agreed(self) -> dict[str, Any]:
        """Return what all workers agree upon, as attributes of the operations."""
        inputs, methods, tensors = self._inputs, self._methods, self._inputs.tensors
        gathered = [
            t.agreed_by(inputs.compressor.name)
            for t, m in zip(tensors, methods, strict=True)
            if m.summed_as is None
        ]
        return {
            "methods": [m.name for m in methods],
            "num_parameters": [len(m.parameters) for m in methods],
            "parameters": [float(p) for m in methods for p in m.parameters],
            "sizes": [t.size for t in tensors],
            "columns": [t.shape[-1] if len(t.shape) > 1 else 1 for t in tensors],
            "vectors": [
                self._dtypes.index(m.summed_as) if m.summed_as else -1 for m in methods
            ],
            "indices": list(inputs.indices),
            "seed": inputs.seed,
            "fingerprint": fingerprint(0, gathered),
        }

    def encode(self) -> tuple[list[Message], tf.Tensor, tf.Tensor]:
        """Update what this worker remembers; return what it asks for.

        Returns:
            Requests in the order of a composed step; a scalar bool, whether this
            worker's gradient was finite; and a scalar int64, how many entries it sends.
        """
        inputs, memory = self._inputs, self._inputs.memory
        gradients = list(map(flatten, inputs.gradients, inputs.tensors))
        finite, entries, words, vectors = native.library().tf_dgc_encode(
            gradients=gradients,
            velocity=[native.handle(v) for v in memory.velocity],
            residual=[native.handle(v) for v in memory.residual],
            states=self._states([m.states for m in self._methods]),
            momentum=tf.constant(inputs.momentum, tf.float64),
            scales=clipping.drop(gradients, inputs.scales),
            iteration=tf.cast(inputs.iteration, tf.int64),
            worker=tf.cast(inputs.worker, tf.int32),
            nesterov=inputs.nesterov,
            factor_masking=inputs.factor_masking,
            V=self._dtypes,
            **self._agreed,
        )
        requests: list[Message] = [
            Sum(tf.ensure_shape(vector, [self._length(dtype)]))
            for dtype, vector in zip(self._dtypes, vectors, strict=True)
        ]
        if self._gathers:
            requests.append(Gather(tf.ensure_shape(words, [self._num_words()])))
        return requests, finite, entries

    def _length(self, dtype: tf.DType) -> int:
        """Return the numbers of a vector, behind its flag."""
        pairs = zip(self._inputs.tensors, self._methods, strict=True)
        return 1 + sum(m.num_summed or t.size for t, m in pairs if m.summed_as == dtype)

    def _num_words(self) -> int:
        """Return what the tensors that are gathered state, with the header."""
        compressor = self._inputs.compressor
        pairs = zip(self._inputs.tensors, self._methods, strict=True)
        stated = [
            4 * t.size if t.exempt else compressor.bytes(t.shape, t.dtype) or 0
            for t, m in pairs
            if m.summed_as is None
        ]
        return header.NUM_WORDS + sum(stated) // 4

    def decode(self, replies: list[Reply]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return the sum of each tensor, and the number of non-finite gradients."""
        nonfinite, finite, sums = native.library().tf_dgc_decode(
            num_tensors=len(self._inputs.tensors), **self._arrived(replies)
        )
        return self._if_finite(finite, (sums, self._counted(nonfinite, replies)))

    def apply(self, replies: list[Reply], rule: UpdateRule) -> tf.Tensor:
        """Update variables and slots; return the number of non-finite gradients."""
        nonfinite, finite = native.library().tf_dgc_decode_apply(
            **native_update.operands(rule), **self._arrived(replies)
        )
        return self._if_finite(finite, self._counted(nonfinite, replies))

    def _arrived(self, replies: list[Reply]) -> dict[str, Any]:
        """Return what both ways to decode take."""
        nothing = tf.zeros([0, 0], tf.int32)
        return {
            "buffers": replies[-1] if self._gathers else nothing,
            "totals": replies[: len(self._dtypes)],
            "iteration": tf.cast(self._inputs.iteration, tf.int64),
            "shared": self._states([m.shared for m in self._methods]),
            **self._agreed,
        }

    def _states(self, names: Sequence[Sequence[str]]) -> list[tf.Tensor]:
        """Return the handles of these states of each tensor."""
        states = zip(self._inputs.memory.states, names, strict=True)
        return [native.handle(state[name]) for state, own in states for name in own]

    def _counted(self, nonfinite: tf.Tensor, replies: list[Reply]) -> tf.Tensor:
        """Return how many workers' gradients were not finite, by buffers or flags."""
        return nonfinite if self._gathers else tf.cast(replies[0][0], tf.int32)

    def _if_finite(self, finite: tf.Tensor, results: Any) -> Any:
        labels = [t.label for t in self._inputs.tensors]
        return checks.gate_sums(finite, ["float32"], labels, results)
