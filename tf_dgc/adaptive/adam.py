"""Adam behind a compressed exchange: what its rule divides by comes before it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import keras_optimizers, keras_rules, tracing
from tf_dgc.adaptive import crossing, refreshing, sampling
from tf_dgc.adaptive.agreement import Agreement
from tf_dgc.adaptive.beginning import Beginning
from tf_dgc.choice import Choice, choose
from tf_dgc.compressors import Compressor
from tf_dgc.distribute.communicator import Communicator
from tf_dgc.inner import adam_kinds, native_rules
from tf_dgc.inner.adam_kinds import Kind
from tf_dgc.steps import native_update
from tf_dgc.steps.base import Inputs, Outcome
from tf_dgc.steps.memory import Memory
from tf_dgc.steps.native_update import UpdateRule
from tf_dgc.transforms import preconditioning
from tf_dgc.transforms.preconditioning import Divisor


class AdamCorrection:
    """Makes of an `Adam` what is linear behind the exchange.

    Each worker follows the second moment of its own gradient, and divides by its root
    before momentum and accumulation, which are those of momentum correction. So it is
    updates that are exchanged, and their sum is applied as it is. Now and then second
    moments become the same on all workers (`refreshing.py`). The optimizer's own rule
    updates exempt tensors, and all until a step leaves something out.

    Args:
        optimizer: inner optimizer, built; its `update_step` is replaced.
        kind: kind of Adam that it is.
        momentum: coefficient of the momentum before what waits.
        weighs: whether quotients are multiplied by the learning rate before they wait.
        memory: state that this worker keeps of all tensors, in the order of the
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
        kind: Kind,
        momentum: float,
        weighs: bool,
        memory: Memory,
        compressor: Compressor | None,
        agreement: Agreement | None,
        index_of: Callable[[Any], int],
    ):
        self._optimizer = optimizer
        self.kind = kind
        self._momentum, self._weighs = momentum, weighs
        self._memory = memory
        self._agreement = agreement
        self._index_of = index_of
        self._divided = [i for i, t in enumerate(memory.tensors) if not t.exempt]
        self._beginning = None
        if agreement is not None:
            self._beginning = Beginning(compressor, memory, agreement)
        keras_optimizers.replace_update_step(optimizer, self.update_step)

    @property
    def variables(self) -> list[keras.Variable]:
        """What is remembered of no tensor of the model."""
        if self._agreement is None or self._beginning is None:
            return []
        memory = self._memory
        kept = (memory.residual, memory.velocity, *self._moments())
        last = [some[-1] for some in kept if some]
        return [self._beginning.steps, self._agreement.seen, *last]

    def precondition(self, inputs: Inputs) -> Inputs:
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
        return adam_kinds.without_velocity(inputs) if self.kind.ahead else inputs

    def is_stock(self) -> Choice:
        """Return whether the step that was begun is the optimizer's own."""
        return self._beginning.is_stock() if self._beginning else True

    def _divide(
        self, agreement: Agreement, first: Choice, stock: Choice, inputs: Inputs
    ) -> Inputs:
        active = not stock if isinstance(stock, bool) else tf.logical_not(stock)
        optimizer = self._optimizer
        asks = self.kind, optimizer, self._momentum
        numbers = adam_kinds.make_numbers(*asks, agreement.factors(), active)
        divisors = sent_by = self._divisors(numbers, active)
        if self._weighs:
            weighed = preconditioning.weigh(numbers, optimizer.learning_rate)
            sent_by = self._divisors(weighed, active)
        if first is not False:
            own = self._memory, self._slots(), sent_by
            betas = float(optimizer.beta_1), self._momentum
            crossing.cross(first, inputs, *own, *betas)
        # A sample is of quotients alone, so that every step has as much a part in it.
        inputs = sampling.add(agreement, inputs, self._memory, divisors, active)
        return inputs._replace(divisors=[sent_by.get(i) for i in inputs.indices])

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

    def _divisors(self, numbers: tf.Tensor, active: Choice) -> dict[int, Divisor]:
        """Return the divisor of each tensor that has one, by its place."""
        kind, memory = self.kind, self._memory
        ahead = adam_kinds.look_ahead(self._optimizer) if kind.ahead else None
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

    def receive(self, outcome: Outcome) -> Outcome:
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

        by_sums = functools.partial(native_update.apply_decoded, outcome.decode)
        apply = outcome.apply or by_sums

        def apply_and_learn(rule: UpdateRule) -> tf.Tensor:
            sample = agreement.arrived
            nonfinite = choose(
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
        return refreshing.refresh_if_due(communicator, moments, steps, largest)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Do what Keras's `update_step` does, with the sum of a step."""
        optimizer = self._optimizer
        exempt = self._memory.tensors[self._index_of(variable)].exempt

        def by_rule() -> tf.Tensor:
            type(optimizer).update_step(optimizer, gradient, variable, learning_rate)
            return tf.constant(True)

        def by_sum() -> tf.Tensor:
            rate = self._rate(learning_rate)
            optimizer.assign_sub(variable, gradient * tf.cast(rate, gradient.dtype))
            return tf.constant(True)

        choose(True if exempt else self.is_stock(), by_rule, by_sum)

    def _correct(self, rule: UpdateRule) -> UpdateRule:
        """Return the update that `update_step` is, of Adam's, where it is not stock."""
        tensors = [self._memory.tensors[self._index_of(v)] for v in rule.variables]
        own = self.kind.rule
        rate, decay, *_ = tf.unstack(rule.hyperparameters[own])
        descent = native_rules.pack(rate, decay, [self._rate(rate)])  # as by an SGD
        return rule._replace(
            names=[own if t.exempt else "sgd" for t in tensors],
            slots=[
                slots if t.exempt else []
                for t, slots in zip(tensors, rule.slots, strict=True)
            ],
            hyperparameters={**rule.hyperparameters, "sgd": descent},
        )

    def _rate(self, rate: Any) -> tf.Tensor:
        """Return what a sum is multiplied by, scalar float64.

        Velocities began at zero: divided is by the share of a momentum there is.
        """
        known = adam_kinds.known(self.kind, self._optimizer, self._momentum)
        return (1.0 if self._weighs else tf.cast(rate, tf.float64)) / known


def _and_keep(rule: UpdateRule, sample: keras.Variable) -> UpdateRule:
    """Return the rule that makes this variable the sum of the last tensor too."""
    return UpdateRule(
        [*rule.names, "kept"],
        {**rule.hyperparameters, "kept": native_rules.pack(0.0, 0.0, [])},
        [*rule.variables, sample],
        [*rule.slots, []],
        [*rule.decays, False],
    )
