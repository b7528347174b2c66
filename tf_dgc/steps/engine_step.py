"""The step of methods that the native engine knows: all of a worker's part in one call.

What a composed step (`generic_step.py`) does by TensorFlow operations, tensor by
tensor:
the same words in the same requests, so workers with and without it understand each
other.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import native_library
from tf_dgc._internals import tracing
from tf_dgc.codecs import buffer, checks, value_types
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.packing import num_bytes, round_fingerprint
from tf_dgc.collectives.requests import AllGather, AllReduce, Reply, Request
from tf_dgc.compressors.base import Compressor, NativeMethod
from tf_dgc.compressors.common.one_round import MethodStates, RoundsResult, TwoRounds
from tf_dgc.smart_cond import add_counts
from tf_dgc.steps import native
from tf_dgc.steps.accumulation import divide, flatten, flatten_dense, gradient_values
from tf_dgc.steps.base import Step, StepInputs, StepOutcome
from tf_dgc.steps.native import UpdateRule

# --- What native methods of two rounds are told between them, and what becomes of it.


class BetweenRounds:
    """Numbers that each tensor's method is told now, round after round.

    Args:
        compressor: method of all tensors that are not exempt.
        methods: native method of each tensor.
        states: variables of each tensor's state, by name.

    Attributes:
        num_rounds: number of rounds; the second one is of some tensors.
        are_sums: whether both rounds are sums.
    """

    def __init__(
        self,
        compressor: Compressor,
        methods: Sequence[NativeMethod],
        states: MethodStates,
    ):
        self._methods = methods
        pairs = zip(states, methods, strict=True)
        self._states = [state for state, method in pairs if method.first]
        self.num_rounds = 2 if self._states else 1
        self.are_sums = any(method.first_summed for method in methods)
        asked = compressor if isinstance(compressor, TwoRounds) else None
        self._asked = asked if self._states else None
        self._notes = nothing = tf.zeros([len(self._states), 0])
        self._tell(
            self._asked.first_parameters(self._states) if self._asked else nothing
        )

    def operands(self) -> dict[str, Any]:
        """Return what the operations of this round take."""
        flat = [tf.reshape(told, [-1]) for told in self._told]
        counts = iter([told.shape[0] for told in flat])
        return {
            "numbers": tf.concat([tf.zeros([0]), *flat], axis=0),
            "num_numbers": [next(counts) if m.first else 0 for m in self._methods],
        }

    def hear_words(self, everyone: tf.Tensor, notes: tf.Tensor) -> None:
        """Take what was gathered in the first round.

        Args:
            everyone: words of all workers, int32 `[tensors, num_workers, w]`.
            notes: numbers that this worker noted, float32 `[tensors * m]`.
        """
        self._notes = tf.reshape(notes, [len(self._states), self._num_notes()])
        if self._asked:
            said = self._asked.second_parameters(everyone, self._notes, self._states)
            self._tell(said)

    def hear_sums(self, sums: Sequence[tf.Tensor]) -> None:
        """Take what was summed in the first round, of each tensor that has two."""
        self._told = list(sums)

    def hear_notes(self, notes: tf.Tensor) -> None:
        """Take what the second of two sums noted for the decoders."""
        if self.are_sums:
            lengths = [m.num_notes for m in self._methods if m.first]
            self._told = tf.split(notes, lengths)

    def settle(self, norms: tf.Tensor, sums: Sequence[tf.Tensor]) -> list[dict]:
        """Return new values of the states of tensors with two rounds.

        Args:
            norms: norm of each tensor's sum, if the method notes it.
            sums: sum over workers of each tensor's numbers in the second round.
        """
        if self._asked is None:
            return []
        ended = RoundsResult(self._said, self._notes, norms, sums)
        return self._asked.updated_states(ended, self._states)

    def assign(self, new: Sequence[dict]) -> None:
        """Store what `settle` returned."""
        for state, values in zip(self._states, new, strict=False):
            for name, value in values.items():
                state[name].assign(value)

    def _tell(self, said: tf.Tensor | Sequence[tf.Tensor]) -> None:
        self._said = said
        of_each = tf.unstack(said) if tf.is_tensor(said) and self._states else said
        self._told = list(of_each) if self._states else []

    def _num_notes(self) -> int:
        return max(method.num_notes for method in self._methods)


# --- The native engine's operations on the tensors of a step.


class EncodedRound(NamedTuple):
    """What this worker does in a round.

    Attributes:
        requests: messages, in the order of a composed step.
        finite: whether its gradient was finite, a scalar bool.
        entries: number of entries that it sends, a scalar int64.
        notes: numbers that methods of two rounds leave for the second, float32.
    """

    requests: list[Request]
    finite: tf.Tensor
    entries: tf.Tensor
    notes: tf.Tensor


class EngineCall:
    """What a step calls, and in between.

    Args:
        inputs: variables, gradients and settings of the step.
        methods: native method of each tensor.

    Attributes:
        num_rounds: number of rounds; the second one is of some tensors.
    """

    def __init__(self, inputs: StepInputs, methods: Sequence[NativeMethod]):
        self._inputs = inputs
        self._methods = methods
        # Those that are summed as one dtype travel in one vector.
        self._dtypes = list(dict.fromkeys(m.summed_as for m in methods if m.summed_as))
        self._gathers = any(m.summed_as is None for m in methods)
        self._between = BetweenRounds(
            inputs.compressor, methods, inputs.worker_state.states
        )
        self.num_rounds = self._between.num_rounds
        self._agreed = self._make_agreed()
        gradients = list(map(flatten_dense, inputs.gradients, inputs.tensors))
        self._rows = native.row_operands(gradients)
        self._gradients = list(map(gradient_values, gradients))
        residual = inputs.worker_state.residual
        self._scales = native.zero_scales_if_nonfinite(
            self._gradients, inputs.scales, residual
        )

    def _make_agreed(self) -> dict[str, Any]:
        """Return what all workers agree upon, as attributes of the operations."""
        inputs, methods, tensors = self._inputs, self._methods, self._inputs.tensors
        rounds = [
            [
                t.signature_of(inputs.compressor.name)
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
            "fingerprints": [
                round_fingerprint(i, agreed) for i, agreed in enumerate(rounds)
            ],
            "firsts": [m.first or "" for m in methods],
            "first_vectors": [
                self._dtypes.index(m.summed_as) if m.first_summed else -1
                for m in methods
            ],
        }

    def encode(self, number: int) -> EncodedRound:
        """Update what this worker remembers, in a round; return what it asks for."""
        inputs, worker_state = self._inputs, self._inputs.worker_state
        states = self._states([m.states for m in self._methods])
        finite, entries, words, notes, vectors = native.ops().tf_dgc_encode(
            gradients=self._gradients,
            velocity=[native.resource_handle(v) for v in worker_state.velocity],
            residual=[native.resource_handle(v) for v in worker_state.residual],
            states=states,
            momentum=tf.constant(inputs.momentum, tf.float64),
            scales=self._scales,
            iteration=tf.cast(inputs.iteration, tf.int64),
            round=number,
            worker=tf.cast(inputs.worker, tf.int32),
            nesterov=inputs.nesterov,
            factor_masking=inputs.factor_masking,
            V=self._dtypes,
            **self._rows,
            **native.divisor_operands(inputs.divisors),
            **self._between.operands(),
            **self._agreed,
        )
        if not (states or worker_state.velocity or worker_state.residual):
            tracing.leave_unordered(words)
        requests: list[Request] = []
        if number == 0 or self._between.are_sums:
            requests = [
                AllReduce(
                    tf.ensure_shape(vector, [1 + sum(self._summed(dtype, number))])
                )
                for dtype, vector in zip(self._dtypes, vectors, strict=True)
            ]
        if self._gathers:
            sizes = [buffer.HEADER_WORDS, *self._num_words(number)]
            words = tf.ensure_shape(words, [None if None in sizes else sum(sizes)])
            requests.append(AllGather(words))
        return EncodedRound(requests, finite, entries, notes)

    def agree(self, sent: EncodedRound, replies: list[Reply]) -> None:
        """Have the second round told what the first one came to."""
        if self._between.are_sums:
            self._between.hear_sums(self._sums(replies, 0))
            return
        length = buffer.HEADER_WORDS + sum(self._num_words(0))
        agreed = self._agreed["fingerprints"][0]
        everyone, _ = buffer.remove_header(replies[-1], agreed, length)
        starts = itertools.accumulate(self._num_words(0), initial=0)
        places = [
            list(range(start, start + m.num_words))
            for start, m in zip(starts, self._methods, strict=False)
            if m.first
        ]
        of_tensors = tf.transpose(tf.gather(everyone, places, axis=1), [1, 0, 2])
        self._between.hear_words(of_tensors, sent.notes)

    def heed(self, sent: EncodedRound) -> None:
        """Have decoders told what was noted in the second round, if that is needed."""
        self._between.hear_notes(sent.notes)

    def _sums(self, replies: list[Reply], number: int) -> list[tf.Tensor]:
        """Return what was summed in a round of each tensor that has two, float32."""
        own: dict[int, tf.Tensor] = {}
        for dtype, total in zip(self._dtypes, replies, strict=False):
            _, *parts = tf.split(total, [1, *self._summed(dtype, number)])
            own |= {
                i: tf.cast(part, tf.float32)
                for i, (part, m) in enumerate(zip(parts, self._methods, strict=True))
                if m.first_summed and m.summed_as == dtype
            }
        return [own[i] for i in sorted(own)]

    def _summed(self, dtype: tf.DType, number: int) -> list[int]:
        """Return how many numbers of each tensor are in a vector, in a round."""

        def count(tensor: TensorSpec, method: NativeMethod) -> int:
            if method.summed_as != dtype or (number and not method.first):
                return 0
            first = 0 if number else method.first_summed
            return first or method.num_summed or tensor.size

        return list(map(count, self._inputs.tensors, self._methods))

    def _num_words(self, number: int) -> list[Any]:
        """Return the words of each tensor in a round; None if decided at run time."""
        compressor = self._inputs.compressor

        def words(tensor: TensorSpec, method: NativeMethod) -> int | None:
            if method.summed_as is not None or (number and not method.first):
                return 0
            if tensor.uncompressed:
                return tensor.size
            if method.first and number == 0:
                return method.num_words
            stated = compressor.bytes(tensor.shape, tensor.dtype)
            return None if stated is None else stated // 4 - method.num_words

        return list(map(words, self._inputs.tensors, self._methods))

    def decode(self, replies: list[list[Reply]]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return the sum of each tensor, and the number of non-finite gradients."""
        arrived = self._arrived(replies)
        nonfinite, finite, norms, sums = native.ops().tf_dgc_decode(
            num_tensors=len(self._inputs.tensors), **arrived
        )
        if not arrived["shared"]:
            tracing.leave_unordered(nonfinite)
        results = sums, self._counted(nonfinite, replies)
        return self._if_finite(finite, self._settle(norms, replies), results)

    def apply(self, replies: list[list[Reply]], rule: UpdateRule) -> tf.Tensor:
        """Update variables and slots; return the number of non-finite gradients."""
        nonfinite, finite, norms = native.ops().tf_dgc_decode_apply(
            **native.rule_operands(rule), **self._arrived(replies)
        )
        results = self._counted(nonfinite, replies)
        return self._if_finite(finite, self._settle(norms, replies), results)

    def _arrived(self, replies: list[list[Reply]]) -> dict[str, Any]:
        """Return what both ways to decode take."""
        nothing = tf.zeros([0, 0], tf.int32)
        num, vectors = len(self._dtypes), self._agreed["vectors"]
        totals = replies[0][:num]
        if self._between.are_sums:
            totals = totals + replies[1][:num]
            pairs = zip(vectors, self._methods, strict=True)
            vectors = [v + num if m.first_summed else v for v, m in pairs]
        return {
            "buffers": [r[-1] if self._gathers else nothing for r in replies],
            "totals": totals,
            "iteration": tf.cast(self._inputs.iteration, tf.int64),
            "shared": self._states([m.shared for m in self._methods]),
            **self._between.operands(),
            **self._agreed,
            "vectors": vectors,
        }

    def _states(self, names: Sequence[Sequence[str]]) -> list[tf.Tensor]:
        """Return the handles of these states of each tensor."""
        states = zip(self._inputs.worker_state.states, names, strict=True)
        return [
            native.resource_handle(state[name]) for state, own in states for name in own
        ]

    def _counted(self, nonfinite: tf.Tensor, replies: list[list[Reply]]) -> tf.Tensor:
        """Return how many workers' gradients were not finite, by buffers or flags."""
        return nonfinite if self._gathers else tf.cast(replies[0][0][0], tf.int32)

    def _settle(self, norms: tf.Tensor, replies: list[list[Reply]]) -> list[dict]:
        """Return new values of the states of tensors that have two rounds."""
        sums = self._sums(replies[1], 1) if self._between.are_sums else []
        return self._between.settle(norms, sums)

    def _if_finite(self, finite: tf.Tensor, new: list[dict], results: Any) -> Any:
        """Return the results, and store states, unless a sum is not finite."""
        labels = [t.label for t in self._inputs.tensors]
        results, new = checks.require_finite(
            finite, ["float32"], labels, (results, new)
        )
        self._between.assign(new)
        return results


