"""Converts the bytes that a run passed to collectives to bytes on a link of a ring."""

import collections
import dataclasses
import functools
import json
import math
from typing import NamedTuple

import tensorflow as tf
from tasks import recipe_task
from tasks.recipes import Recipe

from registered import registry
from registered.specs import Spec
from tf_dgc.collectives import Ring
from tf_dgc.schedules import WarmupSparsity
from tf_dgc.steps import top_k_step
from tf_dgc.steps.base import split_uncompressed

EXAMPLES = {"cifar10": 50_000, "ptb": 46_479, "mnist": 60_000, "shakespeare": 31_370}
"""Examples per epoch, to compute the length of a warm-up without the data."""


def ring_bytes(spec, num_bytes, steps):
    """Return the bytes that a worker sends to the next one on a ring of N workers.

    All-reducing P bytes sends 2 (N - 1)/N P bytes; all-gathering P bytes sends
    (N - 1) P.

    Args:
        spec: spec of the run.
        num_bytes: bytes that a worker passed to the collectives.
        steps: number of steps in which it did so, the last ones of the run.
    """
    without_seed = dataclasses.replace(spec, seed=0)
    all_reduced = _all_reduced(json.dumps(dataclasses.asdict(without_seed)))
    dense_steps = max(0, all_reduced.dense_steps - (spec.steps - steps))
    summed = min(
        num_bytes,
        steps * all_reduced.every_step + dense_steps * all_reduced.extra_if_dense,
    )
    ring = Ring()
    return (
        ring.cost_of_sum(summed, spec.workers).sent
        + ring.cost_of_gather(num_bytes - summed, spec.workers).sent
    )


class _AllReduced(NamedTuple):
    """The bytes that a worker passes to all-reduce.

    Attributes:
        every_step: bytes in every step; infinite if nothing is gathered.
        extra_if_dense: further bytes of dense steps.
        dense_steps: number of dense steps at the beginning.
    """

    every_step: float
    extra_if_dense: int = 0
    dense_steps: int = 0


@dataclasses.dataclass(frozen=True)
class _TaskSize:
    """The facts about a task that `make_optimizer` uses, without the data."""

    recipe: Recipe
    num_examples: int

    steps_per_epoch = recipe_task.Task.steps_per_epoch


@functools.cache
def _all_reduced(spec_json):
    """Return the `_AllReduced` of a spec.

    Uncompressed tensors may be all-reduced while others are gathered, and the first
    steps of DGC's warm-up are dense if that sends less on a ring.
    """
    spec = Spec(**json.loads(spec_json))
    if spec.method == "dense":
        return _AllReduced(math.inf)
    task = registry.make_task(spec, None)
    size = _TaskSize(task.recipe, EXAMPLES.get(spec.task, 0))
    optimizer = registry.make_optimizer(spec, size)
    optimizer.build(task.model().trainable_variables)
    compressor, tensors = optimizer.compressor, optimizer.tensors
    if compressor.aggregation == "sum":
        return _AllReduced(math.inf)
    compressed_bytes, *uncompressed_bytes = (
        sum(tensors[i].size * tensors[i].dtype.size for i in indices)
        for indices in split_uncompressed(tensors, spec.workers)
    )
    dense_steps = _dense_steps(compressor, tensors, spec.workers)
    return _AllReduced(sum(uncompressed_bytes), compressed_bytes, dense_steps)


def _dense_steps(compressor, tensors, workers):
    schedule = getattr(compressor, "sparsity", None)
    if not isinstance(schedule, WarmupSparsity):
        return 0
    steps = [tf.constant(step, tf.int64) for step in range(schedule.warmup_steps)]
    stages = collections.defaultdict(list)
    for step in steps:
        stages[float(schedule(step))].append(step)
    return sum(
        len(stage) * bool(top_k_step.is_dense(compressor, tensors, stage[0], workers))
        for stage in stages.values()
    )
