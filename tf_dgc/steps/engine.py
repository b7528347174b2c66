"""The step of methods that the native engine knows: all of a worker's part in one call.

What a composed step (`composed.py`) does by TensorFlow operations, tensor by tensor:
the same words in the same requests, so workers with and without it understand each
other.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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


class _Sent(NamedTuple):
    """What this worker does in a round.

    Attributes:
        requests: what it asks for, in the order of a composed step.
        finite: whether its gradient was finite, a scalar bool.
        entries: number of entries that it sends, a scalar int64.
    """

    requests: list[Message]
    finite: tf.Tensor
    entries: tf.Tensor


def _step(inputs: Inputs, methods: Sequence[Native]) -> Step:
    call = _Call(inputs, methods)
    sent = [call.encode(0)]
    inputs.memory.warn_of(sent[0].finite, inputs.iteration)
    replies = [(yield sent[0].requests)]
    if call.num_rounds > 1:
        call.agree(sent[0], replies[0])
        sent.append(call.encode(1))
        replies.append((yield sent[1].requests))
    requests = [request for s in sent for request in s.requests]
    return Outcome(
        decode=lambda: call.decode(replies),
        entries=add_up([s.entries for s in sent]),
        sent_bytes=add_up([num_bytes(request[0]) for request in requests]),
        apply=lambda rule: call.apply(replies, rule),
    )


class _Call:
    """The engine's operations on the tensors of a step.

    Args:
        inputs: variables, gradients and settings of the step.
        methods: native method of each tensor.

    Attributes:
        num_rounds: how many rounds there are; the second one is of some tensors.
    """

    def __init__(self, inputs: Inputs, methods: Sequence[Native]):
        self._inputs = inputs
        self._methods = methods
        # Those that are summed as one dtype travel in one vector.
        self._dtypes = list(dict.fromkeys(m.summed_as for m in methods if m.summed_as))
        self._gathers = any(m.summed_as is None for m in methods)
        self._numbers = tf.zeros([0])
        self.num_rounds = 2 if any(m.first for m in methods) else 1
        self._agreed = self._make_agreed()

    def _make_agreed(self) -> dict[str, Any]:
        """Return what all workers agree upon, as attributes of the operations."""
        inputs, methods, tensors = self._inputs, self._methods, self._inputs.tensors
        rounds = [
            [
                t.agreed_by(inputs.compressor.name)
                for t, m in zip(tensors, methods, strict=True)
                if m.summed_as is None and (m.first or number == 0)
            ]
            for number in range(self.num_rounds)
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
            "fingerprints": [fingerprint(i, agreed) for i, agreed in enumerate(rounds)],
            "firsts": [m.first or "" for m in methods],
            "num_numbers": [m.num_numbers for m in methods],
        }

    def encode(self, number: int) -> _Sent:
        """Update what this worker remembers, in a round; return what it asks for."""
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
            numbers=self._numbers,
            round=number,
            worker=tf.cast(inputs.worker, tf.int32),
            nesterov=inputs.nesterov,
            factor_masking=inputs.factor_masking,
            V=self._dtypes,
            **self._agreed,
        )
        requests: list[Message] = []
        if number == 0:
            requests = [
                Sum(tf.ensure_shape(vector, [self._length(dtype)]))
                for dtype, vector in zip(self._dtypes, vectors, strict=True)
            ]
        if self._gathers:
            length = header.NUM_WORDS + sum(self._num_words(number))
            requests.append(Gather(tf.ensure_shape(words, [length])))
        return _Sent(requests, finite, entries)

    def agree(self, sent: _Sent, replies: list[Reply]) -> None:
        """Make the numbers of the second round of what was gathered in the first."""
        gathered = sent.requests[-1]  # after the sums
        assert isinstance(gathered, Gather)
        own = gathered.words[header.NUM_WORDS :]
        length = header.NUM_WORDS + own.shape[0]
        agreed = self._agreed["fingerprints"][0]
        everyone, _ = header.unseal(replies[-1], agreed, length)
        starts = itertools.accumulate(self._num_words(0), initial=0)
        places = [
            list(range(start, start + m.num_words))
            for start, m in zip(starts, self._methods, strict=False)
            if m.first
        ]
        of_tensors = tf.transpose(tf.gather(everyone, places, axis=1), [1, 0, 2])
        numbers = self._inputs.compressor.numbers(of_tensors, tf.gather(own, places))
        self._numbers = tf.reshape(numbers, [-1])

    def _length(self, dtype: tf.DType) -> int:
        """Return the numbers of a vector, behind its flag."""
        pairs = zip(self._inputs.tensors, self._methods, strict=True)
        return 1 + sum(m.num_summed or t.size for t, m in pairs if m.summed_as == dtype)

    def _num_words(self, number: int) -> list[int]:
        """Return what each tensor hands over in a round, to be gathered."""
        compressor = self._inputs.compressor

        def words(tensor: Tensor, method: Native) -> int:
            if method.summed_as is not None or (number and not method.first):
                return 0
            if tensor.exempt:
                return tensor.size
            if method.first and number == 0:
                return method.num_words
            stated = compressor.bytes(tensor.shape, tensor.dtype) or 0
            return stated // 4 - method.num_words

        return list(map(words, self._inputs.tensors, self._methods))

    def decode(self, replies: list[list[Reply]]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return the sum of each tensor, and the number of non-finite gradients."""
        nonfinite, finite, sums = native.library().tf_dgc_decode(
            num_tensors=len(self._inputs.tensors), **self._arrived(replies)
        )
        return self._if_finite(finite, (sums, self._counted(nonfinite, replies)))

    def apply(self, replies: list[list[Reply]], rule: UpdateRule) -> tf.Tensor:
        """Update variables and slots; return the number of non-finite gradients."""
        nonfinite, finite = native.library().tf_dgc_decode_apply(
            **native_update.operands(rule), **self._arrived(replies)
        )
        return self._if_finite(finite, self._counted(nonfinite, replies))

    def _arrived(self, replies: list[list[Reply]]) -> dict[str, Any]:
        """Return what both ways to decode take."""
        nothing = tf.zeros([0, 0], tf.int32)
        return {
            "buffers": [r[-1] if self._gathers else nothing for r in replies],
            "totals": replies[0][: len(self._dtypes)],
            "numbers": self._numbers,
            "iteration": tf.cast(self._inputs.iteration, tf.int64),
            "shared": self._states([m.shared for m in self._methods]),
            **self._agreed,
        }

    def _states(self, names: Sequence[Sequence[str]]) -> list[tf.Tensor]:
        """Return the handles of these states of each tensor."""
        states = zip(self._inputs.memory.states, names, strict=True)
        return [native.handle(state[name]) for state, own in states for name in own]

    def _counted(self, nonfinite: tf.Tensor, replies: list[list[Reply]]) -> tf.Tensor:
        """Return how many workers' gradients were not finite, by buffers or flags."""
        return nonfinite if self._gathers else tf.cast(replies[0][0][0], tf.int32)

    def _if_finite(self, finite: tf.Tensor, results: Any) -> Any:
        labels = [t.label for t in self._inputs.tensors]
        return checks.gate_sums(finite, ["float32"], labels, results)