# --- What the engine's CUDA kernels take of a step, which is less than the engine does.


def gpu_requested() -> bool:
    """Whether there are GPUs, where a step might run."""
    return bool(tf.config.get_visible_devices("GPU"))


def gpu_supports(inputs: StepInputs, methods: Sequence[NativeMethod]) -> bool:
    """Return whether there are kernels for all of a step, and it is all on a GPU."""
    state = native_library.load_library()
    if state.cuda_problem:
        return False
    known = {*state.cuda_methods}
    own = inputs.worker_state
    worker_state = [*own.velocity, *own.residual, *own.second_moment]
    return all(m.name in known for m in methods) and all(
        native.is_on_gpu([v]) for v in worker_state
    )


def without_unsupported(inputs: StepInputs) -> StepInputs:
    """Return the same step with dense gradients."""
    return inputs._replace(
        gradients=list(map(flatten, inputs.gradients, inputs.tensors))
    )


def start_engine_step(inputs: StepInputs) -> Step | None:
    """Return the step; None for methods and machines that the engine is not for."""
    if not _suits(inputs):
        return None
    apart = inputs.sums_uncompressed
    methods = [_method(inputs, t, apart) for t in inputs.tensors]
    known = [m for m in methods if m is not None]
    by_some = any(m.all_workers_native for m in known) and not inputs.all_workers_native
    if len(known) < len(methods) or by_some:
        return None
    if tracing.in_xla_context():
        native.warn_of_xla()
        return None
    if gpu_requested() and not gpu_supports(inputs, known):
        return None
    if not native.supports(inputs.divisors):
        inputs = _divided(inputs)
    if not gpu_requested():
        return _step(inputs, known)
    return _step(without_unsupported(inputs), known, updates=False)


