"""Adam with compressed gradients: preconditions them before the exchange."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import keras_optimizers, keras_rules, tracing
from tf_dgc.codecs import value_types
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.requests import AllGather, AllReduce, AllToAll
from tf_dgc.compressors import Compressor
from tf_dgc.conditions import BoolOrTensor, cond_in_all_replicas, smart_cond
from tf_dgc.multiworker.worker_variables import PerWorkerVariable
from tf_dgc.optimizers import adam_variants
from tf_dgc.optimizers.adam_sampling import CorrelationSample, add_sample
from tf_dgc.optimizers.adam_transition import TransitionToSparse, transfer_adam_state
from tf_dgc.optimizers.adam_variants import AdamVariant
from tf_dgc.optimizers.update import pack_hyperparameters
from tf_dgc.steps import native, preconditioning
from tf_dgc.steps.base import StepInputs, StepOutcome, UpdateRule, WorkerState
from tf_dgc.steps.preconditioning import Divisor


class AdamCorrection:
    """Makes an Adam linear after the exchange.

    Each worker follows the second moment of its own gradient and divides by its root
    (preconditions the gradient) before momentum correction and accumulation. The sum of
    the preconditioned gradients is applied as it is. Now and then the workers
    synchronize their second moments. The optimizer's own rule updates uncompressed
    tensors, and all tensors in uncorrected steps (`adam_transition.py`).

    Args:
        optimizer: inner optimizer, built; its `update_step` is replaced.
        variant: variant of Adam that it is.
        momentum: coefficient of the velocity.
        scale_before_accumulation: whether the learning rate multiplies preconditioned
            gradients before accumulation, instead of the sum.
        worker_state: state of the variables' tensors, followed by the sample's.
        compressor: method of the compressed tensors; None if every step is dense.
        correlation: sample of the compressed tensors; None if there are none.
        index_of: function of a variable that returns its tensor's index.

    Attributes:
        variant: variant of Adam.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variant: AdamVariant,
        momentum: float,
        scale_before_accumulation: bool,
        worker_state: WorkerState,
        compressor: Compressor | None,
        correlation: CorrelationSample | None,
        index_of: Callable[[Any], int],
    ):
        self._optimizer = optimizer
        self.variant = variant
        self._momentum = momentum
        self._scale_before_accumulation = scale_before_accumulation
        self._worker_state = worker_state
        self._correlation = correlation
        self._index_of = index_of
        self._compressed = [
            i for i, t in enumerate(worker_state.tensors) if not t.uncompressed
        ]
        self._transition: TransitionToSparse | None = None
        if correlation is not None:
            self._transition = TransitionToSparse(compressor, worker_state, correlation)
        keras_optimizers.replace_update_step(optimizer, self.update_step)

    @property
    def variables(self) -> list[keras.Variable]:
        """Variables that belong to no tensor of the model."""
        if self._correlation is None or self._transition is None:
            return []
        state = self._worker_state
        lists = (state.residual, state.velocity, *self._moments())
        of_sample = [variables[-1] for variables in lists if variables]
        return [self._transition.steps, self._correlation.averages, *of_sample]

    # Before the exchange

    def precondition(self, inputs: StepInputs) -> StepInputs:
        """Add divisors, and the sample as the last tensor, to a step's inputs.

        Uncompressed tensors have no divisor; none is active in an uncorrected step.
        """
        is_transition: BoolOrTensor = False
        uncorrected: BoolOrTensor = True
        if self._transition is not None:
            is_transition, uncorrected = self._transition.count(inputs)
        if not self.variant.nesterov:
            self._clear_unused_velocities(inputs, uncorrected)
        if self._correlation is not None:
            inputs = self._add_divisors(
                inputs, self._correlation, is_transition, uncorrected
            )
        if self.variant.nesterov:
            return adam_variants.without_velocity(inputs)
        return inputs

    def is_uncorrected(self) -> BoolOrTensor:
        """Return whether the current step is the optimizer's own."""
        return self._transition.is_uncorrected() if self._transition else True

    def _add_divisors(
        self,
        inputs: StepInputs,
        correlation: CorrelationSample,
        is_transition: BoolOrTensor,
        uncorrected: BoolOrTensor,
    ) -> StepInputs:
        is_static = isinstance(uncorrected, bool)
        active = not uncorrected if is_static else tf.logical_not(uncorrected)
        optimizer = self._optimizer
        numbers = adam_variants.step_divisor_numbers(
            self.variant, optimizer, self._momentum, correlation.factors(), active
        )
        sample_divisors = self._divisors(numbers, active)
        divisors = sample_divisors
        if self._scale_before_accumulation:
            scaled = preconditioning.scale_divisors(numbers, optimizer.learning_rate)
            divisors = self._divisors(scaled, active)
        if is_transition is not False:
            transfer_adam_state(
                is_transition,
                inputs,
                self._worker_state,
                self._slots(),
                divisors,
                float(optimizer.beta_1),
                self._momentum,
            )
        # Without the learning rate in it, every step's sample has the same weight.
        inputs = add_sample(
            correlation, inputs, self._worker_state, sample_divisors, active
        )
        return inputs._replace(divisors=[divisors.get(i) for i in inputs.indices])

    def _divisors(self, numbers: tf.Tensor, active: BoolOrTensor) -> dict[int, Divisor]:
        """Return the divisor of each compressed tensor, by its index."""
        variant, state = self.variant, self._worker_state
        ahead = adam_variants.look_ahead(self._optimizer) if variant.nesterov else None
        return {
            i: Divisor(
                state.second_moment[i],
                row,
                active,
                state.largest_moment[i] if variant.amsgrad else None,
                variant.infinity_norm,
                ahead and ahead._replace(velocity=state.velocity[i]),
            )
            for i, row in zip(self._compressed, tf.unstack(numbers), strict=True)
        }

    def _slots(self) -> dict[int, list[keras.Variable]]:
        """Return the optimizer's variables of each tensor, by its index."""
        optimizer, rule = self._optimizer, self.variant.rule
        return {
            self._index_of(v): keras_rules.rule_slots(optimizer, rule, v)
            for v in keras_optimizers.trainable_variables(optimizer)
            if not keras_optimizers.overwrites_with_gradient(v)
        }

    def _clear_unused_velocities(
        self, inputs: StepInputs, uncorrected: BoolOrTensor
    ) -> None:
        """Clear velocities of tensors that the rule updates with its own momentum."""
        velocity = inputs.worker_state.velocity
        if not velocity:
            return

        def clear(uncompressed: bool) -> tf.Tensor:
            for v, t in zip(velocity, inputs.tensors, strict=True):
                if t.uncompressed == uncompressed:
                    v.assign(tf.zeros(v.shape, v.dtype))
            return tf.constant(True)

        clear(True)
        smart_cond(uncorrected, lambda: clear(False), lambda: tf.constant(True))

    # After the exchange

    def remove_sample(self, outcome: StepOutcome) -> StepOutcome:
        """Return a step's outcome without the sample, which updates the correlation."""
        correlation = self._correlation
        if correlation is None:
            return outcome

        def decode() -> tuple[Sequence[tf.Tensor], tf.Tensor]:
            sums, nonfinite = outcome.decode()
            correlation.update(sums[-1])
            return sums[:-1], nonfinite

        def apply_rule(rule: UpdateRule) -> tf.Tensor:
            rule = _with_sample(rule, correlation.received)
            if outcome.apply is None:
                return native.apply_decoded(outcome.decode, rule)
            return outcome.apply(rule)

        def apply(rule: UpdateRule) -> tf.Tensor:
            nonfinite = smart_cond(
                self.is_uncorrected(),
                lambda: apply_rule(rule),
                lambda: apply_rule(self._corrected(rule)),
            )
            correlation.update(correlation.received.local())
            return nonfinite

        return outcome._replace(
            decode=decode,
            entries=outcome.entries - correlation.tensor.size,
            apply=None if tracing.in_xla_context() else apply,
        )

    def update_step(
        self, gradient: tf.Tensor, variable: Any, learning_rate: Any
    ) -> None:
        """Update a variable by a step's sum, in place of Keras's `update_step`."""
        optimizer = self._optimizer
        tensor = self._worker_state.tensors[self._index_of(variable)]

        def apply_rule() -> tf.Tensor:
            type(optimizer).update_step(optimizer, gradient, variable, learning_rate)
            return tf.constant(True)

        def apply_sum() -> tf.Tensor:
            factor = tf.cast(self._sum_factor(learning_rate), gradient.dtype)
            optimizer.assign_sub(variable, gradient * factor)
            return tf.constant(True)

        uses_rule = True if tensor.uncompressed else self.is_uncorrected()
        smart_cond(uses_rule, apply_rule, apply_sum)

    def _corrected(self, rule: UpdateRule) -> UpdateRule:
        """Return Adam's native rule as `update_step` applies it in a corrected step."""
        name = self.variant.rule
        rate, decay, *_ = tf.unstack(rule.hyperparameters[name])
        descent = pack_hyperparameters(rate, decay, [self._sum_factor(rate)])
        tensors = [
            self._worker_state.tensors[self._index_of(v)] for v in rule.variables
        ]
        return rule._replace(
            names=[name if t.uncompressed else "sgd" for t in tensors],
            slots=[
                slots if t.uncompressed else []
                for t, slots in zip(tensors, rule.slots, strict=True)
            ],
            hyperparameters={**rule.hyperparameters, "sgd": descent},
        )

    def _sum_factor(self, learning_rate: Any) -> tf.Tensor:
        """Return learning rate and bias correction of a sum, scalar float64."""
        rate = (
            1.0
            if self._scale_before_accumulation
            else tf.cast(learning_rate, tf.float64)
        )
        return rate / adam_variants.bias_correction(
            self.variant, self._optimizer, self._momentum
        )

    # Synchronization of the moments

    def synchronize(self, communicator: Communicator) -> int | tf.Tensor:
        """Synchronize the workers' moments after a step, if due; return the sent bytes.

        The workers take the mean of squares, which add up, and the largest of Adamax's
        magnitudes. They send all moments together, as bfloat16, or as float64 if any
        moment is float64.
        """
        moments = [m[i] for m in self._moments() for i in self._compressed]
        num_workers = communicator.num_workers
        if self._transition is None or not moments or num_workers == 1:
            return 0
        wide = any(m.dtype == "float64" for m in moments)
        dtype = tf.float64 if wide else tf.bfloat16
        sizes = [m.shape.num_elements() for m in moments]
        takes_largest = self.variant.infinity_norm

        def synchronize() -> None:
            share = 1.0 if takes_largest else 1.0 / num_workers
            values = [_finite_share(m, share, dtype) for m in moments]
            if takes_largest:
                result = _largest_over_workers(communicator, tf.concat(values, axis=0))
            else:
                total = communicator.answer(AllReduce(tf.concat(values, axis=0)))
                result = tf.minimum(total, dtype.max)  # the mean of large entries fits
            for moment, new in zip(moments, tf.split(result, sizes), strict=True):
                new_moment = _cast(new, tf.as_dtype(moment.dtype))
                moment.assign(tf.reshape(new_moment, moment.shape))

        is_due = is_synchronization_due(
            tf.convert_to_tensor(self._transition.steps.value)
        )
        cond_in_all_replicas(is_due, synchronize)
        entries = sum(sizes)
        if takes_largest:
            padded = _padded_size(entries, num_workers)
            entries = padded + padded // num_workers
        return tf.where(is_due, tf.constant(entries * dtype.size, tf.int64), 0)

    def _moments(self) -> list[Sequence[PerWorkerVariable]]:
        state = self._worker_state
        return [m for m in (state.second_moment, state.largest_moment) if m]


