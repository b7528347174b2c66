"""0/1 Adam: 1-bit Adam with local steps, whose second moment follows ever more rarely.

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

from rivals.onebit import decode_signs, growing_intervals, is_dense
from tf_dgc.codecs import value_types
from tf_dgc.multiworker.worker_variables import PerWorkerVariable, SharedVariable


def ends_of_rounds(steps, most=16):
    """Return the steps that end with an exchange, of a run whose rate is a cosine's.

    Section 6: a round is one step at first, and twice as long whenever the learning
    rate has halved, up to 16. The last step ends a round.
    """
    found, at = [], 0
    while at < steps:
        share = (1 + math.cos(math.pi * at / steps)) / 2
        at = min(steps, at + min(most, 2 ** int(-math.log2(share))))
        found.append(at - 1)
    return found


def dense_steps(steps):
    """Return the steps in which the second moment follows: while rounds are of one."""
    return [step for step in growing_intervals(steps) if 2 * step < steps]


class When(NamedTuple):
    """What a step is: scalars, bool and float64.

    Attributes:
        dense: whether gradients are summed.
        ends: whether a round ends.
        rate: learning rate, with corrections of bias.
        kept: what is left of a weight that decays.
        rates: sum of the rates of the round.
    """

    dense: tf.Tensor
    ends: tf.Tensor
    rate: tf.Tensor
    kept: tf.Tensor
    rates: tf.Tensor


class Slots(NamedTuple):
    """The state of a tensor: the first three are of each worker, the others of all."""

    momentum: keras.Variable
    moved: keras.Variable
    residual: keras.Variable
    square: keras.Variable
    anchor: keras.Variable


class ZeroOneAdam:
    """AdamW whose workers step alone, and exchange in 1 bit what momentum led to.

    In dense steps gradients are summed, and the step is AdamW's. In all others each
    worker lets its own gradient enter its momentum, and steps by that and the second
    moment that stands still. As a round ends, workers exchange the signs of the sum of
    their momenta times the learning rate, and of what they kept back, with their mean
    magnitude. The mean of all moves the weights that the round began with, and divided
    by the sum of learning rates it is the momentum of all. Exempt tensors are sent
    whole then.

    Bias is corrected, and weights decay, as in Keras; entries without a second moment
    stand still, as in `OneBitMomentum`. The sum is not rounded once more on its way
    back, as the paper's is by its server: that favours it. Between two ends of rounds
    workers differ: what is evaluated there are the weights of the first one.

    Args:
        rule: an `AdamW`, whose settings are taken.
        dense: numbers of the dense steps, each behind the end of a round.
        ends: numbers of the steps that end a round.

    Attributes:
        inner_optimizer: the rule.
        variables: the state, when it is built.
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
            own, alike = Slots._fields[:3], Slots._fields[3:]
            self._slots.append(
                Slots(
                    *(PerWorkerVariable(v.shape, v.dtype, f"{n}{i}") for n in own),
                    *(shared(f"{n}{i}", v.shape, v.dtype) for n in alike),
                )
            )
        self._step, self._rates, self._sent = map(shared, ("step", "rates", "sent"))
        self.variables = [slot for slots in self._slots for slot in slots]
        self.variables += [self._step, self._rates, self._sent]

    @property
    def stats(self):
        """What one worker has handed to collectives so far, as `bytes`."""
        return SimpleNamespace(bytes=int(self._sent.numpy()))

    def apply_gradients(self, pairs):
        """Take a step by pairs of gradient and variable, see `apply`."""
        self.apply(*zip(*pairs, strict=True))

    def apply(self, gradients, variables):
        """Take a step; in replica context.

        Args:
            gradients: tensors, divided by the number of workers.
            variables: those it was built for.
        """
        context, when = tf.distribute.get_replica_context(), self._when()
        number = context.num_replicas_in_sync
        mine = [
            self._ask(tf.convert_to_tensor(g), slots, when, number)
            for g, slots in zip(gradients, self._slots, strict=True)
        ]
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [m[0] for m in mine])
        for v, slots, asked, total in zip(
            variables, self._slots, mine, sums, strict=True
        ):
            self._move(v, slots, asked[1:], total, when)
        self._count(when)

    def _when(self):
        rule, step = self.inner_optimizer, self._step.local()
        followed = tf.reduce_sum(
            tf.cast(tf.constant(self._dense, tf.float64) <= step, tf.float64)
        )
        known, begun = 1 - rule.beta_2**followed, 1 - rule.beta_1 ** (step + 1)
        rate = tf.cast(rule._learning_rate(step), tf.float64)
        kept = 1 - rate * (rule.weight_decay or 0.0)
        rate *= tf.sqrt(known) / begun
        dense, ends = (is_dense(steps, step) for steps in (self._dense, self._ends))
        rates = self._rates.local() + rate
        return When(
            dense, tf.logical_and(ends, tf.logical_not(dense)), rate, kept, rates
        )

    def _ask(self, gradient, slots, when, number):
        """Return what is summed, and momentum, moved and residual if a round goes on.

        The last is what is kept back if one ends.
        """
        share, counts = self.inner_optimizer.beta_1, slots.square.local() > 0
        momentum = share * slots.momentum.local() + (1 - share) * number * gradient
        momentum = tf.where(counts, momentum, 0.0)
        moved = slots.moved.local() + tf.cast(when.rate, gradient.dtype) * momentum
        asked = tf.where(counts, moved + slots.residual.local(), 0.0)
        coded = asked
        if not is_uncompressed(asked.shape):
            coded = tf.where(counts, _coded(asked), 0.0)
        sent = tf.where(when.ends, coded / number, tf.zeros_like(coded))
        return tf.where(when.dense, gradient, sent), momentum, moved, asked - coded

    def _move(self, variable, slots, mine, total, when):
        """Update a variable and its state by what arrived."""
        momentum, moved, residual = mine
        rule, dtype = self.inner_optimizer, total.dtype
        rate, kept, rates = (
            tf.cast(n, dtype) for n in (when.rate, when.kept, when.rates)
        )
        square, before = slots.square.local(), slots.momentum.local()
        followed = rule.beta_2 * square + (1 - rule.beta_2) * total**2
        square = tf.where(when.dense, followed, square)
        dense = rule.beta_1 * before + (1 - rule.beta_1) * total
        momentum = tf.where(when.dense, dense, momentum)
        momentum = tf.where(when.ends, total / rates, momentum)
        weights, anchor = tf.convert_to_tensor(variable.value), slots.anchor.local()
        first = tf.equal(self._step.local(), 0)
        anchor = kept * tf.where(first, weights, anchor)
        step = tf.where(when.ends, total, rate * momentum)
        step = tf.where(square > 0, step / (tf.sqrt(square) + rule.epsilon), 0.0)
        weights = tf.where(when.ends, anchor, kept * weights) - step
        alike = tf.logical_or(when.dense, when.ends)
        slots.square.assign(square)
        slots.momentum.assign(momentum)
        slots.moved.assign(tf.where(alike, tf.zeros_like(moved), moved))
        slots.residual.assign(tf.where(when.ends, residual, slots.residual.local()))
        slots.anchor.assign(tf.where(alike, weights, anchor))
        # A replica's own copy, which no other one is asked about.
        tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=weights)

    def _count(self, when):
        whole = sum(4 * math.prod(s.square.shape) for s in self._slots)
        ended = sum(_num_bytes(s.square) for s in self._slots)
        sent = tf.where(when.dense, whole, tf.where(when.ends, ended, 0))
        alike = tf.logical_or(when.dense, when.ends)
        self._sent.assign(self._sent.local() + tf.cast(sent, tf.float64))
        self._rates.assign(tf.where(alike, tf.zeros_like(when.rates), when.rates))
        self._step.assign(self._step.local() + 1)


def _coded(values):
    flat = tf.reshape(values, [-1])
    return tf.reshape(
        decode_signs(value_types.encode_values(flat, "sign"), flat), values.shape
    )


def _num_bytes(tensor):
    """Return the bytes of a tensor as a round ends."""
    size = math.prod(tensor.shape)
    if is_uncompressed(tensor.shape):
        return 4 * size
    return 4 * value_types.encode_values(tf.zeros([size]), "sign").shape[0]
