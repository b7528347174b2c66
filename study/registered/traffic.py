"""What of the bytes that a run handed to collectives a link of a ring carries."""

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
"""Examples of a pass, from which the length of a warm-up follows without the data."""


def on_a_ring(spec, handed, steps):
    """Return the bytes that a worker sends to the next one, on a ring of N.

    Of P bytes that are summed these are 2 (N - 1)/N P; of P that are gathered,
    (N - 1) P.

    Args:
        spec: what the run was asked for.
        handed: bytes that a worker handed to the collectives.
        steps: number of steps in which it did, the last ones of the run.
    """
    sums = _sums(json.dumps(dataclasses.asdict(dataclasses.replace(spec, seed=0))))
    dense = max(0, sums.dense_steps - (spec.steps - steps))
    summed = min(handed, steps * sums.of_all + dense * sums.of_dense)
    gathered, ring = handed - summed, Ring()
    of_sums = ring.cost_of_sum(summed, spec.workers)
    return of_sums.sent + ring.cost_of_gather(gathered, spec.workers).sent


class _Sums(NamedTuple):
    """What of a step's bytes is summed.

    Attributes:
        of_all: bytes of every step; infinite if nothing is gathered.
        of_dense: further bytes of steps that go dense.
        dense_steps: number of these, at the beginning.
    """

    of_all: float
    of_dense: int = 0
    dense_steps: int = 0


@dataclasses.dataclass(frozen=True)
class _Length:
    """What an optimizer needs to know of a task; without the data."""

    recipe: Recipe
    num_examples: int

    steps_per_epoch = recipe_task.Task.steps_per_epoch


@functools.cache
def _sums(text):
    """Return the `_Sums` of a spec, as JSON.

    Tensors that are sent whole may be in a sum while others are gathered, and steps at
    the beginning of DGC's warm-up may go dense, where that is less on a ring.
    """
    spec = Spec(**json.loads(text))
    if spec.method == "dense":
        return _Sums(math.inf)
    task = registry.make_task(spec, None)
    length = _Length(task.recipe, EXAMPLES.get(spec.task, 0))
    optimizer = registry.make_optimizer(spec, length)
    optimizer.build(task.model().trainable_variables)
    compressor, tensors = optimizer.compressor, optimizer.tensors
    if compressor.aggregation == "sum":
        return _Sums(math.inf)
    chosen, *apart = (
        sum(tensors[i].size * tensors[i].dtype.size for i in places)
        for places in split_uncompressed(tensors, spec.workers)
    )
    return _Sums(sum(apart), chosen, _dense_steps(compressor, tensors, spec.workers))


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