def _with_sample(rule: UpdateRule, variable: keras.Variable) -> UpdateRule:
    """Return the rule that also stores the last tensor's sum in a variable."""
    return UpdateRule(
        [*rule.names, "kept"],  # the native name of the rule "store the sum"
        {**rule.hyperparameters, "kept": pack_hyperparameters(0.0, 0.0, [])},
        [*rule.variables, variable],
        [*rule.slots, []],
        [*rule.decays, False],
    )


# If the workers' data differ, so do their second moments, and preconditioned gradients
# cancel out at another point than gradients. Synchronizing the moments is a dense
# exchange, so it is rare: after corrected steps 1, 2, 4, ..., 512, and every 1024th. In
# between each worker continues with its own gradients.
_PERIOD = 1024


def is_synchronization_due(steps: tf.Tensor) -> tf.Tensor:
    """Return whether to synchronize after this many corrected steps, scalar bool."""
    is_power = tf.equal(tf.bitwise.bitwise_and(steps, steps - 1), 0)
    is_period = tf.equal(steps % _PERIOD, 0)
    return tf.logical_and(steps > 0, tf.where(steps < _PERIOD, is_power, is_period))


def _finite_share(
    moment: PerWorkerVariable, share: float, dtype: tf.DType
) -> tf.Tensor:
    """Return a share of a moment, `[n]`, with 0 for entries that are not finite."""
    values = tf.reshape(moment.local(), [-1])
    finite = tf.where(tf.math.is_finite(values), values, tf.zeros_like(values))
    return _cast(finite * tf.constant(share, finite.dtype), dtype)


