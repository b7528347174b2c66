"""A worker's communication with one server: requests, replies and heartbeats."""

import atexit
import json
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import rpc
from tf_dgc.clipping import Scale
from tf_dgc.conditions import add_counts
from tf_dgc.multiworker import failures, workers
from tf_dgc.optimizers.gradients import StepSettings, create_inputs
from tf_dgc.server import embedding_rows, messages, model_spec, pulls
from tf_dgc.server.messages import MAX_WORDS, REPLY, REQUEST, Kind, Status, add_frame
from tf_dgc.server.model_spec import ModelSpec
from tf_dgc.server.tasks import Task
from tf_dgc.steps import push as steps_push
from tf_dgc.steps.accumulation import Gradient
from tf_dgc.steps.base import WorkerState
from tf_dgc.steps.push import PushedStep

if TYPE_CHECKING:
    from tf_dgc.server.optimizer import ServerOptimizer


class PushedGradients(NamedTuple):
    """A push to one server."""

    words: tf.Tensor  # message, int32 `[w]`
    step: PushedStep | None  # of variables that are no tables; None if all are
    row_entries: int | tf.Tensor  # int or scalar int64


class Reply(NamedTuple):
    """A server's reply to a request."""

    status: tf.Tensor
    clock: tf.Tensor  # the server's clock, scalar int64
    words: tf.Tensor  # body, int32 `[w]`


class ServerClient:
    """Pushes to and pulls from one server, for one `ServerOptimizer`."""

    def __init__(
        self,
        optimizer: "ServerOptimizer",
        shard: tuple[int, int],
        variables: Sequence[keras.Variable],
        is_table: Sequence[bool],
        worker_state: WorkerState,
    ):
        self._optimizer = optimizer
        self._shard = shard
        self._variables = variables
        self._is_table = is_table
        self._worker_state = worker_state
        self._plain, self._tables = split_tables(variables, is_table)
        self._table_specs = list(map(embedding_rows.table_spec, self._tables))
        self._connection: ServerConnection | None = None
        self._run = 0
        self._sparse_pull: pulls.PullLayout | None = None
        if optimizer.pull == "sparse" and self._plain:
            self._sparse_pull = pulls.pull_layout(
                worker_state.tensors,
                optimizer.compressor,
                optimizer.num_workers,
                optimizer.pull_sparsity,
            )

    @property
    def name(self) -> str:
        """Name of the server in errors."""
        return f"server {self._shard[0]}"

    @property
    def bytes_per_pull(self) -> int:
        """Bytes of weights pulled in a step, without tables."""
        return 4 * self._plain_words

    @property
    def _plain_words(self) -> int:
        if self._sparse_pull:
            return self._sparse_pull.num_words
        return pulls.num_words(self._plain)

    @property
    def _seed(self) -> int:
        return self._optimizer.seed + self._shard[0]

    @property
    def connection(self) -> "ServerConnection":
        """Connection to the server; requires `connect`."""
        assert self._connection is not None
        return self._connection

    def connect(self, task: Task, run: int) -> None:
        """Connect to the server, to join a run."""
        self._connection = ServerConnection(task.for_server(self._shard[0]))
        self._run = run

    def join(self) -> tuple[bool, int]:
        """Join the run; see `ServerConnection.join`."""
        # The first step joins while it is traced, when a counter created there has no
        # value in the graph yet.
        with tf.init_scope():
            counters = self._worker_state.counters.numpy()
        steps = int(counters[0]) if counters.size else 0
        return self.connection.join(self._model_spec(), steps)

    def initialize(self) -> None:
        """Send the initial weights."""
        self.connection.initialize(self._variables)

    def start(self) -> bool:
        """Wait for the other workers; see `ServerConnection.start`."""
        return self.connection.start(self._variables)

    def leave(self) -> None:
        """Leave the run, if this worker has joined it."""
        if self._connection is not None:
            self._connection.heartbeat.leave()

    def pull(self) -> None:
        """Set the variables to the server's current weights."""
        reply = self.connection.request(Kind.PULL)
        pulls.assign_words(self._variables, reply.words)
        self.connection.clock.assign(reply.clock)

    def push(
        self,
        gradients: Sequence[Gradient],
        scales: Sequence[Scale],
        settings: StepSettings,
        worker: int,
    ) -> PushedGradients:
        """Compress the gradients of this server's variables and return the push."""
        # All scales are NaN if one gradient is not finite and there are tables or
        # several servers.
        plain, of_tables = split_tables(
            list(zip(gradients, scales, strict=True)), self._is_table
        )
        words, step, entries = [], None, 0
        if of_tables:
            slices, factors = zip(*of_tables, strict=True)
            words.append(embedding_rows.encode_rows(self._table_specs, slices, factors))
            entries = add_counts([tf.size(g.values, tf.int64) for g in slices])
        if plain:
            inputs = create_inputs(
                settings,
                [gradient for gradient, _ in plain],
                [scale for _, scale in plain],
                range(len(plain)),
                self._worker_state,
                compressor=self._optimizer.compressor,
                iteration=self._optimizer.iterations.value,
                worker=worker,
                num_workers=steps_push.NUM_WORKERS,
            )
            clock = tf.identity(self.connection.clock)
            step = steps_push.push(inputs._replace(iteration=clock, seed=self._seed))
            words.append(step.words)
        return PushedGradients(tf.concat(words, axis=0), step, entries)

    def exchange(self, push: PushedGradients, learning_rate: tf.Tensor) -> Reply:
        """Send a push, wait until this worker may continue, and return the pull."""
        clock = self.connection.clock
        return self.connection.request(Kind.PUSH, push.words, clock, learning_rate)

    def apply_reply(self, push: PushedGradients, reply: Reply) -> None:
        """Set the variables from a pull; return a late push to the residual."""
        if self._optimizer.mode == "backup":
            late = tf.equal(reply.status, int(Status.LATE))
            tf.cond(late, lambda: self._return_to_residual(push), lambda: False)
        words = reply.words
        if self._tables:
            embedding_rows.assign_rows(
                self._table_specs, self._tables, words[self._plain_words :]
            )
            words = words[: self._plain_words]
        if self._sparse_pull:
            pulls.assign_sparse(self._sparse_pull, self._plain, words)
        elif self._plain:
            pulls.assign_words(self._plain, words)
        self.connection.clock.assign(reply.clock)

    def _return_to_residual(self, push: PushedGradients) -> bool:
        assert push.step is not None  # mode "backup" allows no tables
        sent, _ = push.step.outcome.decode()
        residual = [r.local() for r in self._worker_state.residual]
        self._worker_state.store_residual(
            [
                r + tf.cast(tf.reshape(s, r.shape), r.dtype)
                for r, s in zip(residual, sent, strict=True)
            ]
        )
        return True

    def _model_spec(self) -> ModelSpec:
        optimizer, tensors = self._optimizer, iter(self._worker_state.tensors)
        correction = optimizer.staleness_correction
        settings = {
            "mode": optimizer.mode,
            "staleness": optimizer.staleness,
            "quorum": optimizer.quorum,
            "correction": correction.rule if correction else None,
            "correction_strength": correction.strength if correction else None,
            "error_feedback": bool(self._worker_state.residual),
            "seed": self._seed,
            "pull": optimizer.pull,
            "pull_sparsity": optimizer.pull_sparsity,
        }
        return model_spec.create_model_spec(
            settings,
            optimizer.num_workers,
            optimizer.inner_optimizer,
            optimizer.compressor,
            self._variables,
            [table or next(tensors).uncompressed for table in self._is_table],
            self._is_table,
            self._shard,
            self._run,
        )


