"""From which step on an Adam is corrected: the first that leaves something out."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import metrics
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.compressors import Compressor, TopK
from tf_dgc.optimizers.adam_sampling import CorrelationSample
from tf_dgc.smart_cond import BoolOrTensor
from tf_dgc.steps import preconditioning, top_k_step
from tf_dgc.steps.accumulation import scaled_dense_gradients
from tf_dgc.steps.base import StepInputs
from tf_dgc.steps.preconditioning import Divisor
from tf_dgc.steps.state import WorkerState


class TransitionToSparse:
    """Counts corrected steps, alike on all workers.

    Until then steps are *stock*: everything is sent, and the optimizer's own rule is
    applied to the sum.

    Args:
        compressor: method of the tensors that are not exempt; None if it was chosen to
            send everything in every step.
        worker_state: memory of all tensors, the sample's last.
        agreement: agreement of those that are not exempt.

    Attributes:
        steps: variable, number of corrected steps.
    """

    def __init__(
        self,
        compressor: Compressor | None,
        worker_state: WorkerState,
        agreement: CorrelationSample,
    ):
        self._compressor = compressor
        self._agreement = agreement
        self.steps = metrics.create_count("adam_corrected_steps")
        self._may_be_stock = self._goes_dense(worker_state.tensors, None)

    def count(self, inputs: StepInputs) -> tuple[BoolOrTensor, BoolOrTensor]:
        """Count a step; return whether correction begins in it, or it is a stock one.

        It begins where stock steps came before, of this run or of one that it goes on
        from: there a schedule, or the number of workers, may have sent everything.

        Args:
            inputs: inputs of the step, without the sample.
        """
        none = tf.equal(self.steps.value, 0)
        crosses = tf.logical_and(none, inputs.iteration > 0)
        if not self._may_be_stock:
            self.steps.assign_add(1)
            return crosses, False
        layout = [*inputs.tensors, self._agreement.tensor]
        stock = tf.logical_and(self._goes_dense(layout, inputs.iteration), none)
        corrected = tf.logical_not(stock)
        self.steps.assign_add(tf.cast(corrected, tf.int64))
        return tf.logical_and(corrected, crosses), stock

    def is_stock(self) -> BoolOrTensor:
        """Return whether the step that was counted last is a stock one."""
        return self._may_be_stock and tf.equal(self.steps.value, 0)

    def _goes_dense(
        self, tensors: Sequence[TensorSpec], iteration: tf.Tensor | None
    ) -> BoolOrTensor:
        """Return whether a step does, or if its number is None, whether any may."""
        if self._compressor is None:
            return True
        if not isinstance(self._compressor, TopK):
            return False
        number = self._agreement.num_workers
        return top_k_step.is_dense(self._compressor, tensors, iteration, number)


# --- From Adam's own steps to corrected ones, where a schedule first leaves something
# out.
#
# What the optimizer and the workers remember of gradients becomes what they would
# remember of updates: in this step, and never again. So it is of all tensors, also of
# those without a gradient in this step.


def transfer_adam_state(
    first: tf.Tensor,
    inputs: StepInputs,
    worker_state: WorkerState,
    slots: Mapping[int, Sequence[keras.Variable]],
    divisors: Mapping[int, Divisor],
    beta_1: float,
    momentum: float,
) -> None:
    """Take over from the optimizer, before the step, if it is the first one.

    The second moment becomes Adam's; the velocity this worker's share of Adam's
    momentum, and the residual what it was, both divided as the step's gradient is, or
    would be if it was not missing. What the momentum still owes, and would not give
    with the smaller coefficient from now on, is added to the residual.

    Args:
        first: whether it is, scalar bool.
        inputs: inputs of the step, without divisors.
        worker_state: memory of all tensors, of the step or not.
        slots: Adam's momentum and second moment of each tensor with a divisor, by its
            place; behind them what else it remembers, the largest second moment so far.
        divisors: divisor of each tensor that has one, by its place.
        beta_1: coefficient of Adam's momentum.
        momentum: coefficient of the momentum from now on.
    """
    owed = beta_1 / (1 - beta_1) - momentum / (1 - momentum)

    def take_over() -> tf.Tensor:
        gradients, _ = scaled_dense_gradients(
            inputs.tensors, inputs.gradients, inputs.scales
        )
        given = dict(zip(inputs.indices, gradients, strict=True))
        for i, by in divisors.items():
            dtype = worker_state.tensors[i].dtype
            total, *moments = (_flat(slot, dtype) for slot in slots[i])
            # Keras's own overflow, and what is infinite would stay.
            share = _finite(total, 0.0) / inputs.num_workers
            now = _take_moments(by, given.get(i), moments)
            kept = worker_state.residual[i]
            _divide(kept, _flat(kept, dtype) + owed * share, now, by, momentum)
            if worker_state.velocity:
                _divide(worker_state.velocity[i], share, now, by, momentum)
        return tf.constant(True)

    tf.cond(first, take_over, lambda: tf.constant(True))


def _take_moments(
    by: Divisor, gradient: tf.Tensor | None, moments: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Take over Adam's moments; return what the step's gradient is divided by.

    A moment that no gradient enters stays what it is, as in Keras.
    """
    moments = [_finite(moment, moment.dtype.max) for moment in moments]
    by.moment.assign(tf.reshape(moments[0], by.moment.shape))
    now = moments[0]
    if gradient is not None:
        now = preconditioning.update_moment(now, gradient, by.numbers, by.infinity)
    if by.largest is None:
        return now
    by.largest.assign(tf.reshape(moments[1], by.largest.shape))
    return tf.maximum(moments[1], now)


def _divide(
    kept: Any, values: tf.Tensor, now: tf.Tensor, by: Divisor, momentum: float
) -> None:
    rescaled = preconditioning.rescale(values, now, by.numbers, by.infinity)
    divided = rescaled * (1 / (1 - momentum))
    largest = now.dtype.max  # what overflows would never leave again
    within = tf.clip_by_value(divided, -largest, largest)
    kept.assign(tf.reshape(within, kept.shape))


def _flat(variable: keras.Variable, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.reshape(tf.convert_to_tensor(variable.value), [-1]), dtype)


def _finite(values: tf.Tensor, otherwise: float) -> tf.Tensor:
    return tf.where(
        tf.math.is_finite(values), values, tf.constant(otherwise, values.dtype)
    )