def _cast(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.size < values.dtype.size:
        return value_types.round_to(values, dtype)
    return tf.cast(values, dtype)


def _largest_over_workers(communicator: Communicator, values: tf.Tensor) -> tf.Tensor:
    """Reduce one shard on each worker, and gather the shards."""
    num_workers, size = communicator.num_workers, values.shape[0]
    padded = tf.pad(values, [[0, _padded_size(size, num_workers) - size]])
    rows = communicator.answer(AllToAll(tf.reshape(padded, [num_workers, -1])))
    words = _to_words(tf.reduce_max(rows, axis=0))
    shards = communicator.answer(AllGather(words))
    return _from_words(tf.reshape(shards, [-1]), values.dtype)[:size]


def _padded_size(size: int, num_workers: int) -> int:
    """Return a size that has equal shards of whole 32-bit words."""
    return -(-size // (2 * num_workers)) * 2 * num_workers


def _to_words(values: tf.Tensor) -> tf.Tensor:
    pairs = tf.reshape(values, [-1, 2]) if values.dtype.size == 2 else values
    return tf.reshape(tf.bitcast(pairs, tf.int32), [-1])


def _from_words(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    pairs = tf.reshape(words, [-1, 2]) if dtype.size == 8 else words
    return tf.reshape(tf.bitcast(pairs, dtype), [-1])
