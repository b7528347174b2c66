"""The native engine's operations on the tensors of a step."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.codecs import checks, header
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.collectives.requests import Gather, Message, Reply, Sum
from tf_dgc.collectives.rounds import fingerprint
from tf_dgc.compressors.base import Native
from tf_dgc.steps import native, native_update
from tf_dgc.steps.accumulation import entries, flatten_dense
from tf_dgc.steps.base import Inputs
from tf_dgc.steps.between_rounds import BetweenRounds
from tf_dgc.steps.native_update import UpdateRule


class Sent(NamedTuple):
    """What this worker does in a round.

    Attributes:
        requests: messages, in the order of a composed step.
        finite: whether its gradient was finite, a scalar bool.
        entries: number of entries that it sends, a scalar int64.
        notes: numbers that methods of two rounds leave for the second, float32.
    """

    requests: list[Message]
    finite: tf.Tensor
    entries: tf.Tensor
    notes: tf.Tensor


class Call:
    """What a step calls, and in between.

    Args:
        inputs: variables, gradients and settings of the step.
        methods: native method of each tensor.

    Attributes:
        num_rounds: number of rounds; the second one is of some tensors.
    """

    def __init__(self, inputs: Inputs, methods: Sequence[Native]):
        self._inputs = inputs
        self._methods = methods
        # Those that are summed as one dtype travel in one vector.
        self._dtypes = list(dict.fromkeys(m.summed_as for m in methods if m.summed_as))
        self._gathers = any(m.summed_as is None for m in methods)
        self._between = BetweenRounds(inputs.compressor, methods, inputs.memory.states)
        self.num_rounds = self._between.num_rounds
        self._agreed = self._make_agreed()
        gradients = list(map(flatten_dense, inputs.gradients, inputs.tensors))
        self._rows = native.row_operands(gradients)
        self._gradients = list(map(entries, gradients))
        residual = inputs.memory.residual
        self._scales = native.drop(self._gradients, inputs.scales, residual)

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
            "first_vectors": [
                self._dtypes.index(m.summed_as) if m.first_summed else -1
                for m in methods
            ],
        }

    def encode(self, number: int) -> Sent:
        """Update what this worker remembers, in a round; return what it asks for."""
        inputs, memory = self._inputs, self._inputs.memory
        states = self._states([m.states for m in self._methods])
        finite, entries, words, notes, vectors = native.library().tf_dgc_encode(
            gradients=self._gradients,
            velocity=[native.handle(v) for v in memory.velocity],
            residual=[native.handle(v) for v in memory.residual],
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
        if not (states or memory.velocity or memory.residual):
            tracing.leave_unordered(words)
        requests: list[Message] = []
        if number == 0 or self._between.are_sums:
            requests = [
                Sum(tf.ensure_shape(vector, [1 + sum(self._summed(dtype, number))]))
                for dtype, vector in zip(self._dtypes, vectors, strict=True)
            ]
        if self._gathers:
            sizes = [header.NUM_WORDS, *self._num_words(number)]
            words = tf.ensure_shape(words, [None if None in sizes else sum(sizes)])
            requests.append(Gather(words))
        return Sent(requests, finite, entries, notes)

    def agree(self, sent: Sent, replies: list[Reply]) -> None:
        """Have the second round told what the first one came to."""
        if self._between.are_sums:
            self._between.hear_sums(self._sums(replies, 0))
            return
        length = header.NUM_WORDS + sum(self._num_words(0))
        agreed = self._agreed["fingerprints"][0]
        everyone, _ = header.unseal(replies[-1], agreed, length)
        starts = itertools.accumulate(self._num_words(0), initial=0)
        places = [
            list(range(start, start + m.num_words))
            for start, m in zip(starts, self._methods, strict=False)
            if m.first
        ]
        of_tensors = tf.transpose(tf.gather(everyone, places, axis=1), [1, 0, 2])
        self._between.hear_words(of_tensors, sent.notes)

    def heed(self, sent: Sent) -> None:
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

        def count(tensor: Tensor, method: Native) -> int:
            if method.summed_as != dtype or (number and not method.first):
                return 0
            first = 0 if number else method.first_summed
            return first or method.num_summed or tensor.size

        return list(map(count, self._inputs.tensors, self._methods))

    def _num_words(self, number: int) -> list[Any]:
        """Return the words of each tensor in a round; None if decided at run time."""
        compressor = self._inputs.compressor

        def words(tensor: Tensor, method: Native) -> int | None:
            if method.summed_as is not None or (number and not method.first):
                return 0
            if tensor.exempt:
                return tensor.size
            if method.first and number == 0:
                return method.num_words
            stated = compressor.bytes(tensor.shape, tensor.dtype)
            return None if stated is None else stated // 4 - method.num_words

        return list(map(words, self._inputs.tensors, self._methods))

    def decode(self, replies: list[list[Reply]]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return the sum of each tensor, and the number of non-finite gradients."""
        arrived = self._arrived(replies)
        nonfinite, finite, norms, sums = native.library().tf_dgc_decode(
            num_tensors=len(self._inputs.tensors), **arrived
        )
        if not arrived["shared"]:
            tracing.leave_unordered(nonfinite)
        results = sums, self._counted(nonfinite, replies)
        return self._if_finite(finite, self._settle(norms, replies), results)

    def apply(self, replies: list[list[Reply]], rule: UpdateRule) -> tf.Tensor:
        """Update variables and slots; return the number of non-finite gradients."""
        nonfinite, finite, norms = native.library().tf_dgc_decode_apply(
            **native_update.operands(rule), **self._arrived(replies)
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
        states = zip(self._inputs.memory.states, names, strict=True)
        return [native.handle(state[name]) for state, own in states for name in own]

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
        results, new = checks.gate_sums(finite, ["float32"], labels, (results, new))
        self._between.assign(new)
        return results
