"""The worker's part of a step: its pushes, and the weights that it pulls."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import clipping, metrics
from tf_dgc._internals import keras_optimizers
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.optimizers import state, step_inputs
from tf_dgc.optimizers import validation as common
from tf_dgc.optimizers.inner_hyperparameters import InnerHyperparameters
from tf_dgc.server import embedding_tables, validation
from tf_dgc.server.client import Heartbeat, PushedGradients, ServerClient
from tf_dgc.server.messages import gist
from tf_dgc.server.tasks import Task
from tf_dgc.smart_cond import add_counts
from tf_dgc.steps import native
from tf_dgc.steps.accumulation import gradient_values
from tf_dgc.steps.state import WorkerState, create_worker_state

# --- Joining: how a worker comes to take part with all servers, and with what weights.


def join_servers(links: Sequence[ServerClient]) -> None:
    """Take part with all servers, and set the variables to their weights.

    The first server says which worker gives first weights, to all of them and to it
    last: so that all are of one worker, and who is let in there finds them everywhere.

    Args:
        links: links to all servers, connected.

    Raises:
        RuntimeError: if one refuses this worker, or does not respond, or if not all go
            on from a checkpoint.
    """
    try:
        _join(*links)
    except (RuntimeError, tf.errors.OpError) as error:
        for link in links:
            link.leave()
        text = getattr(error, "message", error)
        raise RuntimeError(gist(str(text))) from error


def _join(first: ServerClient, *others: ServerClient) -> None:
    while True:
        gives, _ = first.enter()
        if gives:
            for link in others:
                _give(link, first)
            first.give()
        if first.start():
            break
    for link in others:
        if not gives:
            asks, _ = link.enter()
            if asks:
                raise RuntimeError(_without_checkpoint(link, first))
        link.start()


def _give(link: ServerClient, first: ServerClient) -> None:
    asks, clock = link.enter()
    if asks:
        link.give()
    elif clock:  # if it is 0, who gave them is gone
        raise RuntimeError(_without_checkpoint(first, link))


def _without_checkpoint(anew: ServerClient, goes_on: ServerClient) -> str:
    return (
        f"tf_dgc: {anew.name} begins anew, where {goes_on.name} goes "
        "on from a checkpoint: put back the file that is missing in TF_DGC_SERVER_DIR, "
        "or remove those of all servers."
    )


# --- Shards: which server keeps which variables.


def split_into_shards(sizes: Sequence[int], number: int) -> list[list[int]]:
    """Return the indices of each server's variables, ascending; the same everywhere.

    The largest variable first, each goes whole to the server that has least by then.
    So no server has more than the mean and one variable; one that is larger than the
    mean makes its server's load.

    Args:
        sizes: bytes of each variable, as many variables as servers or more.
        number: number of servers.
    """
    loads, found = [0] * number, [[] for _ in range(number)]  # type: ignore[var-annotated]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        loads[least] += max(1, sizes[index])
        found[least].append(index)
    return [sorted(indices) for indices in found]


# --- Turns: optimizers of one process take part one after the other, each in a run.

LEFT_RUN = (
    "This `ServerOptimizer` takes part no longer: another one of the same process has "
    "begun to train, or `leave` was called. Of a process one trains at a time: to "
    "train this model on, compile it with a new one; for a model with several "
    "optimizers, as a GAN, use `DGCOptimizer`, without a server."
)
"""What is said to an optimizer whose run is over."""

_last: dict[Task, tuple[int, Sequence[Heartbeat]]] = {}


def next_run(task: Task) -> int:
    """Return the number of the run of the optimizer that takes part next, from 0.

    Args:
        task: task of this process, a worker.
    """
    return _last[task][0] + 1 if task in _last else 0


def begin_run(task: Task, run: int, heartbeats: Sequence[Heartbeat]) -> None:
    """Note that an optimizer has joined, by which servers know that the last one left.

    Args:
        task: task of this process, a worker.
        run: number of its run.
        heartbeats: its signs of life, to each server.
    """
    _, before = _last.get(task, (0, ()))
    for heartbeat in before:
        heartbeat.stop()
    _last[task] = run, heartbeats


def create_worker_memory(
    optimizer: Any, variables: Sequence[keras.Variable], momentum: float
) -> WorkerState:
    """Create the variables of what a worker remembers.

    Args:
        optimizer: `ServerOptimizer` that it is for.
        variables: variables of the model of which no rows travel.
        momentum: coefficient of the momentum correction, 0 for none.
    """
    feedback = common.uses_error_feedback(
        optimizer.compressor, optimizer.error_feedback
    )

    def describe(variable: keras.Variable) -> TensorSpec:
        small = state.is_small(variable, optimizer.min_compress_size)
        return state.tensor_spec(variable, small, feedback, optimizer.num_workers)

    return create_worker_state(
        [describe(v) for v in variables],
        optimizer.compressor,
        keeps_residual=feedback,
        keeps_velocity=bool(momentum),
        keeps_second_moment=False,
        keeps_largest_moment=False,
        tracks_staleness=False,
    )


class ServerWorker:
    """Takes the steps of a `ServerOptimizer`.

    Args:
        optimizer: optimizer, built.
        variables: variables of the model.
        is_table: whether each is a table, of which rows travel.
        worker_state: variables of what this worker remembers of those that are none.
        hyperparameters: settings of the inner optimizer that are applied in its place.
        task: task of this process, a worker; None outside of a cluster.

    Attributes:
        variables: variables of the model.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: list[keras.Variable],
        is_table: Sequence[bool],
        worker_state: WorkerState,
        hyperparameters: InnerHyperparameters,
        task: Task | None,
    ):
        self.variables = variables
        self._optimizer, self._worker_state = optimizer, worker_state
        self._task = task
        self._settings = state.StepSettings(
            hyperparameters=hyperparameters,
            error_feedback=common.uses_error_feedback(
                optimizer.compressor, optimizer.error_feedback
            ),
            factor_masking=optimizer.factor_masking,
            seed=optimizer.seed,
        )
        self._is_table, self._joined = is_table, False
        number = len(task.servers) if task else 1
        sizes = [v.value.dtype.size * math.prod(v.shape) for v in variables]
        self._places = split_into_shards(sizes, number)
        self._links = [self._link(i, some) for i, some in enumerate(self._places)]
        self._row_bytes = tf.Variable(0, dtype=tf.int64, trainable=False)

    def _link(self, index: int, places: Sequence[int]) -> ServerClient:
        plain = [i for i, table in enumerate(self._is_table) if not table]
        own = [plain.index(i) for i in places if not self._is_table[i]]
        return ServerClient(
            self._optimizer,
            (index, len(self._places)),
            [self.variables[i] for i in places],
            [self._is_table[i] for i in places],
            self._worker_state.of(own),
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
                raise RuntimeError(f"{LEFT_RUN} Received: {self._optimizer!r}")
            return
        task = validation.check_task(self._task, self._optimizer)
        validation.check_config(self._optimizer.inner_optimizer)
        run = next_run(task)
        for link in self._links:
            link.connect(task, run)
        join_servers(self._links)
        begin_run(task, run, [link.connection.heartbeat for link in self._links])
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
        embedding_tables.check_table_gradients(grads, self.variables, self._is_table)
        pushed, rate = self._push(grads), self._rate()
        # All are asked at once: who waits for one server has pushed to the others.
        pairs = list(zip(self._links, pushed, strict=True))
        replies = [link.ask(message, rate) for link, message in pairs]
        for (link, message), reply in zip(pairs, replies, strict=True):
            link.take(message, reply)
        if any(self._is_table):
            known = sum(link.bytes_per_pull for link in self._links)
            came = add_counts([4 * tf.size(r.words, tf.int64) for r in replies])
            self._row_bytes.assign(came - known)
        self._set_iterations()
        self._count(pushed)

    def _push(self, grads: list) -> list[PushedGradients]:
        """Return what goes to each server, all of it divided by N."""
        optimizer = self._optimizer
        given, scales = step_inputs.clip_gradients(
            self._settings,
            grads,
            self.variables,
            optimizer.num_workers,
            (optimizer.loss_scale_factor or 1.0) * optimizer.num_workers,
        )
        if len(self._links) > 1 or any(self._is_table):  # all or none is left out
            use_native = native.is_available(self._worker_state.residual)
            values = list(map(gradient_values, given))
            scales = tf.unstack(clipping.scales_or_nan(values, scales, use_native))
        return [
            link.push(
                [given[i] for i in places],
                [scales[i] for i in places],
                self._settings,
                self._task.worker or 0 if self._task else 0,
            )
            for link, places in zip(self._links, self._places, strict=True)
        ]

    def _count(self, pushed: Sequence[PushedGradients]) -> None:
        steps = [p.step for p in pushed if p.step is not None]
        flags = [s.nonfinite for s in steps]
        metrics.count_step(
            self._worker_state.counters,
            entries=add_counts(
                [s.outcome.entries for s in steps] + [p.row_entries for p in pushed]
            ),
            sent_bytes=add_counts([4 * tf.size(p.words, tf.int64) for p in pushed]),
            dense_bytes=metrics.dense_bytes(self.variables),
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
