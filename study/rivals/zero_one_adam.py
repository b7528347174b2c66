"""0/1 Adam: 1-bit Adam with local steps and ever rarer updates of the second moment.

Lu et al., "Maximizing communication efficiency for large-scale training via 0/1 Adam",
ICLR 2023, algorithm 1 and section 6.
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from training.trainer import is_uncompressed

from rivals.one_bit_adam import decode_signs, growing_intervals, is_dense
from tf_dgc.codecs import value_types
from tf_dgc.multiworker.worker_variables import PerWorkerVariable, SharedVariable


def ends_of_rounds(steps, max_length=16):
    """Return the last step of each round, for a cosine decay of the learning rate.

    Section 6: the first rounds have one step, and their length doubles whenever the
    learning rate has halved, up to 16. The last step ends a round.
    """
    ends, step = [], 0
    while step < steps:
        decay = (1 + math.cos(math.pi * step / steps)) / 2
        step = min(steps, step + min(max_length, 2 ** int(-math.log2(decay))))
        ends.append(step - 1)
    return ends


def dense_steps(steps):
    """Return the steps that update the second moment, while rounds have one step."""
    return [step for step in growing_intervals(steps) if 2 * step < steps]


class StepInfo(NamedTuple):
    """Facts about a step: bool and float64 scalars.

    Attributes:
        dense: whether gradients are summed.
        ends_round: whether the step ends a round and is not dense.
        rate: learning rate with bias corrections.
        decay: factor of weight decay.
        sum_of_rates: sum of the rates of the round so far.
    """

    dense: tf.Tensor
    ends_round: tf.Tensor
    rate: tf.Tensor
    decay: tf.Tensor
    sum_of_rates: tf.Tensor


class Slots(NamedTuple):
    """The state of a tensor: three variables per worker, and two shared ones."""

    momentum: keras.Variable
    delta: keras.Variable
    residual: keras.Variable
    square: keras.Variable
    anchor: keras.Variable


class LocalStep(NamedTuple):
    """A worker's part of a step for one tensor.

    Attributes:
        contribution: what is summed over workers.
        momentum: momentum after a local step.
        delta: sum of momenta times learning rates in the round.
        residual: new residual if the round ends.
    """

    contribution: tf.Tensor
    momentum: tf.Tensor
    delta: tf.Tensor
    residual: tf.Tensor


class ZeroOneAdam:
    """AdamW with local steps, whose workers exchange their deltas in 1 bit per entry.

    Dense steps sum the gradients and update as AdamW does. In all other steps, each
    worker updates its own momentum with its own gradient, and its weights with that
    momentum and the frozen second moment. At the end of a round, workers exchange the
    signs and the mean magnitude of their delta (the sum of momenta times learning
    rates) plus their residual. The mean over workers is applied to the weights at the
    start of the round; divided by the sum of learning rates it is the new momentum of
    all workers. Uncompressed tensors are sent in full at the end of a round.

    Bias correction and weight decay are those of Keras; entries without a second moment
    do not move, as in `OneBitMomentum`. Unlike the paper's server, this does not round
    the sum again, which favours the method. Within a round the workers' weights differ,
    and an evaluation uses those of the first worker.

    Args:
        rule: an `AdamW`, whose settings are used.
        dense: numbers of the dense steps, each the first step of a round.
        ends: numbers of the steps that end a round.

    Attributes:
        inner_optimizer: the rule.
        variables: the state, after `build`.
    """

    def __init__(self, rule, dense, ends):
        self.inner_optimizer = rule
        self._dense, self._ends = list(dense), list(ends)
        self._slots, self.variables = [], []

    def build(self, variables):
        """Create the state."""

        def shared(name, shape=(), dtype="float64"):
            return SharedVariable(np.zeros(shape), dtype, name)

        for i, v in enumerate(variables):
            self._slots.append(
                Slots(
                    momentum=PerWorkerVariable(v.shape, v.dtype, f"momentum{i}"),
                    delta=PerWorkerVariable(v.shape, v.dtype, f"delta{i}"),
                    residual=PerWorkerVariable(v.shape, v.dtype, f"residual{i}"),
                    square=shared(f"square{i}", v.shape, v.dtype),
                    anchor=shared(f"anchor{i}", v.shape, v.dtype),
                )
            )
        self._step = shared("step")
        self._sum_of_rates = shared("sum_of_rates")
        self._sent_bytes = shared("sent_bytes")
        self.variables = [slot for slots in self._slots for slot in slots]
        self.variables += [self._step, self._sum_of_rates, self._sent_bytes]

    @property
    def stats(self):
        """Statistics with `bytes`: what one worker has passed to collectives so far."""
        return SimpleNamespace(bytes=int(self._sent_bytes.numpy()))

    def apply_gradients(self, pairs):
        """Take a step with pairs of gradient and variable; see `apply`."""
        self.apply(*zip(*pairs, strict=True))

    def apply(self, gradients, variables):
        """Take a step; in replica context.

        Args:
            gradients: tensors, divided by the number of workers.
            variables: variables of `build`.
        """
        context = tf.distribute.get_replica_context()
        info = self._step_info()
        num_workers = context.num_replicas_in_sync
        local_steps = [
            self._local_step(tf.convert_to_tensor(g), slots, info, num_workers)
            for g, slots in zip(gradients, self._slots, strict=True)
        ]
        sums = context.all_reduce(
            tf.distribute.ReduceOp.SUM, [step.contribution for step in local_steps]
        )
        for variable, slots, local_step, total in zip(
            variables, self._slots, local_steps, sums, strict=True
        ):
            self._update(variable, slots, local_step, total, info)
        self._update_counters(info)

    def _step_info(self):
        rule, step = self.inner_optimizer, self._step.local()
        num_dense = tf.reduce_sum(
            tf.cast(tf.constant(self._dense, tf.float64) <= step, tf.float64)
        )
        m_bias, v_bias = 1 - rule.beta_1 ** (step + 1), 1 - rule.beta_2**num_dense
        rate = tf.cast(rule._learning_rate(step), tf.float64)
        decay = 1 - rate * (rule.weight_decay or 0.0)
        rate *= tf.sqrt(v_bias) / m_bias
        dense, ends = is_dense(self._dense, step), is_dense(self._ends, step)
        ends = tf.logical_and(ends, tf.logical_not(dense))
        return StepInfo(dense, ends, rate, decay, self._sum_of_rates.local() + rate)

    def _local_step(self, gradient, slots, info, num_workers):
        beta_1, mask = self.inner_optimizer.beta_1, slots.square.local() > 0
        scaled = (1 - beta_1) * num_workers * gradient
        momentum = tf.where(mask, beta_1 * slots.momentum.local() + scaled, 0.0)
        delta = slots.delta.local() + tf.cast(info.rate, gradient.dtype) * momentum
        accumulated = tf.where(mask, delta + slots.residual.local(), 0.0)
        decoded = accumulated
        if not is_uncompressed(accumulated.shape):
            decoded = tf.where(mask, _round_to_signs(accumulated), 0.0)
        sent = tf.where(info.ends_round, decoded / num_workers, tf.zeros_like(decoded))
        contribution = tf.where(info.dense, gradient, sent)
        return LocalStep(contribution, momentum, delta, accumulated - decoded)

    def _update(self, variable, slots, local_step, total, info):
        """Update a variable and its state with the sum over workers."""
        rule, dtype = self.inner_optimizer, total.dtype
        rate, decay = tf.cast(info.rate, dtype), tf.cast(info.decay, dtype)
        sum_of_rates = tf.cast(info.sum_of_rates, dtype)
        square = slots.square.local()
        dense_square = rule.beta_2 * square + (1 - rule.beta_2) * total**2
        square = tf.where(info.dense, dense_square, square)
        dense_momentum = (
            rule.beta_1 * slots.momentum.local() + (1 - rule.beta_1) * total
        )
        momentum = tf.where(info.dense, dense_momentum, local_step.momentum)
        momentum = tf.where(info.ends_round, total / sum_of_rates, momentum)
        weights, anchor = tf.convert_to_tensor(variable.value), slots.anchor.local()
        first = tf.equal(self._step.local(), 0)
        anchor = decay * tf.where(first, weights, anchor)
        update = tf.where(info.ends_round, total, rate * momentum)
        update = tf.where(square > 0, update / (tf.sqrt(square) + rule.epsilon), 0.0)
        weights = tf.where(info.ends_round, anchor, decay * weights) - update
        synchronized = tf.logical_or(info.dense, info.ends_round)
        delta, residual = local_step.delta, local_step.residual
        slots.square.assign(square)
        slots.momentum.assign(momentum)
        slots.delta.assign(tf.where(synchronized, tf.zeros_like(delta), delta))
        slots.residual.assign(
            tf.where(info.ends_round, residual, slots.residual.local())
        )
        slots.anchor.assign(tf.where(synchronized, weights, anchor))
        # `assign` of a mirrored variable would aggregate over replicas.
        tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=weights)

    def _update_counters(self, info):
        dense_bytes = sum(4 * math.prod(s.square.shape) for s in self._slots)
        round_bytes = sum(_num_bytes(s.square) for s in self._slots)
        sent = tf.where(
            info.dense, dense_bytes, tf.where(info.ends_round, round_bytes, 0)
        )
        synchronized = tf.logical_or(info.dense, info.ends_round)
        rates = info.sum_of_rates
        self._sent_bytes.assign(self._sent_bytes.local() + tf.cast(sent, tf.float64))
        self._sum_of_rates.assign(tf.where(synchronized, tf.zeros_like(rates), rates))
        self._step.assign(self._step.local() + 1)


def _round_to_signs(values):
    flat = tf.reshape(values, [-1])
    return tf.reshape(
        decode_signs(value_types.encode_values(flat, "sign"), flat), values.shape
    )


def _num_bytes(tensor):
    """Return the bytes of a tensor at the end of a round."""
    size = math.prod(tensor.shape)
    if is_uncompressed(tensor.shape):
        return 4 * size
    return 4 * value_types.encode_values(tf.zeros([size]), "sign").shape[0]
