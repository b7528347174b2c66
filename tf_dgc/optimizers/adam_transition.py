"""The transition from Adam's own steps to corrected ones, when a step is first sparse.

As long as every entry is sent, the inner optimizer applies its own rule to the sum of
gradients: an *uncorrected* step. In the first step that leaves entries out, the state
that the optimizer and the workers have for gradients is converted to the state of
preconditioned gradients; this happens once, and for all tensors, including those
without a gradient in this step.
"""

from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from tf_dgc import metrics
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.compressors import Compressor, TopK
from tf_dgc.conditions import BoolOrTensor
from tf_dgc.multiworker.worker_variables import PerWorkerVariable
from tf_dgc.optimizers.adam_sampling import CorrelationSample
from tf_dgc.steps import preconditioning, top_k_step
from tf_dgc.steps.accumulation import scaled_dense_gradients
from tf_dgc.steps.base import StepInputs, WorkerState
from tf_dgc.steps.preconditioning import Divisor


class TransitionToSparse:
    """Counts corrected steps, and decides when they begin.

    With `compressor=None` every step is dense.

    Attributes:
        steps: variable, number of corrected steps, equal on all workers.
    """

    def __init__(
        self,
        compressor: Compressor | None,
        worker_state: WorkerState,
        correlation: CorrelationSample,
    ):
        self._compressor = compressor
        self._correlation = correlation
        self.steps = metrics.create_count("adam_corrected_steps")
        self._may_be_uncorrected = self._is_dense(worker_state.tensors, None)

    def count(self, inputs: StepInputs) -> tuple[BoolOrTensor, BoolOrTensor]:
        """Count a step, given its inputs without the sample.

        Returns:
            Whether this step is the transition, and whether it is uncorrected. The
            first step of all needs no transition, but that of a resumed run may: a
            schedule, or another number of workers, may have made earlier steps dense.
        """
        none_corrected = tf.equal(self.steps.value, 0)
        is_transition = tf.logical_and(none_corrected, inputs.iteration > 0)
        if not self._may_be_uncorrected:
            self.steps.assign_add(1)
            return is_transition, False
        tensors = [*inputs.tensors, self._correlation.tensor]
        is_dense = self._is_dense(tensors, inputs.iteration)
        uncorrected = tf.logical_and(is_dense, none_corrected)
        corrected = tf.logical_not(uncorrected)
        self.steps.assign_add(tf.cast(corrected, tf.int64))
        return tf.logical_and(corrected, is_transition), uncorrected

    def is_uncorrected(self) -> BoolOrTensor:
        """Return whether the step counted last is uncorrected."""
        return self._may_be_uncorrected and tf.equal(self.steps.value, 0)

    def _is_dense(
        self, tensors: Sequence[TensorSpec], iteration: tf.Tensor | None
    ) -> BoolOrTensor:
        """Return whether a step is dense; with None, whether any step may be."""
        if self._compressor is None:
            return True
        if not isinstance(self._compressor, TopK):
            return False
        return top_k_step.is_dense(
            self._compressor, tensors, iteration, self._correlation.num_workers
        )


def transfer_adam_state(
    is_transition: tf.Tensor,
    inputs: StepInputs,
    worker_state: WorkerState,
    slots: Mapping[int, Sequence[keras.Variable]],
    divisors: Mapping[int, Divisor],
    beta_1: float,
    momentum: float,
) -> None:
    """Convert Adam's state before the step, if the step is the transition.

    1. The second moment becomes Adam's.
    2. The velocity becomes this worker's share of Adam's momentum, preconditioned like
       the step's gradient.
    3. The residual is preconditioned too. The part of Adam's momentum that the smaller
       coefficient `momentum` would not apply from now on is added to it.

    Args:
        is_transition: whether the step is the transition, scalar bool.
        inputs: inputs of the step, without divisors.
        worker_state: state of all tensors.
        slots: Adam's momentum, second moment and, for AMSGrad, largest second moment of
            each tensor with a divisor, by its index.
        divisors: divisor of each tensor that has one, by its index.
        beta_1: coefficient of Adam's momentum.
        momentum: coefficient of the velocity from now on.
    """
    outstanding = beta_1 / (1 - beta_1) - momentum / (1 - momentum)

    def transfer() -> tf.Tensor:
        dense, _ = scaled_dense_gradients(
            inputs.tensors, inputs.gradients, inputs.scales
        )
        gradients = dict(zip(inputs.indices, dense, strict=True))
        for i, divisor in divisors.items():
            dtype = worker_state.tensors[i].dtype
            first_moment, *moments = (_flat(slot, dtype) for slot in slots[i])
            # Keras's momentum may have overflowed, and would stay infinite.
            share = _finite(first_moment, 0.0) / inputs.num_workers
            moment = _transfer_moments(divisor, gradients.get(i), moments)
            residual = worker_state.residual[i]
            delayed = _flat(residual, dtype) + outstanding * share
            _assign_preconditioned(residual, delayed, moment, divisor, momentum)
            if worker_state.velocity:
                velocity = worker_state.velocity[i]
                _assign_preconditioned(velocity, share, moment, divisor, momentum)
        return tf.constant(True)

    tf.cond(is_transition, transfer, lambda: tf.constant(True))


def _transfer_moments(
    divisor: Divisor, gradient: tf.Tensor | None, moments: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Assign Adam's moments; return the moment that the step's gradient is divided by.

    Without a gradient in this step the moment stays the same, as in Keras.
    """
    moments = [_finite(moment, moment.dtype.max) for moment in moments]
    divisor.moment.assign(tf.reshape(moments[0], divisor.moment.shape))
    moment = moments[0]
    if gradient is not None:
        moment = preconditioning.update_moment(
            moment, gradient, divisor.numbers, divisor.infinity
        )
    if divisor.largest is None:
        return moment
    divisor.largest.assign(tf.reshape(moments[1], divisor.largest.shape))
    return tf.maximum(moments[1], moment)


def _assign_preconditioned(
    variable: PerWorkerVariable,
    values: tf.Tensor,
    moment: tf.Tensor,
    divisor: Divisor,
    momentum: float,
) -> None:
    rescaled = preconditioning.rescale(
        values, moment, divisor.numbers, divisor.infinity
    )
    preconditioned = rescaled * (1 / (1 - momentum))
    largest = moment.dtype.max  # an infinite entry would stay in the state
    bounded = tf.clip_by_value(preconditioned, -largest, largest)
    variable.assign(tf.reshape(bounded, variable.shape))


def _flat(variable: keras.Variable, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.reshape(tf.convert_to_tensor(variable.value), [-1]), dtype)


def _finite(values: tf.Tensor, default: float) -> tf.Tensor:
    return tf.where(
        tf.math.is_finite(values), values, tf.constant(default, values.dtype)
    )
