"""Accumulating: the gradients of several calls, whose mean is one step's."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import averages, keras_optimizers, learning_rates
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.distribute.worker_variables import PerWorkerVariable
from tf_dgc.inner import conditions
from tf_dgc.metrics import counting


class Accumulation:
    """Adds up what each worker's calls bring, as Keras's optimizers do.

    As there, the learning rate goes by calls, and weights are averaged in every call.
    Nobody is contacted before the last call of a step. What is not finite is in the
    sum, so that the step treats it as it treats such a gradient.

    Args:
        number: number of calls that make a step.
        tensors: descriptions of the tensors of the model.
        variables: variables of the model.

    Raises:
        ValueError: for variables that take their gradient as their new value.

    Attributes:
        sums: variable of each tensor, of this step's calls so far.
        calls: variable of how many these are, scalar int64, the same on all workers.
        total: variable of how many there were in all steps, likewise; the number that
            makes a step may be another one in a run that goes on from a file.
    """

    def __init__(
        self,
        number: int,
        tensors: Sequence[Tensor],
        variables: Sequence[keras.Variable],
    ):
        special = filter(keras_optimizers.overwrites_with_gradient, variables)
        if names := [v.path for v in special]:
            raise ValueError(
                "Scales of float8 layers take a new value in every call, and "
                "`gradient_accumulation_steps` has a step of several. Leave one of "
                f"both out. Received: gradient_accumulation_steps={number}, {names}"
            )
        self._number = number
        self.sums = [
            PerWorkerVariable(t.shape, t.dtype.name, f"{i}_accumulated")
            for i, t in enumerate(tensors)
        ]
        self.calls = counting.make_count("accumulated_calls")
        self.total = counting.make_count("all_calls")

    @property
    def variables(self) -> list[keras.Variable]:
        """All that is remembered from call to call."""
        return [*self.sums, self.calls, self.total]

    def set_rate(self, rule: keras.optimizers.Optimizer) -> None:
        """Let the learning rate be that of the call, as Keras has it.

        Args:
            rule: inner optimizer, whose iterations are steps.
        """
        learning_rates.follow_calls(
            rule, lambda: tf.convert_to_tensor(self.total.value)
        )

    def call(
        self,
        optimizer: Any,
        grads: Sequence[Any],
        variables: Sequence[keras.Variable],
        step: Callable[[list[tf.Tensor]], None],
    ) -> None:
        """Add gradients, and take the step if it is complete; in replica context.

        Args:
            optimizer: optimizer that was called, with an inner one.
            grads: gradients of the variables, none missing.
            variables: variables of the model.
            step: function of their means that takes the step.
        """
        places = [keras_optimizers.variable_index(optimizer, v) for v in variables]
        for place, gradient in zip(places, grads, strict=True):
            _add(self.sums[place], gradient)
        done = tf.convert_to_tensor(self.calls.value) + 1

        def complete() -> None:
            dtypes = [tf.as_dtype(v.dtype) for v in variables]
            step([self._take(*pair, done) for pair in zip(places, dtypes, strict=True)])

        ends = tf.greater_equal(done, self._number)
        conditions.call_if(ends, complete)
        rule = optimizer.inner_optimizer
        if rule.use_ema:
            average = functools.partial(averages.update, rule)
            conditions.call_if(tf.logical_not(ends), average)
        self.calls.assign(tf.where(ends, tf.zeros_like(done), done))
        self.total.assign_add(1)

    def _take(self, place: int, dtype: tf.DType, calls: tf.Tensor) -> tf.Tensor:
        """Return the mean of a tensor over so many calls, and begin anew."""
        kept = self.sums[place]
        total = kept.local()
        mean = tf.cast(total / tf.cast(calls, total.dtype), dtype)
        with tf.control_dependencies([mean]):
            kept.assign(tf.zeros(kept.shape, kept.dtype))
        return mean


def _add(kept: PerWorkerVariable, gradient: Any) -> None:
    """Add a gradient, of which rows may be given alone."""
    dtype = tf.as_dtype(kept.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        at = tf.cast(gradient.indices, tf.int64)[:, tf.newaxis]
        values = tf.cast(gradient.values, dtype)
        kept.assign(tf.tensor_scatter_nd_add(kept.local(), at, values))
    else:
        kept.assign(kept.local() + tf.cast(gradient, dtype))