def _divided(inputs: StepInputs) -> StepInputs:
    """Return the same step with its divisions done, which the engine does not know."""
    given, scales = divide(
        inputs.tensors, inputs.gradients, inputs.scales, inputs.divisors
    )
    return inputs._replace(gradients=given, scales=scales, divisors=())


def _suits(inputs: StepInputs) -> bool:
    """Return whether the engine has what the step needs, whatever the method."""
    plain = all(
        t.dtype == tf.float32 and t.narrow is None and t.uncompressed_dtype is None
        for t in inputs.tensors
    )
    watched = inputs.worker_state.last_sent is not None
    live = native_library.load_library().library is not None
    # By a schedule it is known only when the step runs; an operation is told before.
    known = isinstance(inputs.factor_masking, bool)
    return plain and live and known and not watched


def _method(inputs: StepInputs, tensor: TensorSpec, apart: bool) -> NativeMethod | None:
    """Return what a tensor is sent by; exempt ones are summed if they are apart."""
    compressor = inputs.compressor
    if tensor.uncompressed:
        summed = apart or compressor.aggregation == "sum"
        return NativeMethod(
            "whole", [tensor.largest], (), tf.float32 if summed else None
        )
    # What a class derives from is native; what it does otherwise is not.
    if compressor.together or "native" not in vars(type(compressor)):
        return None
    method = compressor.native(tensor.shape)
    if method is None:
        return None
    if method.needs_term_bound:
        term = value_types.largest_term(method.summed_as, inputs.num_workers)
        method = method._replace(parameters=[*method.parameters, term])
    if not compressor.respects_largest:
        return method
    if method.bounded:
        return method._replace(parameters=[*method.parameters, tensor.largest])
    return None if tensor.largest < math.inf else method


def _step(
    inputs: StepInputs, methods: Sequence[NativeMethod], updates: bool = True
) -> Step:
    call = EngineCall(inputs, methods)
    sent = [call.encode(0)]
    inputs.worker_state.warn_of(sent[0].finite, inputs.iteration)
    replies = [(yield sent[0].requests)]
    if call.num_rounds > 1:
        call.agree(sent[0], replies[0])
        sent.append(call.encode(1))
        call.heed(sent[1])
        replies.append((yield sent[1].requests))
    requests = [request for s in sent for request in s.requests]
    return StepOutcome(
        decode=lambda: call.decode(replies),
        entries=add_counts([s.entries for s in sent]),
        sent_bytes=add_counts([num_bytes(request[0]) for request in requests]),
        apply=(lambda rule: call.apply(replies, rule)) if updates else None,
    )
