"""The worker's part of a step: its push, and the weights that it pulls."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import keras_optimizers
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.metrics import counting
from tf_dgc.optimizers import inputs, tensors
from tf_dgc.optimizers import validation as common
from tf_dgc.optimizers.takeover import TakeOver
from tf_dgc.server import handing, pulls, validation
from tf_dgc.server.connection import Connection
from tf_dgc.server.messages import Kind, Status, gist
from tf_dgc.server.tasks import Task
from tf_dgc.steps import pushing
from tf_dgc.steps.base import Inputs
from tf_dgc.steps.memory import Memory, make_memory


def remember(
    optimizer: Any, variables: Sequence[keras.Variable], momentum: float
) -> Memory:
    """Create the variables of what a worker remembers.

    Args:
        optimizer: `ServerOptimizer` that it is for.
        variables: variables of the model.
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
        memory: variables of what this worker remembers.
        took: settings of the inner optimizer that are applied in its place.
        task: task of this process, a worker; None outside of a cluster.

    Attributes:
        variables: variables of the model.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: list[keras.Variable],
        memory: Memory,
        took: TakeOver,
        task: Task | None,
    ):
        self.variables = variables
        self._optimizer, self._memory = optimizer, memory
        self._took, self._task = took, task
        self._connection: Connection | None = None
        self._form: pulls.Form | None = None
        if optimizer.pull == "sparse":
            by = optimizer.compressor, optimizer.num_workers, optimizer.pull_sparsity
            self._form = pulls.form_of(memory.tensors, *by)

    @property
    def bytes_per_pull(self) -> int:
        """Bytes of weights that this worker gets in a step."""
        if self._form:
            return 4 * self._form.num_words
        return 4 * pulls.num_words(self.variables)

    def join(self) -> Connection:
        """Take part, unless this was called before; return the connection.

        Raises:
            RuntimeError: outside of a cluster; and as `Connection`.
        """
        if self._connection is None:
            connection = Connection(validation.check_task(self._task, self._optimizer))
            clock = connection.join(self._handed(), self.variables)
            self._optimizer.iterations.assign(clock)
            self._connection = connection
        return self._connection

    def leave(self) -> None:
        """Take part no longer."""
        if self._connection is not None:
            self._connection.leave()

    def pull(self) -> None:
        """Take the server's weights as they are now.

        Raises:
            RuntimeError: as `join`.
        """
        try:
            _, clock, words = self.join().ask(Kind.PULL)
        except tf.errors.OpError as error:
            raise RuntimeError(gist(str(error.message))) from error
        pulls.assign(self.variables, words)
        self._set_clock(clock)

    def step(self, grads: list, variables: list[keras.Variable]) -> None:
        """Push, wait and pull.

        Args:
            grads: gradients of the variables.
            variables: variables of the model, all of them, in the order of `grads`.
        """
        optimizer = self._optimizer
        pushed = pushing.push(self._inputs(grads, variables))
        status, clock, words = self.join().ask(
            Kind.PUSH, pushed.words, optimizer.iterations.value, self._rate()
        )
        if optimizer.mode == "backup":
            late = tf.equal(status, int(Status.LATE))
            tf.cond(late, lambda: self._put_back(pushed), lambda: False)
        if self._form:
            pulls.take(self._form, self.variables, words)
        else:
            pulls.assign(self.variables, words)
        self._set_clock(clock)
        counting.count_step(
            self._memory.counters,
            entries=pushed.outcome.entries,
            sent_bytes=4 * tf.size(pushed.words, tf.int64),
            dense_bytes=counting.dense_bytes(self.variables),
            nonfinite=pushed.nonfinite,
        )

    def _put_back(self, pushed: pushing.Pushed) -> bool:
        """Keep what was pushed, which came too late."""
        sent, _ = pushed.outcome.decode()
        kept = [r.local() for r in self._memory.residual]
        both = [
            k + tf.cast(tf.reshape(s, k.shape), k.dtype)
            for k, s in zip(kept, sent, strict=True)
        ]
        self._memory.store_residual(both)
        return True

    def _set_clock(self, clock: tf.Tensor) -> None:
        iterations = self._optimizer.iterations
        iterations.assign(tf.cast(clock, iterations.dtype))

    def _inputs(self, grads: list, variables: list[keras.Variable]) -> Inputs:
        """Return what goes into the step, all of it divided by N."""
        optimizer = self._optimizer
        place = inputs.Place(
            optimizer.compressor,
            self._task.worker or 0 if self._task else 0,
            pushing.NUM_WORKERS,
            (optimizer.loss_scale_factor or 1.0) * optimizer.num_workers,
            {},
        )
        where = {id(v): i for i, v in enumerate(variables)}
        grads = [grads[where[id(v)]] for v in self.variables]  # as the server has them
        kept = self._took, self._memory, place
        return inputs.assemble(optimizer, grads, self.variables, *kept)

    def _rate(self) -> tf.Tensor:
        """Return the learning rate to be sent along, NaN for a schedule."""
        rate = keras_optimizers.rate_variable(self._optimizer.inner_optimizer)
        if rate is None:
            return tf.constant(math.nan, tf.float64)
        return tf.cast(rate.value, tf.float64)

    def _handed(self) -> handing.Handed:
        optimizer = self._optimizer
        settings = {
            "mode": optimizer.mode,
            "staleness": optimizer.staleness,
            "quorum": optimizer.quorum,
            "correction": optimizer.correction,
            "correction_strength": optimizer.correction_strength,
            "error_feedback": bool(self._memory.residual),
            "seed": optimizer.seed,
            "pull": optimizer.pull,
            "pull_sparsity": optimizer.pull_sparsity,
        }
        return handing.collect(
            settings,
            optimizer.num_workers,
            optimizer.inner_optimizer,
            optimizer.compressor,
            self.variables,
            [t.exempt for t in self._memory.tensors],
        )
