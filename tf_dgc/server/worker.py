"""The worker's part of a step: its pushes, and the weights that it pulls."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import keras_optimizers
from tf_dgc.choice import add_up
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.inner.taken import TakeOver
from tf_dgc.metrics import counting
from tf_dgc.optimizers import inputs, tensors
from tf_dgc.optimizers import validation as common
from tf_dgc.server import joining, tabular, turns, validation
from tf_dgc.server.links import Link, Pushed
from tf_dgc.server.messages import gist
from tf_dgc.server.sharding import shards
from tf_dgc.server.tasks import Task
from tf_dgc.steps import native, pushing
from tf_dgc.steps.accumulation import entries
from tf_dgc.steps.memory import Memory, make_memory
from tf_dgc.transforms import clipping


def remember(
    optimizer: Any, variables: Sequence[keras.Variable], momentum: float
) -> Memory:
    """Create the variables of what a worker remembers.

    Args:
        optimizer: `ServerOptimizer` that it is for.
        variables: variables of the model of which no rows travel.
        momentum: coefficient of the momentum correction, 0 for none.
    """
    feedback = common.uses_error_feedback(
        optimizer.compressor, optimizer.error_feedback
    )

    def describe(variable: keras.Variable) -> Tensor:
        small = tensors.is_small(variable, optimizer.min_compress_size)
        return tensors.describe(variable, small, feedback, optimizer.num_workers)

    return make_memory(
        [describe(v) for v in variables],
        optimizer.compressor,
        keeps_residual=feedback,
        keeps_velocity=bool(momentum),
        keeps_second_moment=False,
        keeps_largest_moment=False,
        tracks_staleness=False,
    )


class Worker:
    """Takes the steps of a `ServerOptimizer`.

    Args:
        optimizer: optimizer, built.
        variables: variables of the model.
        is_table: whether each is a table, of which rows travel.
        memory: variables of what this worker remembers of those that are none.
        took: settings of the inner optimizer that are applied in its place.
        task: task of this process, a worker; None outside of a cluster.

    Attributes:
        variables: variables of the model.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: list[keras.Variable],
        is_table: Sequence[bool],
        memory: Memory,
        took: TakeOver,
        task: Task | None,
    ):
        self.variables = variables
        self._optimizer, self._memory = optimizer, memory
        self._took, self._task = took, task
        self._is_table, self._joined = is_table, False
        number = len(task.servers) if task else 1
        sizes = [v.value.dtype.size * math.prod(v.shape) for v in variables]
        self._places = shards(sizes, number)
        self._links = [self._link(i, some) for i, some in enumerate(self._places)]
        self._row_bytes = tf.Variable(0, dtype=tf.int64, trainable=False)

    def _link(self, index: int, places: Sequence[int]) -> Link:
        plain = [i for i, table in enumerate(self._is_table) if not table]
        own = [plain.index(i) for i in places if not self._is_table[i]]
        return Link(
            self._optimizer,
            (index, len(self._places)),
            [self.variables[i] for i in places],
            [self._is_table[i] for i in places],
            self._memory.of(own),
        )

    @property
    def bytes_per_pull(self) -> int:
        """Bytes of weights that this worker gets in a step; of rows, in the last."""
        return sum(link.bytes_per_pull for link in self._links) + int(self._row_bytes)

    def join(self) -> None:
        """Take part, unless this was called before.

        Raises:
            RuntimeError: outside of a cluster; if it has left; and as `Connection`.
            ValueError: if the config of the inner optimizer does not state all of it.
        """
        if self._joined:
            if self._links[0].connection.heartbeat.is_over:
                raise RuntimeError(f"{turns.LEFT} Received: {self._optimizer!r}")
            return
        task = validation.check_task(self._task, self._optimizer)
        validation.check_config(self._optimizer.inner_optimizer)
        run = turns.next_run(task)
        for link in self._links:
            link.connect(task, run)
        joining.join(self._links)
        turns.begin(task, run, [link.connection.heartbeat for link in self._links])
        self._set_iterations()
        self._joined = True

    def leave(self) -> None:
        """Take part no longer."""
        for link in self._links:
            link.leave()

    def pull(self) -> None:
        """Take the servers' weights as they are now.

        Raises:
            RuntimeError: as `join`.
        """
        self.join()
        try:
            for link in self._links:
                link.pull()
        except tf.errors.OpError as error:
            raise RuntimeError(gist(str(error.message))) from error
        self._set_iterations()

    def step(self, grads: list, variables: list[keras.Variable]) -> None:
        """Push, wait and pull.

        Args:
            grads: gradients of the variables.
            variables: variables of the model, all of them, in the order of `grads`.
        """
        where = {id(v): i for i, v in enumerate(variables)}
        # As the servers have them.
        grads = [grads[where[id(v)]] for v in self.variables]
        tabular.check_gradients(grads, self.variables, self._is_table)
        pushed, rate = self._push(grads), self._rate()
        # All are asked at once: who waits for one server has pushed to the others.
        pairs = list(zip(self._links, pushed, strict=True))
        replies = [link.ask(message, rate) for link, message in pairs]
        for (link, message), reply in zip(pairs, replies, strict=True):
            link.take(message, reply)
        if any(self._is_table):
            known = sum(link.bytes_per_pull for link in self._links)
            came = add_up([4 * tf.size(r.words, tf.int64) for r in replies])
            self._row_bytes.assign(came - known)
        self._set_iterations()
        self._count(pushed)

    def _push(self, grads: list) -> list[Pushed]:
        """Return what goes to each server, all of it divided by N."""
        optimizer = self._optimizer
        place = inputs.Place(
            optimizer.compressor,
            self._task.worker or 0 if self._task else 0,
            pushing.NUM_WORKERS,
            (optimizer.loss_scale_factor or 1.0) * optimizer.num_workers,
            {},
        )
        given, scales = inputs.clip_for(
            optimizer, grads, self.variables, self._took, place.loss_scale
        )
        if len(self._links) > 1 or any(self._is_table):  # all or none is left out
            natively = native.is_live(self._memory.residual)
            values = list(map(entries, given))
            scales = tf.unstack(clipping.drop(values, scales, natively))
        return [
            link.push(
                [given[i] for i in places],
                [scales[i] for i in places],
                self._took,
                place,
            )
            for link, places in zip(self._links, self._places, strict=True)
        ]

    def _count(self, pushed: Sequence[Pushed]) -> None:
        steps = [p.step for p in pushed if p.step is not None]
        flags = [s.nonfinite for s in steps]
        counting.count_step(
            self._memory.counters,
            entries=add_up(
                [s.outcome.entries for s in steps] + [p.row_entries for p in pushed]
            ),
            sent_bytes=add_up([4 * tf.size(p.words, tf.int64) for p in pushed]),
            dense_bytes=counting.dense_bytes(self.variables),
            nonfinite=tf.reduce_max(tf.stack(flags)) if flags else tf.constant(0),
        )

    def _set_iterations(self) -> None:
        """Make the first server's clock this worker's."""
        iterations, clock = self._optimizer.iterations, self._links[0].connection.clock
        iterations.assign(tf.cast(clock, iterations.dtype))

    def _rate(self) -> tf.Tensor:
        """Return the learning rate to be sent along, NaN for a schedule."""
        rate = keras_optimizers.rate_variable(self._optimizer.inner_optimizer)
        if rate is None:
            return tf.constant(math.nan, tf.float64)
        return tf.cast(rate.value, tf.float64)
