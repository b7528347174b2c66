"""Adam behind a compressed exchange: what its rule divides by comes before it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import keras_optimizers, keras_rules, tracing
from tf_dgc.codecs import value_types
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.requests import AllGather, AllReduce, AllToAll
from tf_dgc.compressors import Compressor
from tf_dgc.multiworker.worker_variables import PerWorkerVariable
from tf_dgc.optimizers import (
    adam_sampling,
    adam_transition,
    adam_variants,
    conditions,
    update,
)
from tf_dgc.optimizers.adam_sampling import CorrelationSample
from tf_dgc.optimizers.adam_transition import TransitionToSparse
from tf_dgc.optimizers.adam_variants import AdamVariant
from tf_dgc.smart_cond import BoolOrTensor, smart_cond
from tf_dgc.steps import native, preconditioning
from tf_dgc.steps.base import StepInputs, StepOutcome
from tf_dgc.steps.native import UpdateRule
from tf_dgc.steps.preconditioning import Divisor
from tf_dgc.steps.state import WorkerState

# --- Refresh: what workers divide by becomes the same on all of them, now and then.
#
# Where data differ between workers, so do their second moments, and updates that are
# divided by different roots cancel at another point than gradients do. A refresh is a
# dense exchange, so it is rare: after corrected steps 1, 2, 4, ..., 512, and every
# 1,024th. In between each worker follows its own gradients, from what all had in
# common.

_PERIOD = 1024


def synchronize_moments_if_due(
    communicator: Communicator,
    moments: Sequence[PerWorkerVariable],
    steps: tf.Tensor,
    largest: bool,
) -> int | tf.Tensor:
    """Give all workers the same moments, if it is time; call it in replica context.

    All travel together, as bfloat16, or as float64 if one of them is that.

    Args:
        communicator: communicator of the optimizer.
        moments: moments of this worker, of entries that are 0 or more.
        steps: number of corrected steps, this one included, the same on all workers; a
            scalar int64 tensor.
        largest: whether what they have in common is the largest on any worker; else it
            is the mean.

    Returns:
        Bytes that this worker hands to the collectives, 0 in most steps.
    """
    number = communicator.num_workers
    if number == 1 or not moments:
        return 0
    wide = any(m.dtype == "float64" for m in moments)
    dtype = tf.float64 if wide else tf.bfloat16
    sizes = [m.shape.num_elements() for m in moments]

    def refresh() -> None:
        values = [_take(m, dtype, 1.0 if largest else 1.0 / number) for m in moments]
        agree = _agree_on_largest if largest else _agree_on_sum
        agreed = tf.split(agree(communicator, tf.concat(values, axis=0)), sizes)
        for moment, new in zip(moments, agreed, strict=True):
            own = _cast(new, tf.as_dtype(moment.dtype))
            moment.assign(tf.reshape(own, moment.shape))

    due = is_synchronization_due(steps)
    conditions.cond_in_all_replicas(due, refresh)
    entries = sum(sizes)
    if largest:
        entries = _padded(entries, number) + _padded(entries, number) // number
    return tf.where(due, tf.constant(entries * dtype.size, tf.int64), 0)


def is_synchronization_due(steps: tf.Tensor) -> tf.Tensor:
    """Return whether workers refresh after so many corrected steps, scalar bool."""
    is_power = tf.equal(tf.bitwise.bitwise_and(steps, steps - 1), 0)
    whole_periods = tf.equal(steps % _PERIOD, 0)
    return tf.logical_and(steps > 0, tf.where(steps < _PERIOD, is_power, whole_periods))


def _take(moment: PerWorkerVariable, dtype: tf.DType, share: float) -> tf.Tensor:
    """Return a share of a moment, `[n]`; what is not finite is no part of it."""
    values = tf.reshape(moment.local(), [-1])
    finite = tf.where(tf.math.is_finite(values), values, tf.zeros_like(values))
    return _cast(finite * tf.constant(share, finite.dtype), dtype)


def _cast(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.size < values.dtype.size:
        return value_types.round_to(values, dtype)
    return tf.cast(values, dtype)


def _agree_on_sum(communicator: Communicator, values: tf.Tensor) -> tf.Tensor:
    total = communicator.answer(AllReduce(values))
    return tf.minimum(total, values.dtype.max)  # N shares of the largest number


def _agree_on_largest(communicator: Communicator, values: tf.Tensor) -> tf.Tensor:
    """Let each worker find the largest in a shard, and gather the shards."""
    number, size = communicator.num_workers, values.shape[0]
    padded = tf.pad(values, [[0, _padded(size, number) - size]])
    rows = communicator.answer(AllToAll(tf.reshape(padded, [number, -1])))
    words = _to_words(tf.reduce_max(rows, axis=0))
    shards = communicator.answer(AllGather(words))
    return _from_words(tf.reshape(shards, [-1]), values.dtype)[:size]


def _padded(size: int, number: int) -> int:
    """Return the entries of as many equal shards, of whole words each."""
    return -(-size // (2 * number)) * 2 * number


def _to_words(values: tf.Tensor) -> tf.Tensor:
    pairs = tf.reshape(values, [-1, 2]) if values.dtype.size == 2 else values
    return tf.reshape(tf.bitcast(pairs, tf.int32), [-1])


def _from_words(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    pairs = tf.reshape(words, [-1, 2]) if dtype.size == 8 else words
    return tf.reshape(tf.bitcast(pairs, dtype), [-1])


class AdamCorrection:
    """Makes of an `Adam` what is linear behind the exchange.

    Each worker follows the second moment of its own gradient, and divides by its root
    before momentum and accumulation, which are those of momentum correction. So it is
    updates that are exchanged, and their sum is applied as it is. Now and then second
    moments become the same on all workers (`adam.py`). The optimizer's own rule
    updates exempt tensors, and all until a step leaves something out.

    Args:
        optimizer: inner optimizer, built; its `update_step` is replaced.
        kind: kind of Adam that it is.
        momentum: coefficient of the momentum before what waits.
        scales_by_learning_rate: whether quotients are multiplied by the learning rate
            before they wait.
        worker_state: state that this worker keeps of all tensors, in the order of the
            variables; behind them of the sample of `agreement`.
        compressor: method of the tensors that are not exempt; None if it was chosen to
            send everything in every step.
        agreement: share that adds up of the tensors that are not exempt; None if all
            are.
        index_of: function of a variable that returns its place among the tensors.

    Attributes:
        kind: kind of Adam.
    """

    def __init__(
        self,
        optimizer: Any,
        kind: AdamVariant,
        momentum: float,
        scales_by_learning_rate: bool,
        worker_state: WorkerState,
        compressor: Compressor | None,
        agreement: CorrelationSample | None,
        index_of: Callable[[Any], int],
    ):
        self._optimizer = optimizer
        self.kind = kind
        self._momentum, self._weighs = momentum, scales_by_learning_rate
        self._worker_state = worker_state
        self._agreement = agreement
        self._index_of = index_of
        self._divided = [
            i for i, t in enumerate(worker_state.tensors) if not t.uncompressed
        ]
        self._beginning = None
        if agreement is not None:
            self._beginning = TransitionToSparse(compressor, worker_state, agreement)
        keras_optimizers.replace_update_step(optimizer, self.update_step)

    @property
    def variables(self) -> list[keras.Variable]:
        """What is remembered of no tensor of the model."""
        if self._agreement is None or self._beginning is None:
            return []
        worker_state = self._worker_state
        kept = (worker_state.residual, worker_state.velocity, *self._moments())
        last = [some[-1] for some in kept if some]
        return [self._beginning.steps, self._agreement.seen, *last]

    def precondition(self, inputs: StepInputs) -> StepInputs:
        """Return what goes into a step in which updates are exchanged, not gradients.

        Exempt tensors, and all in a stock step, are exchanged as they are.

        Args:
            inputs: inputs of a step of gradients.

        Returns:
            The same with divisors, and with the sample as the last tensor.
        """
        beginning = self._beginning
        first, stock = beginning.count(inputs) if beginning else (False, True)
        if not self.kind.ahead:
            self._forget(inputs, stock)
        if self._agreement is not None:
            inputs = self._divide(self._agreement, first, stock, inputs)
        return adam_variants.without_velocity(inputs) if self.kind.ahead else inputs

    def is_stock(self) -> BoolOrTensor:
        """Return whether the step that was begun is the optimizer's own."""
        return self._beginning.is_stock() if self._beginning else True

    def _divide(
        self,
        agreement: CorrelationSample,
        first: BoolOrTensor,
        stock: BoolOrTensor,
        inputs: StepInputs,
    ) -> StepInputs:
        active = not stock if isinstance(stock, bool) else tf.logical_not(stock)
        optimizer = self._optimizer
        asks = self.kind, optimizer, self._momentum
        numbers = adam_variants.step_divisor_numbers(*asks, agreement.factors(), active)
        divisors = sent_by = self._divisors(numbers, active)
        if self._weighs:
            includes_learning_rate = preconditioning.scale_divisors(
                numbers, optimizer.learning_rate
            )
            sent_by = self._divisors(includes_learning_rate, active)
        if first is not False:
            own = self._worker_state, self._slots(), sent_by
            betas = float(optimizer.beta_1), self._momentum
            adam_transition.transfer_adam_state(first, inputs, *own, *betas)
        # A sample is of quotients alone, so that every step has as much a part in it.
        inputs = adam_sampling.add_sample(
            agreement, inputs, self._worker_state, divisors, active
        )
        return inputs._replace(divisors=[sent_by.get(i) for i in inputs.indices])

    def _slots(self) -> dict[int, list[keras.Variable]]:
        """Return what the rule remembers of each tensor of the model, by its place."""
        optimizer, rule = self._optimizer, self.kind.rule
        return {
            self._index_of(v): keras_rules.rule_slots(optimizer, rule, v)
            for v in keras_optimizers.trainable_variables(optimizer)
            if not keras_optimizers.overwrites_with_gradient(v)
        }

    def _forget(self, inputs: StepInputs, stock: BoolOrTensor) -> None:
        """Clear velocities of what is not divided: the rule has its momentum then."""
        velocity = inputs.worker_state.velocity
        if not velocity:
            return

        def clear(uncompressed: bool) -> tf.Tensor:
            for v, t in zip(velocity, inputs.tensors, strict=True):
                if t.uncompressed == uncompressed:
                    v.assign(tf.zeros(v.shape, v.dtype))
            return tf.constant(True)

        clear(True)
        smart_cond(stock, lambda: clear(False), lambda: tf.constant(True))

    def _divisors(self, numbers: tf.Tensor, active: BoolOrTensor) -> dict[int, Divisor]:
        """Return the divisor of each tensor that has one, by its place."""
        kind, worker_state = self.kind, self._worker_state
        ahead = adam_variants.look_ahead(self._optimizer) if kind.ahead else None
        return {
            i: Divisor(
                worker_state.second_moment[i],
                row,
                active,
                worker_state.largest_moment[i] if kind.largest else None,
                kind.infinity,
                ahead and ahead._replace(velocity=worker_state.velocity[i]),
            )
            for i, row in zip(self._divided, tf.unstack(numbers), strict=True)
        }

    def _moments(self) -> list:
        worker_state = self._worker_state
        return [
            some
            for some in (worker_state.second_moment, worker_state.largest_moment)
            if some
        ]

    def receive(self, outcome: StepOutcome) -> StepOutcome:
        """Return the outcome of a step without its sample, which is learned from.

        Args:
            outcome: outcome of all tensors, the sample's last.
        """
        agreement = self._agreement
        if agreement is None:
            return outcome

        def decode() -> tuple[Sequence[tf.Tensor], tf.Tensor]:
            sums, nonfinite = outcome.decode()
            agreement.learn(sums[-1])
            return sums[:-1], nonfinite

        by_sums = functools.partial(native.apply_decoded, outcome.decode)
        apply = outcome.apply or by_sums

        def apply_and_learn(rule: UpdateRule) -> tf.Tensor:
            sample = agreement.arrived
            nonfinite = smart_cond(
                self.is_stock(),
                lambda: apply(_and_keep(rule, sample)),
                lambda: apply(_and_keep(self._correct(rule), sample)),
            )
            agreement.learn(sample.local())
            return nonfinite

        return outcome._replace(
            decode=decode,
            entries=outcome.entries - agreement.tensor.size,
            apply=None if tracing.in_xla_context() else apply_and_learn,
        )

    def refresh(self, communicator: Communicator) -> int | tf.Tensor:
        """Give all workers the same moments behind a step, if it is time.

        A largest magnitude is what there is once it is larger, so that of one worker is
        that of all; of squares, which add up, it is the mean.

        Args:
            communicator: communicator of the optimizer.

        Returns:
            Bytes that it takes of this worker.
        """
        if self._beginning is None:
            return 0
        moments = [some[i] for some in self._moments() for i in self._divided]
        steps = tf.convert_to_tensor(self._beginning.steps.value)
        largest = self.kind.infinity
        return synchronize_moments_if_due(communicator, moments, steps, largest)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Do what Keras's `update_step` does, with the sum of a step."""
        optimizer = self._optimizer
        uncompressed = self._worker_state.tensors[self._index_of(variable)].uncompressed

        def by_rule() -> tf.Tensor:
            type(optimizer).update_step(optimizer, gradient, variable, learning_rate)
            return tf.constant(True)

        def by_sum() -> tf.Tensor:
            rate = self._rate(learning_rate)
            optimizer.assign_sub(variable, gradient * tf.cast(rate, gradient.dtype))
            return tf.constant(True)

        smart_cond(True if uncompressed else self.is_stock(), by_rule, by_sum)

    def _correct(self, rule: UpdateRule) -> UpdateRule:
        """Return the update that `update_step` is, of Adam's, where it is not stock."""
        tensors = [
            self._worker_state.tensors[self._index_of(v)] for v in rule.variables
        ]
        own = self.kind.rule
        rate, decay, *_ = tf.unstack(rule.hyperparameters[own])
        descent = update.pack_hyperparameters(
            rate, decay, [self._rate(rate)]
        )  # as by an SGD
        return rule._replace(
            names=[own if t.uncompressed else "sgd" for t in tensors],
            slots=[
                slots if t.uncompressed else []
                for t, slots in zip(tensors, rule.slots, strict=True)
            ],
            hyperparameters={**rule.hyperparameters, "sgd": descent},
        )

    def _rate(self, rate: Any) -> tf.Tensor:
        """Return what a sum is multiplied by, scalar float64.

        Velocities began at zero: divided is by the share of a momentum there is.
        """
        known = adam_variants.bias_correction(
            self.kind, self._optimizer, self._momentum
        )
        return (1.0 if self._weighs else tf.cast(rate, tf.float64)) / known


def _and_keep(rule: UpdateRule, sample: keras.Variable) -> UpdateRule:
    """Return the rule that makes this variable the sum of the last tensor too."""
    return UpdateRule(
        [*rule.names, "kept"],
        {**rule.hyperparameters, "kept": update.pack_hyperparameters(0.0, 0.0, [])},
        [*rule.variables, sample],
        [*rule.slots, []],
        [*rule.decays, False],
    )
