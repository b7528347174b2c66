"""Adam behind a compressed exchange: what its rule divides by comes before it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import schedules
from tf_dgc._internals import keras_optimizers, keras_rules, tracing
from tf_dgc.choice import Choice, choose
from tf_dgc.compressors import Compressor, TopK
from tf_dgc.optimizers import adam_kinds, crossing, native_rules, sampling
from tf_dgc.optimizers.adam_kinds import Kind
from tf_dgc.optimizers.agreement import Agreement
from tf_dgc.steps import native_update
from tf_dgc.steps.base import Inputs, Outcome
from tf_dgc.steps.memory import Memory
from tf_dgc.steps.native_update import UpdateRule
from tf_dgc.transforms.preconditioning import Divisor


class AdamCorrection:
    """Makes of an `Adam` what is linear behind the exchange.

    Each worker follows the second moment of its own gradient, and divides by its root
    before momentum and accumulation, which are those of momentum correction. So it is
    updates that are exchanged, and their sum is applied as it is. The optimizer's own
    rule updates exempt tensors, and all as long as a schedule sends everything from the
    first step on.

    Args:
        optimizer: inner optimizer, built; its `update_step` is replaced.
        kind: kind of Adam that it is.
        memory: state that this worker keeps of all tensors, in the order of the
            variables; behind them of the sample of `agreement`.
        compressor: method of the tensors that are not exempt.
        agreement: share that adds up of the tensors that are not exempt; None if all
            are.
        index_of: function of a variable that returns its place among the tensors.

    Attributes:
        kind: kind of Adam.
        begun: variable, 1 when a step has left out entries, else 0; None unless a
            schedule decides when.
    """

    def __init__(
        self,
        optimizer: Any,
        kind: Kind,
        memory: Memory,
        compressor: Compressor,
        agreement: Agreement | None,
        index_of: Callable[[Any], int],
    ):
        self._optimizer = optimizer
        self.kind = kind
        self._memory = memory
        self._sparsity = compressor.sparsity if isinstance(compressor, TopK) else None
        self._agreement = agreement
        self._index_of = index_of
        self._divided = [i for i, t in enumerate(memory.tensors) if not t.exempt]
        self.begun = _make_flag() if callable(self._sparsity) else None
        keras_optimizers.replace_update_step(optimizer, self.update_step)

    @property
    def variables(self) -> list[keras.Variable]:
        """What is remembered of no tensor of the model."""
        found = [] if self.begun is None else [self.begun]
        if self._agreement is None:
            return found
        memory = self._memory
        kept = (memory.residual, memory.velocity, *self._moments())
        return [*found, self._agreement.seen, *(some[-1] for some in kept if some)]

    def is_stock(self) -> Choice:
        """Return whether this step is the optimizer's own, on all tensors."""
        if self.begun is None or not callable(self._sparsity):
            return self._sparsity == 0
        whole = schedules.at(self._sparsity, self._optimizer.iterations.value) <= 0
        return tf.logical_and(whole, tf.equal(self.begun.value, 0))

    def precondition(self, stock: Choice, inputs: Inputs) -> Inputs:
        """Return what goes into a step in which updates are exchanged, not gradients.

        Exempt tensors, and all in a stock step, are exchanged as they are.

        Args:
            stock: result of `is_stock`.
            inputs: inputs of a step of gradients.

        Returns:
            The same with divisors, and with the sample as the last tensor.
        """
        if not self.kind.ahead:
            self._forget(inputs, stock)
        if self._agreement is not None:
            inputs = self._divide(self._agreement, stock, inputs)
        return adam_kinds.without_velocity(inputs) if self.kind.ahead else inputs

    def _divide(self, agreement: Agreement, stock: Choice, inputs: Inputs) -> Inputs:
        active = not stock if isinstance(stock, bool) else tf.logical_not(stock)
        divisors = self._divisors(agreement.factors(), active)
        if self.begun is not None:
            first = tf.logical_and(active, tf.equal(self.begun.value, 0))
            own = self._memory, self._slots(), divisors
            crossing.cross(first, inputs, *own, float(self._optimizer.beta_1))
        return sampling.add(agreement, inputs, self._memory, divisors, active)

    def _slots(self) -> dict[int, list[keras.Variable]]:
        """Return what the rule remembers of each tensor of the model, by its place."""
        optimizer, rule = self._optimizer, self.kind.rule
        return {
            self._index_of(v): keras_rules.rule_slots(optimizer, rule, v)
            for v in keras_optimizers.trainable_variables(optimizer)
            if not keras_optimizers.overwrites_with_gradient(v)
        }

    def _forget(self, inputs: Inputs, stock: Choice) -> None:
        """Clear velocities of what is not divided: the rule has its momentum then."""
        velocity = inputs.memory.velocity
        if not velocity:
            return

        def clear(exempt: bool) -> tf.Tensor:
            for v, t in zip(velocity, inputs.tensors, strict=True):
                if t.exempt == exempt:
                    v.assign(tf.zeros(v.shape, v.dtype))
            return tf.constant(True)

        clear(True)
        choose(stock, lambda: clear(False), lambda: tf.constant(True))

    def _divisors(self, factors: tf.Tensor, active: Choice) -> dict[int, Divisor]:
        """Return the divisor of each tensor that has one, by its place."""
        optimizer, kind, memory = self._optimizer, self.kind, self._memory
        numbers = adam_kinds.make_numbers(kind, optimizer, factors, active)
        ahead = adam_kinds.look_ahead(optimizer) if kind.ahead else None
        return {
            i: Divisor(
                memory.second_moment[i],
                row,
                active,
                memory.largest_moment[i] if kind.largest else None,
                kind.infinity,
                ahead and ahead._replace(velocity=memory.velocity[i]),
            )
            for i, row in zip(self._divided, tf.unstack(numbers), strict=True)
        }

    def _moments(self) -> list:
        memory = self._memory
        return [some for some in (memory.second_moment, memory.largest_moment) if some]

    def receive(self, outcome: Outcome, stock: Choice) -> Outcome:
        """Return the outcome of a step without its sample, which is learned from.

        Args:
            outcome: outcome of all tensors, the sample's last.
            stock: result of `is_stock` before the step.
        """
        agreement = self._agreement
        if agreement is None:
            return outcome

        def decode() -> tuple[Sequence[tf.Tensor], tf.Tensor]:
            sums, nonfinite = outcome.decode()
            agreement.learn(sums[-1])
            return sums[:-1], nonfinite

        by_sums = functools.partial(native_update.apply_decoded, outcome.decode)
        apply = outcome.apply or by_sums

        def apply_and_learn(rule: UpdateRule) -> tf.Tensor:
            sample = agreement.arrived
            nonfinite = choose(
                stock,
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

    def count_step(self, stock: Choice) -> None:
        """Remember after a step whether it left out entries.

        Args:
            stock: result of `is_stock` before the step.
        """
        if self.begun is not None:
            before = tf.convert_to_tensor(self.begun.value)
            ours = tf.cast(tf.logical_not(stock), before.dtype)
            self.begun.assign(tf.maximum(before, ours))

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Do what Keras's `update_step` does, with the sum of a step."""
        optimizer = self._optimizer
        exempt = self._memory.tensors[self._index_of(variable)].exempt

        def by_rule() -> tf.Tensor:
            type(optimizer).update_step(optimizer, gradient, variable, learning_rate)
            return tf.constant(True)

        def by_sum() -> tf.Tensor:
            rate = tf.cast(learning_rate, tf.float64) / self._known()
            optimizer.assign_sub(variable, gradient * tf.cast(rate, gradient.dtype))
            return tf.constant(True)

        choose(True if exempt else self.is_stock(), by_rule, by_sum)

    def _correct(self, rule: UpdateRule) -> UpdateRule:
        """Return the update that `update_step` is, of Adam's, where it is not stock."""
        tensors = [self._memory.tensors[self._index_of(v)] for v in rule.variables]
        own = self.kind.rule
        rate, decay, *_ = tf.unstack(rule.hyperparameters[own])
        descent = native_rules.pack(rate, decay, [rate / self._known()])
        return rule._replace(
            names=[own if t.exempt else "descent" for t in tensors],
            slots=[
                slots if t.exempt else []
                for t, slots in zip(tensors, rule.slots, strict=True)
            ],
            hyperparameters={**rule.hyperparameters, "descent": descent},
        )

    def _known(self) -> tf.Tensor:
        """Return the share of a momentum there is: velocities began at zero."""
        return adam_kinds.known_momentum(self.kind, self._optimizer)


def _and_keep(rule: UpdateRule, sample: keras.Variable) -> UpdateRule:
    """Return the rule that makes this variable the sum of the last tensor too."""
    return UpdateRule(
        [*rule.names, "kept"],
        {**rule.hyperparameters, "kept": native_rules.pack(0.0, 0.0, [])},
        [*rule.variables, sample],
        [*rule.slots, []],
        [*rule.decays, False],
    )


def _make_flag() -> keras.Variable:
    return keras.Variable(
        initializer="zeros",
        shape=[],
        dtype="int32",
        trainable=False,
        aggregation="only_first_replica",
        name="adam_correction_begun",
    )
