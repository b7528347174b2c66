"""A worker's steps: push gradients to all servers, wait, and pull weights."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from tf_dgc import clipping, metrics
from tf_dgc._internals import keras_optimizers
from tf_dgc.conditions import add_counts
from tf_dgc.optimizers import gradients
from tf_dgc.optimizers.gradients import StepSettings
from tf_dgc.optimizers.inner_hyperparameters import InnerHyperparameters
from tf_dgc.optimizers.validation import uses_error_feedback
from tf_dgc.server import embedding_tables, validation
from tf_dgc.server.client import Heartbeat, PushedGradients, ServerClient
from tf_dgc.server.messages import extract_message
from tf_dgc.server.tasks import Task
from tf_dgc.steps import native
from tf_dgc.steps.accumulation import gradient_values
from tf_dgc.steps.base import WorkerState

if TYPE_CHECKING:
    from tf_dgc.server.optimizer import ServerOptimizer


class ServerWorker:
    """Takes the steps of a built `ServerOptimizer`; no `task` outside of a cluster."""

    def __init__(
        self,
        optimizer: "ServerOptimizer",
        variables: list[keras.Variable],
        is_table: Sequence[bool],
        worker_state: WorkerState,
        hyperparameters: InnerHyperparameters,
        task: Task | None,
    ):
        self.variables = variables
        self._optimizer = optimizer
        self._worker_state = worker_state
        self._settings = StepSettings(
            hyperparameters=hyperparameters,
            error_feedback=uses_error_feedback(
                optimizer.compressor, optimizer.error_feedback
            ),
            factor_masking=optimizer.corrections.factor_masking,
            seed=optimizer.seed,
        )
        self._task = task
        self._is_table = is_table
        self._joined = False
        self._row_bytes = tf.Variable(0, dtype=tf.int64, trainable=False)
        sizes = [v.value.dtype.size * math.prod(v.shape) for v in variables]
        num_servers = len(task.servers) if task else 1
        self._shards = split_into_shards(sizes, num_servers)
        plain = [i for i, table in enumerate(is_table) if not table]
        self._clients = [
            ServerClient(
                optimizer,
                (server, num_servers),
                [variables[i] for i in shard],
                [is_table[i] for i in shard],
                worker_state.of([plain.index(i) for i in shard if not is_table[i]]),
            )
            for server, shard in enumerate(self._shards)
        ]

    @property
    def bytes_per_pull(self) -> int:
        """Bytes of weights pulled in a step; of rows, in the last step."""
        return sum(c.bytes_per_pull for c in self._clients) + int(self._row_bytes)

    def join(self) -> None:
        """Join the run, unless this worker has joined already; raise if it cannot."""
        if self._joined:
            if self._clients[0].connection.heartbeat.is_stopped:
                raise RuntimeError(f"{LEFT_RUN} Received: {self._optimizer!r}")
            return
        task = validation.check_task(self._task, self._optimizer)
        validation.check_config(self._optimizer.inner_optimizer)
        run = _current_runs[task][0] + 1 if task in _current_runs else 0
        for client in self._clients:
            client.connect(task, run)
        join_servers(self._clients)
        begin_run(task, run, [c.connection.heartbeat for c in self._clients])
        self._set_iterations()
        self._joined = True

    def leave(self) -> None:
        """Leave the run."""
        for client in self._clients:
            client.leave()

    def pull(self) -> None:
        """Set the variables to the servers' current weights."""
        self.join()
        try:
            for client in self._clients:
                client.pull()
        except tf.errors.OpError as error:
            raise RuntimeError(extract_message(str(error.message))) from error
        self._set_iterations()

    def step(self, grads: list, variables: list[keras.Variable]) -> None:
        """Push the gradients, wait, and pull the weights."""
        index_of = {id(v): i for i, v in enumerate(variables)}
        grads = [grads[index_of[id(v)]] for v in self.variables]
        embedding_tables.check_table_gradients(grads, self.variables, self._is_table)
        pushes, rate = self._push(grads), self._learning_rate()
        # All pushes are sent before any reply is used: no server waits for another.
        pairs = list(zip(self._clients, pushes, strict=True))
        replies = [client.exchange(message, rate) for client, message in pairs]
        for (client, message), reply in zip(pairs, replies, strict=True):
            client.apply_reply(message, reply)
        if any(self._is_table):
            pulled = add_counts([4 * tf.size(r.words, tf.int64) for r in replies])
            self._row_bytes.assign(
                pulled - sum(client.bytes_per_pull for client in self._clients)
            )
        self._set_iterations()
        self._count(pushes)

    def _push(self, grads: list) -> list[PushedGradients]:
        optimizer = self._optimizer
        clipped, scales = gradients.clip_gradients(
            self._settings,
            grads,
            self.variables,
            optimizer.num_workers,
            (optimizer.loss_scale_factor or 1.0) * optimizer.num_workers,
        )
        if len(self._clients) > 1 or any(self._is_table):
            # All servers and tables leave out a gradient that is not finite, or none.
            use_native = native.is_available(self._worker_state.residual)
            values = list(map(gradient_values, clipped))
            scales = tf.unstack(clipping.scales_or_nan(values, scales, use_native))
        return [
            client.push(
                [clipped[i] for i in shard],
                [scales[i] for i in shard],
                self._settings,
                (self._task.worker or 0) if self._task else 0,
            )
            for client, shard in zip(self._clients, self._shards, strict=True)
        ]

    def _count(self, pushes: Sequence[PushedGradients]) -> None:
        steps = [p.step for p in pushes if p.step is not None]
        flags = [s.nonfinite for s in steps]
        metrics.count_step(
            self._worker_state.counters,
            entries=add_counts(
                [s.outcome.entries for s in steps] + [p.row_entries for p in pushes]
            ),
            sent_bytes=add_counts([4 * tf.size(p.words, tf.int64) for p in pushes]),
            dense_bytes=metrics.dense_bytes(self.variables),
            nonfinite=tf.reduce_max(tf.stack(flags)) if flags else tf.constant(0),
        )

    def _set_iterations(self) -> None:
        iterations = self._optimizer.iterations
        clock = self._clients[0].connection.clock
        iterations.assign(tf.cast(clock, iterations.dtype))

    def _learning_rate(self) -> tf.Tensor:
        rate = keras_optimizers.rate_variable(self._optimizer.inner_optimizer)
        if rate is None:
            return tf.constant(math.nan, tf.float64)
        return tf.cast(rate.value, tf.float64)


