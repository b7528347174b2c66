"""Adam behind a compressed exchange: what its rule divides by comes before it."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import schedules
from tf_dgc._internals import keras_optimizers, keras_rules
from tf_dgc.choice import Choice, choose
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.compressors import Compressor, TopK
from tf_dgc.steps.accumulation import Gradient, flatten
from tf_dgc.steps.memory import Memory
from tf_dgc.transforms import clipping, preconditioning
from tf_dgc.transforms.clipping import Scale

_RULE = "adam"


def is_adam(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether a whole step is that of Keras's `Adam` or `AdamW`, without AMSGrad."""
    return keras_rules.rule_name(optimizer) == _RULE


class AdamCorrection:
    """Makes of an `Adam` what is linear behind the exchange.

    Each worker follows the second moment of its own gradient, and divides by its root
    before momentum and accumulation, which are those of momentum correction. So it is
    updates that are exchanged, and their sum is applied as it is. The optimizer's own
    rule updates exempt tensors, and all as long as a schedule sends everything from the
    first step on.

    Args:
        optimizer: inner optimizer, built, an `Adam`; its `update_step` is replaced.
        tensors: descriptions of all tensors, in the order of the variables.
        compressor: method of those that are not exempt.
        num_workers: number of workers, N.

    Attributes:
        begun: variable, 1 when a step has left out entries, else 0; None unless a
            schedule decides when.
    """

    def __init__(
        self,
        optimizer: Any,
        tensors: Sequence[Tensor],
        compressor: Compressor,
        num_workers: int,
    ):
        self._optimizer = optimizer
        self._tensors = tensors
        self._sparsity = compressor.sparsity if isinstance(compressor, TopK) else None
        self._num_workers = num_workers
        self.begun = _make_flag() if callable(self._sparsity) else None
        keras_optimizers.replace_update_step(optimizer, self.update_step)

    def is_stock(self) -> Choice:
        """Return whether this step is the optimizer's own, on all tensors."""
        if self.begun is None or not callable(self._sparsity):
            return self._sparsity == 0
        whole = schedules.at(self._sparsity, self._optimizer.iterations.value) <= 0
        return tf.logical_and(whole, tf.equal(self.begun.value, 0))

    def precondition(
        self,
        stock: Choice,
        memory: Memory,
        variables: Sequence[keras.Variable],
        gradients: Sequence[Gradient],
        scales: Sequence[Scale],
    ) -> tuple[list[tf.Tensor], list[Scale]]:
        """Return what takes the place of gradients, where momentum is `beta_1`.

        Args:
            stock: result of `is_stock`.
            memory: what this worker remembers of the tensors of the step; their second
                moment is updated.
            variables: variables of the model.
            gradients: gradient of each, not yet multiplied by `scales`.
            scales: factor of each, as `clipping.clip` returns it.

        Returns:
            Tensors `[n]`, and scales again.
        """
        flat = [flatten(g, t) for g, t in zip(gradients, memory.tensors, strict=True)]
        products, finite = clipping.multiply(flat, scales)
        given = [
            choose(
                True if tensor.exempt else stock,
                functools.partial(self._as_it_is, memory, i, products[i]),
                functools.partial(self._divided, memory, i, products[i], variables[i]),
            )
            for i, tensor in enumerate(memory.tensors)
        ]
        return given, [1.0 + clipping.nan_unless(finite)] * len(given)

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
        exempt = self._tensors[
            keras_optimizers.variable_index(optimizer, variable)
        ].exempt

        def by_rule() -> tf.Tensor:
            type(optimizer).update_step(optimizer, gradient, variable, learning_rate)
            return tf.constant(True)

        def by_sum() -> tf.Tensor:
            # Velocities began at zero, so they lack what Adam's momentum does.
            known = 1.0 - tf.pow(
                tf.constant(optimizer.beta_1, tf.float64), self._step()
            )
            rate = tf.cast(learning_rate, tf.float64) / known
            optimizer.assign_sub(variable, gradient * tf.cast(rate, gradient.dtype))
            return tf.constant(True)

        choose(True if exempt else self.is_stock(), by_rule, by_sum)

    def _as_it_is(self, memory: Memory, i: int, gradient: tf.Tensor) -> tf.Tensor:
        """Return what makes a velocity the gradient itself."""
        if not memory.velocity:
            return gradient
        velocity = tf.reshape(memory.velocity[i].local(), [-1])
        return gradient - self._optimizer.beta_1 * velocity

    def _divided(
        self, memory: Memory, i: int, gradient: tf.Tensor, variable: keras.Variable
    ) -> tf.Tensor:
        optimizer, moment = self._optimizer, memory.second_moment[i]
        before = tf.reshape(moment.local(), [-1])
        if self.begun is not None:
            _, own = keras_rules.rule_slots(optimizer, _RULE, variable)
            first = tf.equal(self.begun.value, 0)
            before = tf.where(first, _flat(own, before.dtype), before)
        now = preconditioning.follow(
            before, gradient, self._num_workers, optimizer.beta_2
        )
        moment.assign(tf.reshape(now, moment.shape))
        divisor = preconditioning.denominator(
            now, self._step(), optimizer.beta_2, optimizer.epsilon
        )
        if self.begun is not None:
            tf.cond(
                first,
                lambda: self._take_over(memory, i, variable, divisor),
                lambda: tf.constant(True),
            )
        return (1.0 - optimizer.beta_1) * gradient / divisor

    def _take_over(
        self, memory: Memory, i: int, variable: keras.Variable, divisor: tf.Tensor
    ) -> tf.Tensor:
        """Make of the optimizer's momentum, and of what is kept, what it comes to."""
        own, _ = keras_rules.rule_slots(self._optimizer, _RULE, variable)
        kept = memory.residual[i]
        kept.assign(tf.reshape(_flat(kept, divisor.dtype) / divisor, kept.shape))
        if memory.velocity:
            share = _flat(own, divisor.dtype) / self._num_workers
            memory.velocity[i].assign(tf.reshape(share / divisor, kept.shape))
        return tf.constant(True)

    def _step(self) -> tf.Tensor:
        return tf.cast(self._optimizer.iterations.value, tf.float64) + 1.0


def _flat(variable: keras.Variable, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.reshape(tf.convert_to_tensor(variable.value), [-1]), dtype)


def _make_flag() -> keras.Variable:
    return keras.Variable(
        initializer="zeros",
        shape=[],
        dtype="int32",
        trainable=False,
        aggregation="only_first_replica",
        name="adam_correction_begun",
    )
