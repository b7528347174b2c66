"""The step of methods that the native engine supports: all tensors in one call.

It sends the same words in the same requests as `generic_step.py`, so workers with and
without the engine can train together.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

from tf_dgc import native_library
from tf_dgc._internals import tracing
from tf_dgc.codecs import buffer, checks, value_types
from tf_dgc.codecs.bits import num_bytes
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.packing import round_fingerprint
from tf_dgc.collectives.requests import AllGather, AllReduce, Reply, Request
from tf_dgc.compressors.base import Compressor, NativeMethod
from tf_dgc.compressors.common.one_round import MethodStates, RoundsResult, TwoRounds
from tf_dgc.conditions import add_counts
from tf_dgc.steps import gpu_check, native
from tf_dgc.steps.accumulation import divide, flatten, flatten_dense, gradient_values
from tf_dgc.steps.base import Step, StepInputs, StepOutcome, UpdateRule

_State: TypeAlias = dict[str, tf.Tensor]
_T = TypeVar("_T")


def start_engine_step(inputs: StepInputs) -> Step | None:
    """Return the step; None if the engine does not support it, and within XLA."""
    if not _is_supported(inputs):
        return None
    summed = inputs.sums_uncompressed
    methods = []
    for tensor in inputs.tensors:
        method = _native_method(inputs, tensor, summed)
        if method is None:
            return None
        methods.append(method)
    if any(m.all_workers_native for m in methods) and not inputs.all_workers_native:
        return None
    if tracing.in_xla_context():
        native.warn_of_xla()
        return None
    on_gpu = native.has_gpus()
    if on_gpu and not gpu_supports(inputs, methods):
        return None
    if not native.supports(inputs.divisors):
        gradients, scales = divide(
            inputs.tensors, inputs.gradients, inputs.scales, inputs.divisors
        )
        inputs = inputs._replace(gradients=gradients, scales=scales, divisors=())
    if on_gpu:  # the kernels have no sparse gradients
        gradients = list(map(flatten, inputs.gradients, inputs.tensors))
        inputs = inputs._replace(gradients=gradients)
    return _step(inputs, methods, updates=not on_gpu)


def _is_supported(inputs: StepInputs) -> bool:
    """Return whether the engine supports the step, regardless of the method."""
    return (
        native_library.load_library().library is not None
        and inputs.worker_state.last_sent is None
        # An attribute of the operation, so a schedule's tensor is not possible.
        and isinstance(inputs.factor_masking, bool)
        and all(
            t.dtype == tf.float32
            and t.narrow_dtype is None
            and t.uncompressed_dtype is None
            for t in inputs.tensors
        )
    )


def gpu_supports(inputs: StepInputs, methods: Sequence[NativeMethod]) -> bool:
    """Return whether all methods have CUDA kernels and the state is on a GPU."""
    if not gpu_check.uses_kernels():
        return False
    state = inputs.worker_state
    variables = [*state.velocity, *state.residual, *state.second_moment]
    kernels = native_library.load_library().cuda_methods
    return all(m.name in kernels for m in methods) and all(
        native.is_on_gpu([v]) for v in variables
    )


def _native_method(
    inputs: StepInputs, tensor: TensorSpec, sums_uncompressed: bool
) -> NativeMethod | None:
    """Return the method that sends a tensor; None if the engine has none."""
    compressor = inputs.compressor
    if tensor.uncompressed:
        summed = sums_uncompressed or compressor.aggregation == "sum"
        return NativeMethod(
            "whole", [tensor.max_magnitude], summed_as=tf.float32 if summed else None
        )
    # A subclass may do something else than the native method of its base class.
    if compressor.entire_model or "native" not in vars(type(compressor)):
        return None
    method = compressor.native(tensor.shape)
    if method is None:
        return None
    if method.needs_term_bound:
        bound = value_types.largest_term(method.summed_as, inputs.num_workers)
        method = method._replace(parameters=[*method.parameters, bound])
    if not compressor.limits_magnitudes:
        return method
    if method.bounded:
        return method._replace(parameters=[*method.parameters, tensor.max_magnitude])
    return None if tensor.max_magnitude < math.inf else method


def _step(inputs: StepInputs, methods: Sequence[NativeMethod], updates: bool) -> Step:
    call = EngineCall(inputs, methods)
    rounds = [call.encode(0)]
    inputs.worker_state.warn_if_nonfinite(rounds[0].finite, inputs.iteration)
    replies = [(yield rounds[0].requests)]
    if call.num_rounds > 1:
        call.prepare_second_round(rounds[0], replies[0])
        rounds.append(call.encode(1))
        replies.append((yield rounds[1].requests))
    return StepOutcome(
        decode=lambda: call.decode(replies),
        entries=add_counts([r.entries for r in rounds]),
        sent_bytes=add_counts(
            [num_bytes(request[0]) for r in rounds for request in r.requests]
        ),
        apply=(lambda rule: call.apply(replies, rule)) if updates else None,
    )


class EncodedRound(NamedTuple):
    """What this worker sends in a round."""

    requests: list[Request]  # in the order of the generic step
    finite: tf.Tensor  # scalar bool
    entries: tf.Tensor  # number of entries sent, scalar int64
    notes: tf.Tensor  # float32, for the second round, or the decoder of sums


class EngineCall:
    """The engine's operations on the tensors of a step, each with its native method."""

    def __init__(self, inputs: StepInputs, methods: Sequence[NativeMethod]):
        self._inputs = inputs
        self._methods = methods
        # The tensors that are summed in one dtype are concatenated to one vector.
        self._dtypes = list(dict.fromkeys(m.summed_as for m in methods if m.summed_as))
        self._gathers = any(m.summed_as is None for m in methods)
        self._parameters = RoundParameters(
            inputs.compressor, methods, inputs.worker_state.states
        )
        self.num_rounds = self._parameters.num_rounds
        self._attributes = self._make_attributes()
        gradients = list(map(flatten_dense, inputs.gradients, inputs.tensors))
        self._rows = native.row_operands(gradients)
        self._gradients = list(map(gradient_values, gradients))
        self._scales = native.scales_or_nan(
            self._gradients, inputs.scales, inputs.worker_state.residual
        )

    def _make_attributes(self) -> dict[str, Any]:
        inputs, methods, tensors = self._inputs, self._methods, self._inputs.tensors
        fingerprints = []
        for number in range(self.num_rounds):
            gathered = [
                t.signature_of(inputs.compressor.name)
                for t, m in zip(tensors, methods, strict=True)
                if m.summed_as is None and (m.first or number == 0)
            ]
            fingerprints.append(round_fingerprint(number, gathered))
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
            "fingerprints": fingerprints,
            "firsts": [m.first or "" for m in methods],
            "first_vectors": [
                self._dtypes.index(m.summed_as) if m.first_summed else -1
                for m in methods
            ],
        }

    def encode(self, number: int) -> EncodedRound:
        """Update this worker's state in a round, and encode its requests."""
        inputs, worker_state = self._inputs, self._inputs.worker_state
        states = self._state_handles([m.states for m in self._methods])
        finite, entries, words, notes, vectors = native.call(
            "tf_dgc_encode",
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
            **self._parameters.operands(),
            **self._attributes,
        )
        if not (states or worker_state.velocity or worker_state.residual):
            tracing.leave_unordered(words)
        if number == 1:
            self._parameters.set_from_second_round(notes)
        requests: list[Request] = []
        if number == 0 or self._parameters.are_sums:
            for dtype, vector in zip(self._dtypes, vectors, strict=True):
                length = 1 + sum(self._summed_sizes(dtype, number))
                requests.append(AllReduce(tf.ensure_shape(vector, [length])))
        if self._gathers:
            sizes = [buffer.HEADER_WORDS, *self._num_words(number)]
            words = tf.ensure_shape(words, [None if None in sizes else sum(sizes)])
            requests.append(AllGather(words))
        return EncodedRound(requests, finite, entries, notes)

    def prepare_second_round(self, first: EncodedRound, replies: list[Reply]) -> None:
        """Compute the second round's parameters from the first round's replies."""
        if self._parameters.are_sums:
            self._parameters.set_from_sums(self._sums(replies, 0))
            return
        sizes = self._num_words(0)
        words, _ = buffer.remove_header(
            replies[-1],
            self._attributes["fingerprints"][0],
            buffer.HEADER_WORDS + sum(sizes),
        )
        columns = [
            list(range(start, start + m.num_words))
            for start, m in zip(
                itertools.accumulate(sizes, initial=0), self._methods, strict=False
            )
            if m.first
        ]
        per_tensor = tf.transpose(tf.gather(words, columns, axis=1), [1, 0, 2])
        self._parameters.set_from_words(per_tensor, first.notes)

    def decode(self, replies: list[list[Reply]]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return the sum of each tensor, and the number of non-finite gradients."""
        operands = self._decode_operands(replies)
        nonfinite, finite, norms, sums = native.call(
            "tf_dgc_decode", num_tensors=len(self._inputs.tensors), **operands
        )
        if not operands["shared"]:
            tracing.leave_unordered(nonfinite)
        decoded = sums, self._num_nonfinite(nonfinite, replies)
        return self._update_states(finite, norms, replies, decoded)

    def apply(self, replies: list[list[Reply]], rule: UpdateRule) -> tf.Tensor:
        """Update variables and slots; return the number of non-finite gradients."""
        nonfinite, finite, norms = native.ops().tf_dgc_decode_apply(
            **native.rule_operands(rule), **self._decode_operands(replies)
        )
        nonfinite = self._num_nonfinite(nonfinite, replies)
        return self._update_states(finite, norms, replies, nonfinite)

    def _decode_operands(self, replies: list[list[Reply]]) -> dict[str, Any]:
        num_vectors = len(self._dtypes)
        totals = replies[0][:num_vectors]
        vectors = self._attributes["vectors"]
        if self._parameters.are_sums:
            totals = totals + replies[1][:num_vectors]
            vectors = [
                v + num_vectors if m.first_summed else v
                for v, m in zip(vectors, self._methods, strict=True)
            ]
        no_words = tf.zeros([0, 0], tf.int32)
        return {
            "buffers": [r[-1] if self._gathers else no_words for r in replies],
            "totals": totals,
            "iteration": tf.cast(self._inputs.iteration, tf.int64),
            "shared": self._state_handles([m.shared for m in self._methods]),
            **self._parameters.operands(),
            **self._attributes,
            "vectors": vectors,
        }

    def _state_handles(self, names: Sequence[Sequence[str]]) -> list[tf.Tensor]:
        return [
            native.resource_handle(state[name])
            for state, of_tensor in zip(
                self._inputs.worker_state.states, names, strict=True
            )
            for name in of_tensor
        ]

    def _num_nonfinite(
        self, from_buffers: tf.Tensor, replies: list[list[Reply]]
    ) -> tf.Tensor:
        return from_buffers if self._gathers else tf.cast(replies[0][0][0], tf.int32)

    def _update_states(
        self,
        finite: tf.Tensor,
        norms: tf.Tensor,
        replies: list[list[Reply]],
        results: _T,
    ) -> _T:
        """Update the states of two rounds; the results fail if a sum is not finite."""
        sums = self._sums(replies[1], 1) if self._parameters.are_sums else []
        results, new_states = checks.require_finite(
            finite,
            ["float32"],
            [t.label for t in self._inputs.tensors],
            (results, self._parameters.new_states(norms, sums)),
        )
        self._parameters.assign(new_states)
        return results

    def _sums(self, replies: list[Reply], number: int) -> list[tf.Tensor]:
        """Return a round's sum of each tensor with two rounds, float32."""
        sums: dict[int, tf.Tensor] = {}
        for dtype, total in zip(self._dtypes, replies, strict=False):
            _, *parts = tf.split(total, [1, *self._summed_sizes(dtype, number)])
            for i, (part, m) in enumerate(zip(parts, self._methods, strict=True)):
                if m.first_summed and m.summed_as == dtype:
                    sums[i] = tf.cast(part, tf.float32)
        return [sums[i] for i in sorted(sums)]

    def _summed_sizes(self, dtype: tf.DType, number: int) -> list[int]:
        """Return the length of each tensor's part of a round's vector."""

        def size(tensor: TensorSpec, method: NativeMethod) -> int:
            if method.summed_as != dtype or (number and not method.first):
                return 0
            first = 0 if number else method.first_summed
            return first or method.num_summed or tensor.size

        return list(map(size, self._inputs.tensors, self._methods))

    def _num_words(self, number: int) -> list[Any]:
        """Return the words of each tensor in a round; None if decided at run time."""
        compressor = self._inputs.compressor

        def size(tensor: TensorSpec, method: NativeMethod) -> int | None:
            if method.summed_as is not None or (number and not method.first):
                return 0
            if tensor.uncompressed:
                return tensor.size
            if method.first and number == 0:
                return method.num_words
            total = compressor.bytes(tensor.shape, tensor.dtype)
            return None if total is None else total // 4 - method.num_words

        return list(map(size, self._inputs.tensors, self._methods))


class RoundParameters:
    """Numbers that TensorFlow operations compute for the engine before each round.

    They exist for methods with two rounds: the second round depends on the replies of
    the first one.
    """

    def __init__(
        self,
        compressor: Compressor,
        methods: Sequence[NativeMethod],
        states: MethodStates,
    ):
        self._methods = methods
        self._states = [s for s, m in zip(states, methods, strict=True) if m.first]
        self.num_rounds = 2 if self._states else 1
        self.are_sums = any(m.first_summed for m in methods)
        self._compressor: TwoRounds | None = None
        self._parameters: tf.Tensor | Sequence[tf.Tensor] = []
        self._per_tensor = [tf.zeros([0])] * len(self._states)
        self._notes = tf.zeros([len(self._states), 0])
        if self._states and isinstance(compressor, TwoRounds):
            self._compressor = compressor
            self._set(compressor.first_parameters(self._states))

    def operands(self) -> dict[str, Any]:
        """Return the operands of this round's operations."""
        flat = [tf.reshape(values, [-1]) for values in self._per_tensor]
        sizes = iter([values.shape[0] for values in flat])
        return {
            "numbers": tf.concat([tf.zeros([0]), *flat], axis=0),
            "num_numbers": [next(sizes) if m.first else 0 for m in self._methods],
        }

    def set_from_words(self, words: tf.Tensor, notes: tf.Tensor) -> None:
        """Compute the second round's parameters; words: `[tensors, num_workers, w]`."""
        num_notes = max(m.num_notes for m in self._methods)
        self._notes = tf.reshape(notes, [len(self._states), num_notes])
        if self._compressor:
            self._set(
                self._compressor.second_parameters(words, self._notes, self._states)
            )

    def set_from_sums(self, sums: Sequence[tf.Tensor]) -> None:
        """Use the first round's sums as the second round's parameters."""
        self._per_tensor = list(sums)

    def set_from_second_round(self, notes: tf.Tensor) -> None:
        """Use the second round's notes as the decoder's parameters if it summed."""
        if self.are_sums:
            self._per_tensor = tf.split(
                notes, [m.num_notes for m in self._methods if m.first]
            )

    def new_states(self, norms: tf.Tensor, sums: Sequence[tf.Tensor]) -> list[_State]:
        """Return the new states of the tensors with two rounds, from norms and sums."""
        if self._compressor is None:
            return []
        result = RoundsResult(self._parameters, self._notes, norms, sums)
        return self._compressor.updated_states(result, self._states)

    def assign(self, new_states: Sequence[_State]) -> None:
        """Assign the result of `new_states`."""
        for state, values in zip(self._states, new_states, strict=False):
            for name, value in values.items():
                state[name].assign(value)

    def _set(self, parameters: tf.Tensor | Sequence[tf.Tensor]) -> None:
        """Set the parameters, `[tensors, m]` or a list of `[m]`."""
        self._parameters = parameters
        self._per_tensor = (
            tf.unstack(parameters) if tf.is_tensor(parameters) else list(parameters)
        )