def split_into_shards(sizes: Sequence[int], num_servers: int) -> list[list[int]]:
    """Return each server's variables, ascending and equal on all workers, by bytes."""
    # Assigns the largest first, each to the server with the least bytes: no server
    # holds more than the mean plus one variable.
    loads = [0] * num_servers
    shards: list[list[int]] = [[] for _ in range(num_servers)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        smallest = loads.index(min(loads))
        loads[smallest] += max(1, sizes[index])
        shards[smallest].append(index)
    return [sorted(shard) for shard in shards]


def join_servers(clients: Sequence[ServerClient]) -> None:
    """Join all servers and set the variables to their weights."""
    # The first server chooses the worker that sends the initial weights. That worker
    # sends them to the first server last, so that all servers hold weights of the same
    # worker, and a worker that may start on the first server can start on all.
    try:
        _join(*clients)
    except (RuntimeError, tf.errors.OpError) as error:
        for client in clients:
            client.leave()
        text = getattr(error, "message", error)
        raise RuntimeError(extract_message(str(text))) from error


def _join(first: ServerClient, *others: ServerClient) -> None:
    while True:
        initializes, _ = first.join()
        if initializes:
            for client in others:
                _initialize(client, first)
            first.initialize()
        if first.start():
            break
    for client in others:
        if not initializes:
            needs_weights, _ = client.join()
            if needs_weights:
                raise RuntimeError(_missing_checkpoint(client, first))
        client.start()


def _initialize(client: ServerClient, first: ServerClient) -> None:
    needs_weights, clock = client.join()
    if needs_weights:
        client.initialize()
    elif clock:  # with 0 a worker that is gone sent the initial weights
        raise RuntimeError(_missing_checkpoint(first, client))


def _missing_checkpoint(fresh: ServerClient, resumed: ServerClient) -> str:
    return (
        f"tf_dgc: {fresh.name} starts anew, but {resumed.name} resumes from a "
        "checkpoint. Restore the missing file in TF_DGC_SERVER_DIR, or remove the "
        "files of all servers."
    )


LEFT_RUN = (
    "This `ServerOptimizer` no longer takes part: another one in the same process has "
    "begun to train, or `leave` was called. One optimizer per process trains at a "
    "time. To train this model further, compile it with a new one; for a model with "
    "several optimizers, such as a GAN, use `DGCOptimizer`, without a server."
)
"""Error for an optimizer whose run is over."""

_current_runs: dict[Task, tuple[int, Sequence[Heartbeat]]] = {}


def begin_run(task: Task, run: int, heartbeats: Sequence[Heartbeat]) -> None:
    """Record that an optimizer joined a run; end the previous run's heartbeats."""
    _, previous = _current_runs.get(task, (0, ()))
    for heartbeat in previous:
        heartbeat.stop()
    _current_runs[task] = run, heartbeats
