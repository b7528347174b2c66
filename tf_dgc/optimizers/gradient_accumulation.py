"""Gradient accumulation over several calls of `apply`."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import conditions, metrics
from tf_dgc._internals import keras_optimizers
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.multiworker.worker_variables import PerWorkerVariable


class GradientAccumulation:
    """Sums each worker's gradients over several calls, like Keras's optimizers.

    As in Keras, the learning rate depends on the number of calls, and moving averages
    are updated in every call. Workers communicate only in the last call of a step. The
    sum contains gradients that are not finite; the step handles them as usual.

    Args:
        number: number of calls per step.
        tensors: descriptions of the tensors of the model.
        variables: variables of the model.

    Raises:
        ValueError: for variables that their gradient overwrites.

    Attributes:
        sums: variable of each tensor, the sum over this step's calls.
        calls: variable, number of this step's calls, scalar int64, equal on all
            workers.
        total: variable, number of calls of all steps, likewise. A restored run may have
            another number of calls per step.
    """

    def __init__(
        self,
        number: int,
        tensors: Sequence[TensorSpec],
        variables: Sequence[keras.Variable],
    ):
        overwritten = filter(keras_optimizers.overwrites_with_gradient, variables)
        if names := [v.path for v in overwritten]:
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
        self.calls = metrics.create_count("accumulated_calls")
        self.total = metrics.create_count("all_calls")

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables."""
        return [*self.sums, self.calls, self.total]

    def count_calls_for_learning_rate(self, inner: keras.optimizers.Optimizer) -> None:
        """Make the inner optimizer's learning rate depend on the number of calls."""
        keras_optimizers.count_rate_by_calls(
            inner, lambda: tf.convert_to_tensor(self.total.value)
        )

    def call(
        self,
        inner: keras.optimizers.Optimizer,
        indices: Sequence[int],
        grads: Sequence[Any],
        variables: Sequence[keras.Variable],
        step: Callable[[list[tf.Tensor]], None],
    ) -> None:
        """Add gradients, and take the step in its last call; in replica context.

        Args:
            inner: inner optimizer.
            indices: index of each variable among the tensors.
            grads: gradients of the variables, none missing.
            variables: variables of the model.
            step: function that takes the step with the mean gradients.
        """
        for index, gradient in zip(indices, grads, strict=True):
            _add(self.sums[index], gradient)
        calls = tf.convert_to_tensor(self.calls.value) + 1
        is_last = tf.greater_equal(calls, self._number)

        def take_step() -> None:
            step(
                [
                    self._mean_and_reset(index, tf.as_dtype(v.dtype), calls)
                    for index, v in zip(indices, variables, strict=True)
                ]
            )

        conditions.cond_in_all_replicas(is_last, take_step)
        if inner.use_ema:
            conditions.cond_in_all_replicas(
                tf.logical_not(is_last), lambda: keras_optimizers.update_averages(inner)
            )
        self.calls.assign(tf.where(is_last, tf.zeros_like(calls), calls))
        self.total.assign_add(1)

    def _mean_and_reset(
        self, index: int, dtype: tf.DType, calls: tf.Tensor
    ) -> tf.Tensor:
        variable = self.sums[index]
        total = variable.local()
        mean = tf.cast(total / tf.cast(calls, total.dtype), dtype)
        with tf.control_dependencies([mean]):
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        return mean


def _add(variable: PerWorkerVariable, gradient: Any) -> None:
    dtype = tf.as_dtype(variable.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        rows = tf.cast(gradient.indices, tf.int64)[:, tf.newaxis]
        values = tf.cast(gradient.values, dtype)
        variable.assign(tf.tensor_scatter_nd_add(variable.local(), rows, values))
    else:
        variable.assign(variable.local() + tf.cast(gradient, dtype))
