"""The sample of `Agreement`: a tensor more, of what the others are divided to be."""

import collections
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.adaptive.agreement import Agreement
from tf_dgc.choice import Choice
from tf_dgc.steps.accumulation import pick
from tf_dgc.steps.base import Inputs
from tf_dgc.steps.memory import Memory
from tf_dgc.transforms import preconditioning
from tf_dgc.transforms.preconditioning import Divisor


def add(
    agreement: Agreement,
    inputs: Inputs,
    memory: Memory,
    divisors: dict[int, Divisor],
    active: Choice,
) -> Inputs:
    """Return what goes into a step with the sample as its last tensor.

    Args:
        agreement: agreement that the sample is for.
        inputs: inputs of the step, without divisors.
        memory: memory of all tensors, the sample's last.
        divisors: divisor of each tensor that is sampled, by its place.
        active: whether they are divided in this step; else the sample is zero.
    """
    places = {i: at for at, i in enumerate(divisors)}
    rows = [places[i] for i in inputs.indices if i in places]
    positions = agreement.positions(inputs.iteration)
    if rows:
        values = _peek(agreement, inputs, divisors, tf.gather(positions, rows))
    else:
        values = tf.zeros([0, positions.shape[1]], agreement.tensor.dtype)
    sample = agreement.sample(values, rows)
    if memory.velocity:  # what is sent is the sample itself
        memory.velocity[-1].assign(tf.zeros_like(sample))
    indices = [*inputs.indices, len(memory.tensors) - 1]
    own = memory.of(indices)
    return inputs._replace(
        tensors=own.tensors,
        indices=indices,
        gradients=[*inputs.gradients, tf.where(active, sample, tf.zeros_like(sample))],
        scales=[*inputs.scales, 1.0],
        memory=own,
        divisors=[*map(divisors.get, inputs.indices), None],
    )


def _peek(
    agreement: Agreement,
    inputs: Inputs,
    divisors: dict[int, Divisor],
    positions: tf.Tensor,
) -> tf.Tensor:
    """Return what some entries are going to be divided to be, `[rows, entries]`.

    A row for each tensor of the step that has a divisor, all at once: operations on so
    little take as long as their number.
    """
    dtype = agreement.tensor.dtype
    of_step = zip(
        inputs.indices, inputs.gradients, inputs.scales, inputs.tensors, strict=True
    )
    given = [(divisors[i], g, s, t) for i, g, s, t in of_step if i in divisors]
    infinity = given[0][0].infinity  # they are of one kind
    found = [
        tf.cast(pick(g, t, at), dtype)
        for (_, g, _, t), at in zip(given, tf.unstack(positions), strict=True)
    ]
    scales = [tf.cast(scale, dtype) for _, _, scale, _ in given]
    picked = tf.stack(found) * tf.stack(scales)[:, tf.newaxis]
    indices = unravel(positions, [t.shape for *_, t in given])

    def kept(variables: Sequence[Any]) -> tf.Tensor:
        pairs = zip(variables, indices, strict=True)
        return tf.stack([tf.cast(v.local_at(at), dtype) for v, at in pairs])

    numbers = tf.stack([d.numbers for d, *_ in given])
    before = kept([d.moment for d, *_ in given])
    now = preconditioning.follow(before, picked, numbers, infinity)
    if given[0][0].largest is not None:
        now = tf.maximum(kept([d.largest for d, *_ in given]), now)
    return preconditioning.quotient(picked, now, numbers, infinity)


def unravel(positions: tf.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[tf.Tensor]:
    """Return indices of flat positions, int32 `[entries, rank]` of each tensor.

    Args:
        positions: positions in each tensor, int32 `[tensors, entries]`.
        shapes: shape of each.
    """
    of_rank = collections.defaultdict(list)
    for row, shape in enumerate(shapes):
        of_rank[len(shape)].append(row)
    found: dict[int, tf.Tensor] = {}
    for rows in of_rank.values():
        given = [shapes[row] for row in rows]
        after = [[math.prod(s[axis + 1 :]) for axis in range(len(s))] for s in given]
        flat = tf.gather(positions, rows)[:, :, tf.newaxis]
        within = tf.constant(given, tf.int32)[:, tf.newaxis, :]
        indices = flat // tf.constant(after, tf.int32)[:, tf.newaxis, :] % within
        found.update(zip(rows, tf.unstack(indices), strict=True))
    return [found[row] for row in range(len(shapes))]