def split_tables(items: Sequence, is_table: Sequence[bool]) -> tuple[list, list]:
    """Return the items of variables that are no tables, and those of tables."""
    pairs = list(zip(items, is_table, strict=True))
    return [i for i, table in pairs if not table], [i for i, table in pairs if table]


_CALL_SECONDS = 10.0  # limit of one call; the server answers within a second or two
_WORDS = tf.TensorSpec([None], tf.int32)


class ServerConnection:
    """Sends requests to the server, eagerly and in functions, one at a time."""

    # A request without a reply is sent again for up to `TF_DGC_TIMEOUT` seconds; the
    # server acts on it once. When run, it raises a `tf.errors.OpError` if it is
    # refused.

    def __init__(self, task: Task):
        failures.show_own_errors_plainly()
        self._task = task
        self._incarnation = secrets.randbits(62)
        self._timeout = workers.timeout_seconds()
        self._client = self._connect()
        self._number = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.clock = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.heartbeat = Heartbeat(self._client, task, self._incarnation)
        head = [tf.TensorSpec([], d) for d in (tf.int32, tf.int64, tf.float64)]
        part = tf.TensorSpec([], tf.int32)
        # Concrete functions: otherwise TensorFlow takes those of several connections
        # for retracing of one, and warns about it.
        self._send = tf.function(
            self._send_message,
            input_signature=[*head, part, part, _WORDS],
            autograph=False,
        ).get_concrete_function()
        self._exchange = tf.function(
            self._exchange_parts, input_signature=[*head, _WORDS], autograph=False
        ).get_concrete_function()

    @property
    def name(self) -> str:
        """Name of this worker in errors."""
        return f"worker {self._task.worker}"

    def _connect(self) -> rpc.Client:
        limit = workers.start_timeout_seconds()
        deadline = time.monotonic() + limit
        name = f"tf_dgc_{self._incarnation:x}"
        seconds = min(_CALL_SECONDS, self._timeout)
        while True:
            try:
                return rpc.Client(self._task.server, name, seconds)
            except tf.errors.OpError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"tf_dgc: {self.name} finds no server at {self._task.server} "
                        f"within {limit:g} s (environment variable "
                        f"{workers.START_TIMEOUT_VARIABLE}). Start one there with "
                        "`tf-dgc serve`. Error of TensorFlow: "
                        f"{error.message.splitlines()[0]}"
                    ) from error
                time.sleep(0.2)

    def join(self, spec: ModelSpec, steps: int) -> tuple[bool, int]:
        """Join the run; return whether the server needs weights, and its clock."""
        self.heartbeat.start()
        text = model_spec.model_spec_text({**spec, "steps": steps})
        reply = self.request(Kind.JOIN, tf.constant(messages.encode_text(text)))
        fields = json.loads(messages.decode_text(reply.words.numpy()))
        return fields["give"], fields["clock"]

    def initialize(self, variables: Sequence[keras.Variable]) -> None:
        """Send the initial weights."""
        self.request(Kind.INITIALIZE, pulls.collect_words(variables))

    def start(self, variables: Sequence[keras.Variable]) -> bool:
        """Wait for the other workers; set variables and `clock` to the server's."""
        # Returns False if the worker that was to send the initial weights is gone, so
        # that this worker must join again.
        reply = self.request(Kind.START)
        if reply.status == Status.REJOIN:
            return False
        pulls.assign_words(variables, reply.words)
        self.clock.assign(reply.clock)
        return True

    def request(
        self,
        kind: Kind,
        body: Any = (),
        step: Any = 0,
        learning_rate: Any = float("nan"),
    ) -> Reply:
        """Send a request with int32 words `[w]` and wait for its reply."""
        # `step` is the server's clock as last seen, `learning_rate` NaN for a schedule.
        body = tf.convert_to_tensor(body, tf.int32)
        step = tf.cast(step, tf.int64)
        learning_rate = tf.cast(learning_rate, tf.float64)
        kind = tf.constant(int(kind))
        return Reply(*self._exchange(kind, step, learning_rate, body))

    def _exchange_parts(
        self,
        kind: tf.Tensor,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
        body: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        parts = tf.maximum(1, -(-tf.size(body) // MAX_WORDS))

        def send_part(part: tf.Tensor) -> ReplyMessage:
            words = body[part * MAX_WORDS : (part + 1) * MAX_WORDS]
            return ReplyMessage(
                *self._send(kind, step, learning_rate, part, parts, words)
            )

        def send_and_advance(part: tf.Tensor) -> list[tf.Tensor]:
            with tf.control_dependencies([send_part(part).status]):
                return [part + 1]

        def poll(*_: tf.Tensor) -> ReplyMessage:
            poll_kind = tf.constant(int(Kind.POLL))
            return ReplyMessage(
                *self._send(poll_kind, step, learning_rate, 0, 1, body[:0])
            )

        (last,) = _while_loop(
            lambda part: part + 1 < parts, send_and_advance, [tf.constant(0)]
        )
        first = ReplyMessage(
            *_while_loop(
                lambda status, *_: tf.equal(status, int(Status.WAIT)),
                poll,
                send_part(last),
            )
        )
        return first.status, first.clock, self._fetch_parts(first, step, learning_rate)

    def _fetch_parts(
        self, first: "ReplyMessage", step: tf.Tensor, learning_rate: tf.Tensor
    ) -> tf.Tensor:
        bodies = tf.TensorArray(
            tf.int32, first.parts, infer_shape=False, element_shape=[None]
        ).write(0, first.body)
        kind, empty = tf.constant(int(Kind.NEXT_PART)), first.body[:0]

        def fetch(part: tf.Tensor, bodies: tf.TensorArray) -> tuple:
            reply = ReplyMessage(
                *self._send(kind, step, learning_rate, part, first.parts, empty)
            )
            return part + 1, bodies.write(part, reply.body)

        _, bodies = tf.while_loop(
            lambda part, _: part < first.parts,
            fetch,
            [tf.constant(1), bodies],
            parallel_iterations=1,
        )
        return bodies.concat()

    def _send_message(
        self,
        kind: tf.Tensor,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
        part: tf.Tensor,
        parts: tf.Tensor,
        body: tf.Tensor,
    ) -> "ReplyMessage":
        """Send one message, repeatedly until its reply arrives."""
        number = self._number.assign_add(1)
        worker = int(self._task.worker or 0)
        words = frame_request(
            RequestMessage(kind, step, learning_rate, part, parts),
            body,
            number,
            worker,
            self._incarnation,
        )

        def call(elapsed: tf.Tensor, *_: Any) -> tuple:
            begin = tf.timestamp()
            with tf.control_dependencies([begin]):
                _, error, reply_words = self._client.call(worker, words)
            is_reply, reply = parse_reply(reply_words, number, self._incarnation)
            with tf.control_dependencies([is_reply]):
                seconds = tf.timestamp() - begin
            # Bounded, since the wall clock may be set meanwhile.
            elapsed += tf.clip_by_value(seconds, 0.0, 2 * _CALL_SECONDS)
            return elapsed, is_reply, error, *reply

        no_reply = ReplyMessage(0, np.int64(0), 0, np.zeros([0], np.int32))
        _, is_reply, error, *fields = _while_loop(
            lambda elapsed, is_reply, *_: ~is_reply & (elapsed < self._timeout),
            call,
            [tf.constant(0.0, tf.float64), False, "", *no_reply],
        )
        reply = ReplyMessage(*fields)
        no_server = tf.strings.join(
            [
                f"tf_dgc: {self.name} does not reach the server "
                f"({self._task.server}): it was killed, stopped or disconnected, or "
                "its replies are invalid, for example because it runs another version "
                "of tf_dgc. Error of TensorFlow: ",
                error,
            ]
        )
        refused = tf.equal(reply.status, int(Status.REFUSED))
        message = tf.cond(
            is_reply & refused,
            lambda: tf.strings.join(["tf_dgc: ", reply_text(reply.body)]),
            lambda: no_server,
        )
        succeeded = is_reply & ~refused
        check = tf.raw_ops.Assert(condition=succeeded, data=[message], summarize=1)
        with tf.control_dependencies([check]):
            return ReplyMessage(*map(tf.identity, reply))


def _while_loop(condition: Any, body: Any, initial: Sequence[Any]) -> list[tf.Tensor]:
    """Run a loop, one iteration at a time, over vectors of variable length."""
    values = list(map(tf.convert_to_tensor, initial))
    shapes = [tf.TensorShape([None] * value.shape.rank) for value in values]
    return tf.while_loop(
        condition, body, values, shape_invariants=shapes, parallel_iterations=1
    )


_BEATS_PER_LEASE = 5
_SEND_SECONDS = 2.0
_BUSY = 0.05  # share of a processor above which a process counts as computing


class Heartbeat:
    """Tells the server periodically that this process lives, and computes."""

    # At the process's exit it leaves the run, with the error that ends the process.

    def __init__(self, client: rpc.Client, task: Task, incarnation: int):
        self._client, self._incarnation = client, incarnation
        self._worker = int(task.worker or 0)
        self._slot = task.num_workers + self._worker
        self._interval = workers.heartbeat_timeout_seconds() / _BEATS_PER_LEASE
        self._number = 0
        self._stopped = threading.Event()
        self._earlier_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start sending, unless already started."""
        if self._thread.ident is not None:
            return
        self._earlier_error = _last_error()
        atexit.register(self._exit)
        self._thread.start()

    def leave(self, error: str = "") -> None:
        """Leave the run, once, with the error that ends the process if any."""
        if self._thread.ident is None or self.is_stopped:
            return
        self.stop()
        self._send(Kind.LEAVE, messages.encode_text(error))

    def stop(self) -> None:
        """Stop sending, without leaving the run."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_SEND_SECONDS)
        atexit.unregister(self._exit)

    @property
    def is_stopped(self) -> bool:
        """Whether `leave` or `stop` was called."""
        return self._stopped.is_set()

    def _exit(self) -> None:
        """Leave, with the error that ends the process if one does."""
        error, text = _last_error(), ""
        # An interactive interpreter shows errors and does not end.
        interactive = hasattr(sys, "ps1") or sys.flags.interactive
        if error is not None and error is not self._earlier_error and not interactive:
            summary = messages.extract_message(str(error))[:300]
            text = f"{type(error).__name__}: {summary}"
        self.leave(text)

    def _run(self) -> None:
        used = time.process_time()
        while not self._stopped.wait(self._interval):
            before, used = used, time.process_time()
            is_busy = used - before > _BUSY * self._interval
            self._send(Kind.HEARTBEAT, np.array([is_busy], np.int32))

    def _send(self, kind: Kind, body: np.ndarray) -> None:
        """Send a message; ignore errors, such as a server that is gone."""
        self._number += 1
        words = add_frame(
            REQUEST,
            body,
            secret=messages.secret_words(),
            kind=kind,
            worker=self._worker,
            incarnation=self._incarnation,
            number=self._number,
            parts=1,
        )
        self._client.call(self._slot, tf.constant(words), _SEND_SECONDS)


def _last_error() -> BaseException | None:
    return getattr(sys, "last_value", None)


# Requests and replies of `messages.py`, with TensorFlow operations.

_HEAD_WORDS = REPLY.itemsize // 4


class RequestMessage(NamedTuple):
    """Fields of a request's head that differ between messages."""

    kind: tf.Tensor  # kind, scalar int32
    step: tf.Tensor  # the server's clock as this worker last saw it, scalar int64
    learning_rate: tf.Tensor  # learning rate, scalar float64, NaN for a schedule
    part: tf.Tensor  # index of this part of the body, scalar int32
    parts: tf.Tensor  # number of parts of the body, scalar int32


class ReplyMessage(NamedTuple):
    """One part of a reply."""

    status: tf.Tensor  # status, scalar int32
    clock: tf.Tensor  # number of updates applied to the weights, scalar int64
    parts: tf.Tensor  # number of parts of the whole body, scalar int32
    body: tf.Tensor  # words of this part, int32 `[w]`


def frame_request(
    request: RequestMessage,
    body: tf.Tensor,
    number: tf.Tensor,
    worker: int,
    incarnation: int,
) -> tf.Tensor:
    """Return a request as words, int32 `[w]`."""
    template = messages.add_frame(
        REQUEST,
        np.zeros([0], np.int32),
        secret=messages.secret_words(),
        worker=worker,
        incarnation=incarnation,
    )
    head = tf.unstack(tf.constant(template))
    fields = {
        "kind": request.kind,
        "number": number,
        "step": request.step,
        "rate": request.learning_rate,
        "part": request.part,
        "parts": request.parts,
        "length": tf.size(body),
        "checksum": tf.constant(0),
    }
    for name, value in fields.items():
        flat = tf.reshape(tf.bitcast(value, tf.int32), [-1])
        words = tf.unstack(flat, num=REQUEST[name].itemsize // 4)
        offset = _offset(REQUEST, name)
        head[offset : offset + len(words)] = words
    words = tf.concat([tf.stack(head), body], axis=0)
    return tf.tensor_scatter_nd_update(words, [[len(head) - 1]], [_checksum(words)])


def parse_reply(
    words: tf.Tensor, number: tf.Tensor, incarnation: int
) -> tuple[tf.Tensor, ReplyMessage]:
    """Return whether words are an intact reply to a request, and the reply."""
    length = tf.size(words)
    words = tf.pad(words, [[0, tf.maximum(_HEAD_WORDS - length, 0)]])
    head, body = words[:_HEAD_WORDS], words[_HEAD_WORDS:]
    magic = int(messages.add_frame(REPLY, np.zeros([0], np.int32))[0])
    unsigned = tf.tensor_scatter_nd_update(words, [[_HEAD_WORDS - 1]], [0])
    is_reply = tf.reduce_all(
        [
            tf.equal(head[0], magic),
            tf.equal(_field(head, "length"), length - _HEAD_WORDS),
            tf.equal(_field(head, "checksum"), _checksum(unsigned)),
            tf.equal(_field(head, "incarnation"), incarnation),
            tf.equal(_field(head, "number"), number),
        ]
    )
    return is_reply, ReplyMessage(
        _field(head, "status"), _field(head, "clock"), _field(head, "parts"), body
    )


def reply_text(body: tf.Tensor) -> tf.Tensor:
    """Return the text that `messages.encode_text` encoded, a scalar string."""
    letters = tf.reshape(tf.bitcast(body, tf.uint8), [-1])
    text = tf.strings.unicode_encode(tf.cast(letters, tf.int32), "UTF-8")
    return tf.strings.strip(text)


def _checksum(words: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(words * (2 * tf.range(tf.size(words)) + 1))


def _field(head: tf.Tensor, name: str) -> tf.Tensor:
    dtype = tf.as_dtype(REPLY[name])
    offset, width = _offset(REPLY, name), dtype.size // 4
    words = head[offset : offset + width]
    return tf.bitcast(words if width > 1 else words[0], dtype)


def _offset(form: np.dtype, name: str) -> int:
    assert form.fields is not None
    return form.fields[name][1] // 4
