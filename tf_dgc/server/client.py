"""Links: what a worker has to do with one of the servers."""

import atexit
import json
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import rpc
from tf_dgc.clipping import Scale
from tf_dgc.multiworker import failures, workers
from tf_dgc.optimizers import step_inputs
from tf_dgc.optimizers.state import StepSettings
from tf_dgc.server import embedding_rows, messages, model_spec, pulls
from tf_dgc.server.messages import MAX_WORDS, REPLY, REQUEST, Kind, Status, add_frame
from tf_dgc.server.pulls import assign_entries, collect_entries
from tf_dgc.server.tasks import Task
from tf_dgc.smart_cond import add_counts
from tf_dgc.steps import push as steps_push
from tf_dgc.steps.accumulation import Gradient
from tf_dgc.steps.push import PushedStep
from tf_dgc.steps.state import WorkerState

# --- Signs of life of a worker, from a thread; and its good-bye.

_BEATS_PER_LEASE = 5
_LAST_SECONDS = 2.0
_WORKS = 0.05  # share of a processor, above which a process computes something


class Heartbeat:
    """Tells the server from time to time that this process lives.

    And whether it computes something, as while it traces or evaluates. At the end of
    the process it says good-bye, with the error that ends it, if one does. Before it
    has begun there is nobody to say that to.

    Args:
        client: client of the server.
        task: task of this process, a worker.
        incarnation: number of this process.
    """

    def __init__(self, client: rpc.Client, task: Task, incarnation: int):
        self._client, self._incarnation = client, incarnation
        self._worker = int(task.worker or 0)
        self._slot = task.num_workers + self._worker
        self._every = workers.heartbeat_timeout_seconds() / _BEATS_PER_LEASE
        self._number = 0
        self._left = threading.Event()
        self._shown: BaseException | None = None  # before it began
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin, once."""
        if self._thread.ident is not None:
            return
        self._shown = _error_shown()
        atexit.register(self._exit)
        self._thread.start()

    def leave(self, said: str = "") -> None:
        """Say good-bye, once.

        Args:
            said: error that ends the process; empty for none.
        """
        if self._thread.ident is None or self._left.is_set():
            return
        self.stop()
        self._say(Kind.LEAVE, messages.to_body(said))

    def stop(self) -> None:
        """End without a good-bye, as the server knows."""
        self._left.set()
        if self._thread.ident is not None:
            self._thread.join(_LAST_SECONDS)
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        """Leave, by the error that ends the process, if one does.

        Where somebody types, errors are shown and ended with nothing.
        """
        error, said = _error_shown(), ""
        typed = hasattr(sys, "ps1") or sys.flags.interactive
        if error is not None and error is not self._shown and not typed:
            said = f"{type(error).__name__}: {messages.gist(str(error))[:300]}"
        self.leave(said)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._left.is_set()

    def _run(self) -> None:
        used = time.process_time()
        while not self._left.wait(self._every):
            before, used = used, time.process_time()
            works = used - before > _WORKS * self._every
            self._say(Kind.BEAT, np.array([works], np.int32))

    def _say(self, kind: Kind, body: np.ndarray) -> None:
        """Say something, if the server is there."""
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
        self._client.call(self._slot, tf.constant(words), _LAST_SECONDS)


def _error_shown() -> BaseException | None:
    """Return the error that the interpreter showed last, by which a program ends."""
    return getattr(sys, "last_value", None)


# --- Sealing: requests and replies of `messages.py` by TensorFlow operations.

_SIZE = REPLY.itemsize // 4


class RequestMessage(NamedTuple):
    """What a request is, but for its number and body.

    Attributes:
        kind: kind of it, scalar int32.
        step: server's clock as it was seen last, scalar int64.
        rate: learning rate, scalar float64, NaN for a schedule.
        part: number of this part of the body, scalar int32.
        parts: number of its parts, scalar int32.
    """

    kind: tf.Tensor
    step: tf.Tensor
    rate: tf.Tensor
    part: tf.Tensor
    parts: tf.Tensor


class ReplyMessage(NamedTuple):
    """What a reply says.

    Attributes:
        status: status, scalar int32.
        clock: number of updates that the weights have had, scalar int64.
        parts: number of parts of the whole body, scalar int32.
        body: words of this part, int32 `[w]`.
    """

    status: tf.Tensor
    clock: tf.Tensor
    parts: tf.Tensor
    body: tf.Tensor


def frame_request(
    asked: RequestMessage,
    body: tf.Tensor,
    number: tf.Tensor,
    worker: int,
    incarnation: int,
) -> tf.Tensor:
    """Return a request, int32 `[w]`.

    Args:
        asked: contents of the head.
        body: words, int32 `[w]`.
        number: number of the request, scalar int64.
        worker: index of this worker.
        incarnation: number of this process.
    """
    empty = messages.add_frame(
        REQUEST,
        np.zeros([0], np.int32),
        secret=messages.secret_words(),
        worker=worker,
        incarnation=incarnation,
    )
    head = tf.unstack(tf.constant(empty))
    changed = {
        "kind": asked.kind,
        "number": number,
        "step": asked.step,
        "rate": asked.rate,
        "part": asked.part,
        "parts": asked.parts,
        "length": tf.size(body),
        "checksum": tf.constant(0),
    }
    for name, value in changed.items():
        flat = tf.reshape(tf.bitcast(value, tf.int32), [-1])
        words = tf.unstack(flat, num=REQUEST[name].itemsize // 4)
        at = _offset(REQUEST, name)
        head[at : at + len(words)] = words
    words = tf.concat([tf.stack(head), body], axis=0)
    return tf.tensor_scatter_nd_update(words, [[len(head) - 1]], [_checksum(words)])


def parse_reply(
    words: tf.Tensor, number: tf.Tensor, incarnation: int
) -> tuple[tf.Tensor, ReplyMessage]:
    """Return whether this is the reply to a request, and what it says.

    Args:
        words: reply, int32 `[w]`; of any length, if it is damaged.
        number: number of the request, scalar int64.
        incarnation: number of this process.
    """
    length = tf.size(words)
    words = tf.pad(words, [[0, tf.maximum(_SIZE - length, 0)]])
    head, body = words[:_SIZE], words[_SIZE:]
    empty = messages.add_frame(REPLY, np.zeros([0], np.int32), incarnation=incarnation)
    told = _field(head, "checksum")
    status = _field(head, "status")
    clean = tf.tensor_scatter_nd_update(words, [[_SIZE - 1]], [0])
    whole = tf.reduce_all(
        [
            tf.equal(head[0], int(empty[0])),
            tf.equal(_field(head, "length"), length - _SIZE),
            tf.equal(_checksum(clean), told),
        ]
    )
    process = tf.equal(_field(head, "incarnation"), incarnation)
    mine = tf.logical_and(process, tf.equal(_field(head, "number"), number))
    clock, parts = _field(head, "clock"), _field(head, "parts")
    return tf.logical_and(whole, mine), ReplyMessage(status, clock, parts, body)


def reply_text(body: tf.Tensor) -> tf.Tensor:
    """Return what `messages.to_body` made words of, a scalar string."""
    letters = tf.reshape(tf.bitcast(body, tf.uint8), [-1])
    text = tf.strings.unicode_encode(tf.cast(letters, tf.int32), "UTF-8")
    return tf.strings.strip(text)


def _checksum(words: tf.Tensor) -> tf.Tensor:
    """Return `messages.checksum` of int32 `[w]`, a scalar int32."""
    return tf.reduce_sum(words * (2 * tf.range(tf.size(words)) + 1))


def _field(head: tf.Tensor, name: str) -> tf.Tensor:
    """Return a field of a reply's head, a scalar."""
    dtype = tf.as_dtype(REPLY[name])
    at, width = _offset(REPLY, name), dtype.size // 4
    words = head[at : at + width]
    return tf.bitcast(words if width > 1 else words[0], dtype)


def _offset(kind: np.dtype, name: str) -> int:
    assert kind.fields is not None
    return kind.fields[name][1] // 4


# --- The worker's end: asks the server, and waits for what it asked for.

_CALL_SECONDS = 10.0  # of one call; the server answers within a second or two
_WORDS = tf.TensorSpec([None], tf.int32)
_NO_ANSWER = (0, np.int64(0), 0, np.zeros([0], np.int32))  # of the types of `Answer`


class ServerConnection:
    """Asks the server, eagerly and within functions, one request at a time.

    A request whose reply does not come is sent again, until `TF_DGC_TIMEOUT` seconds
    are over; it acts once.

    Args:
        task: task of this process, a worker, and the server that it is to speak to.

    Attributes:
        clock: server's clock as it was seen last, scalar int64.
        heartbeat: signs of life to the server.

    Raises:
        RuntimeError: if there is no server within `TF_DGC_START_TIMEOUT` seconds.
    """

    def __init__(self, task: Task):
        failures.show_own_errors_plainly()
        self._task = task
        self._incarnation = secrets.randbits(62)
        self._seconds = workers.timeout_seconds()
        self._client = self._connect()
        self._number = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.clock = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.heartbeat = Heartbeat(self._client, task, self._incarnation)
        scalars = [tf.TensorSpec([], d) for d in (tf.int32, tf.int64, tf.float64)]
        of_part = [tf.TensorSpec([], tf.int32)] * 2

        def function(python: Any, *signature: Any) -> Any:
            return tf.function(python, input_signature=signature, autograph=False)

        self._send = function(self._send_part, *scalars, *of_part, _WORDS)
        self._ask = function(self._ask_whole, *scalars, _WORDS)

    @property
    def name(self) -> str:
        """Name of this worker, for errors."""
        return f"worker {self._task.worker}"

    def _connect(self) -> rpc.Client:
        limit = workers.start_timeout_seconds()
        deadline = time.monotonic() + limit
        name = f"tf_dgc_{self._incarnation:x}"
        seconds = min(_CALL_SECONDS, self._seconds)
        while True:
            try:
                return rpc.Client(self._task.server, name, seconds)
            except tf.errors.OpError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"tf_dgc: {self.name} finds no server at {self._task.server} "
                        f"within {limit:g} s (environment variable "
                        f"{workers.START_TIMEOUT_VARIABLE}). Start it there by "
                        "`tf-dgc serve`. TensorFlow says: "
                        f"{error.message.splitlines()[0]}"
                    ) from error
                time.sleep(0.2)

    # --- outside of steps -----------------------------------------------------------

    def enter(self, handed: model_spec.ModelSpec, steps: int) -> tuple[bool, int]:
        """Take part; return whether the server asks for first weights, and its clock.

        Args:
            handed: description of what the server is to be.
            steps: steps that this worker has taken, those before its backup included.

        Raises:
            tf.errors.OpError: if the server refuses that, or does not respond.
        """
        self.heartbeat.start()
        text = tf.constant(
            messages.to_body(model_spec.model_spec_text({**handed, "steps": steps}))
        )
        _, _, words = self.ask(Kind.JOIN, text)
        told = json.loads(messages.to_text(words.numpy()))
        return told["give"], told["clock"]

    def give(self, variables: Sequence[keras.Variable]) -> None:
        """Give the server its first weights, of its variables.

        Raises:
            tf.errors.OpError: if the server refuses them, or does not respond.
        """
        self.ask(Kind.GIVE, collect_entries(variables))

    def start(self, variables: Sequence[keras.Variable]) -> bool:
        """Wait for the others, and set the variables and the clock to the server's.

        Returns:
            Whether that was done; else who was to give first weights is gone, and the
            server is to be entered again.

        Raises:
            tf.errors.OpError: if the server does not respond.
        """
        status, clock, words = self.ask(Kind.START)
        if status == Status.AGAIN:
            return False
        assign_entries(variables, words)
        self.clock.assign(clock)
        return True

    def leave(self) -> None:
        """Take part no longer."""
        self.heartbeat.leave()

    # --- also within functions ------------------------------------------------------

    def ask(
        self,
        kind: Kind,
        body: Any = (),
        step: Any = 0,
        rate: Any = float("nan"),
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the status of the reply, the clock, and the words.

        Args:
            kind: kind of the request.
            body: words of it, int32 `[w]`.
            step: server's clock as it was seen last, scalar int64.
            rate: learning rate, a scalar, NaN for a schedule.

        Raises:
            tf.errors.OpError: when run, if the server refuses, or does not respond.
        """
        body = tf.convert_to_tensor(body, tf.int32)
        step, rate = tf.cast(step, tf.int64), tf.cast(rate, tf.float64)
        return self._ask(tf.constant(int(kind)), step, rate, body)

    def _ask_whole(
        self, kind: tf.Tensor, step: tf.Tensor, rate: tf.Tensor, body: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Send all parts of a request, wait, and get all parts of the reply."""
        parts = tf.maximum(1, -(-tf.size(body) // MAX_WORDS))

        def part_of(i: tf.Tensor) -> tf.Tensor:
            return body[i * MAX_WORDS : (i + 1) * MAX_WORDS]

        def send(i: tf.Tensor) -> ReplyMessage:
            return ReplyMessage(*self._send(kind, step, rate, i, parts, part_of(i)))

        def ask_again(*_: tf.Tensor) -> ReplyMessage:
            again = tf.constant(int(Kind.ASK))
            return ReplyMessage(*self._send(again, step, rate, 0, 1, body[:0]))

        def send_next(i: tf.Tensor) -> list[tf.Tensor]:
            with tf.control_dependencies([send(i).status]):
                return [i + 1]

        (last,) = _loop(lambda i: i + 1 < parts, send_next, [tf.constant(0)])
        answer = _loop(
            lambda status, *_: tf.equal(status, int(Status.WAIT)),
            ask_again,
            send(last),
        )
        return answer[0], answer[1], self._fetch(ReplyMessage(*answer), step, rate)

    def _fetch(
        self, first: ReplyMessage, step: tf.Tensor, rate: tf.Tensor
    ) -> tf.Tensor:
        """Return all words of a reply."""
        found = tf.TensorArray(
            tf.int32, first.parts, infer_shape=False, element_shape=[None]
        ).write(0, first.body)
        more, nothing = tf.constant(int(Kind.MORE)), first.body[:0]

        def fetch(i: tf.Tensor, found: tf.TensorArray) -> tuple:
            answer = ReplyMessage(
                *self._send(more, step, rate, i, first.parts, nothing)
            )
            return i + 1, found.write(i, answer.body)

        _, found = tf.while_loop(
            lambda i, _: i < first.parts,
            fetch,
            [tf.constant(1), found],
            parallel_iterations=1,
        )
        return found.concat()

    def _send_part(
        self,
        kind: tf.Tensor,
        step: tf.Tensor,
        rate: tf.Tensor,
        part: tf.Tensor,
        parts: tf.Tensor,
        body: tf.Tensor,
    ) -> ReplyMessage:
        """Send one message until its reply is there."""
        number = self._number.assign_add(1)
        asked = RequestMessage(kind, step, rate, part, parts)
        worker = int(self._task.worker or 0)
        words = frame_request(asked, body, number, worker, self._incarnation)

        def call(spent: tf.Tensor, *_: Any) -> tuple:
            begun = tf.timestamp()
            with tf.control_dependencies([begun]):
                _, text, reply = self._client.call(worker, words)
            right, answer = parse_reply(reply, number, self._incarnation)
            with tf.control_dependencies([right]):
                hyperparameters = tf.timestamp() - begun
            # It is the clock of the wall, which may be set meanwhile.
            spent += tf.clip_by_value(hyperparameters, 0.0, 2 * _CALL_SECONDS)
            return spent, right, text, *answer

        def goes_on(spent: tf.Tensor, right: tf.Tensor, *_: Any) -> tf.Tensor:
            return tf.logical_and(tf.logical_not(right), spent < self._seconds)

        first = tf.constant(0.0, tf.float64), False, "", *_NO_ANSWER
        _, right, text, *answer = _loop(goes_on, call, first)
        found = ReplyMessage(*answer)
        lost = tf.strings.join(
            [
                f"tf_dgc: {self.name} does not reach the server "
                f"({self._task.server}): killed, stopped or cut off; or what comes "
                "back is not its reply, as that of another version of tf_dgc. "
                "TensorFlow says: ",
                text,
            ]
        )
        refused = tf.equal(found.status, int(Status.REFUSED))
        said = tf.cond(
            tf.logical_and(right, refused),
            lambda: tf.strings.join(["tf_dgc: ", reply_text(found.body)]),
            lambda: lost,
        )
        fine = tf.logical_and(right, tf.logical_not(refused))
        verdict = tf.raw_ops.Assert(condition=fine, data=[said], summarize=1)
        with tf.control_dependencies([verdict]):
            return ReplyMessage(*map(tf.identity, found))


def _loop(condition: Any, body: Any, first: Sequence[Any]) -> list[tf.Tensor]:
    """Run a loop of one iteration at a time, over values of any length."""
    values = list(map(tf.convert_to_tensor, first))
    shapes = [tf.TensorShape([None] * value.shape.rank) for value in values]
    return tf.while_loop(
        condition, body, values, shape_invariants=shapes, parallel_iterations=1
    )


class PushedGradients(NamedTuple):
    """What goes to a server in a step.

    Attributes:
        words: message, int32 `[w]`.
        step: outcome of the step of variables that are no tables; None without any.
        row_entries: number of entries of rows, an int or a scalar int64 tensor.
    """

    words: tf.Tensor
    step: PushedStep | None
    row_entries: int | tf.Tensor


class PushReply(NamedTuple):
    """What a server says to a push.

    Attributes:
        status: status, scalar int32.
        clock: server's clock, scalar int64.
        words: weights, int32 `[w]`.
    """

    status: tf.Tensor
    clock: tf.Tensor
    words: tf.Tensor


class ServerClient:
    """What a worker has to do with one server.

    Args:
        optimizer: `ServerOptimizer` whose link it is.
        shard: index of the server, and number of servers.
        variables: variables that the server keeps.
        tabular: whether each is a table, of which rows travel.
        worker_state: variables of what this worker remembers of those that are none.
    """

    def __init__(
        self,
        optimizer: Any,
        shard: tuple[int, int],
        variables: Sequence[keras.Variable],
        tabular: Sequence[bool],
        worker_state: WorkerState,
    ):
        self._optimizer, self._shard = optimizer, shard
        self._variables, self._tabular, self._worker_state = (
            variables,
            tabular,
            worker_state,
        )
        self._plain, self._tables = split_tables(variables, tabular)
        self._forms = list(map(embedding_rows.table_spec, self._tables))
        self._connection: ServerConnection | None = None
        self._run = 0
        self._sparse: pulls.PullLayout | None = None
        if optimizer.pull == "sparse" and self._plain:
            by = optimizer.compressor, optimizer.num_workers, optimizer.pull_sparsity
            self._sparse = pulls.pull_layout(worker_state.tensors, *by)

    @property
    def name(self) -> str:
        """Name of the server, for errors."""
        return f"server {self._shard[0]}"

    # --- outside of steps -----------------------------------------------------------

    def connect(self, task: Task, run: int) -> None:
        """Find the server.

        Args:
            task: task of this process, a worker.
            run: number of the run that this is to be.

        Raises:
            RuntimeError: as `Connection`.
        """
        self._connection, self._run = ServerConnection(task.at(self._shard[0])), run

    @property
    def connection(self) -> ServerConnection:
        """Connection to the server, behind `connect`."""
        assert self._connection is not None
        return self._connection

    def enter(self) -> tuple[bool, int]:
        """Do what `Connection.enter` does."""
        return self.connection.enter(self._handed(), self._steps())

    def give(self) -> None:
        """Do what `Connection.give` does."""
        self.connection.give(self._variables)

    def start(self) -> bool:
        """Do what `Connection.start` does."""
        return self.connection.start(self._variables)

    def leave(self) -> None:
        """Take part no longer, if this one did."""
        if self._connection is not None:
            self._connection.leave()

    def pull(self) -> None:
        """Take the server's weights as they are now.

        Raises:
            tf.errors.OpError: if the server does not respond.
        """
        _, clock, words = self.connection.ask(Kind.PULL)
        pulls.assign_entries(self._variables, words)
        self.connection.clock.assign(clock)

    @property
    def bytes_per_pull(self) -> int:
        """Bytes of weights that come in a step, of variables that are no tables."""
        return 4 * self._plain_words

    @property
    def _plain_words(self) -> int:
        if self._sparse:
            return self._sparse.num_words
        return pulls.pull_words(self._plain)

    def _steps(self) -> int:
        """Return the steps of this worker, also while the trace of the first is made.

        A variable that is created there has no value before it has run.
        """
        with tf.init_scope():
            counters = self._worker_state.counters.numpy()
        return int(counters[0]) if counters.size else 0

    def _handed(self) -> model_spec.ModelSpec:
        """Return what the server is to be."""
        optimizer, uncompressed = self._optimizer, iter(self._worker_state.tensors)
        settings = {
            "mode": optimizer.mode,
            "staleness": optimizer.staleness,
            "quorum": optimizer.quorum,
            "correction": optimizer.correction,
            "correction_strength": optimizer.correction_strength,
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
            [is_table or next(uncompressed).uncompressed for is_table in self._tabular],
            self._tabular,
            self._shard,
            self._run,
        )

    @property
    def _seed(self) -> int:
        """Seed of this server's part of the step, which draws by itself."""
        return self._optimizer.seed + self._shard[0]

    # --- within a step --------------------------------------------------------------

    def push(
        self,
        gradients: Sequence[Gradient],
        scales: Sequence[Scale],
        settings: StepSettings,
        worker: int,
    ) -> PushedGradients:
        """Run the step of this server's variables, and return what goes to it.

        Args:
            gradients: gradient of each, as `clip` returns it.
            scales: factor of each; NaN for all, if one is not finite and there are
                tables, or several servers.
            settings: settings of the optimizer.
            worker: index of this worker.
        """
        plain, of_tables = split_tables(
            list(zip(gradients, scales, strict=True)), self._tabular
        )
        words, step, entries = [], None, 0
        if of_tables:
            given, by = zip(*of_tables, strict=True)
            words.append(embedding_rows.encode_rows(self._forms, given, by))
            entries = add_counts([tf.size(g.values, tf.int64) for g in given])
        if plain:
            inputs = step_inputs.create_inputs(
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

    def ask(self, pushed: PushedGradients, rate: tf.Tensor) -> PushReply:
        """Push, and wait for what is pulled.

        Args:
            pushed: result of `push`.
            rate: learning rate, scalar float64, NaN for a schedule.
        """
        connection = self.connection
        return PushReply(
            *connection.ask(Kind.PUSH, pushed.words, connection.clock, rate)
        )

    def take(self, pushed: PushedGradients, reply: PushReply) -> None:
        """Set the variables by what is pulled; keep a push that came too late."""
        if self._optimizer.mode == "backup":
            late = tf.equal(reply.status, int(Status.LATE))
            tf.cond(late, lambda: self._put_back(pushed), lambda: False)
        words = reply.words
        if self._tables:
            embedding_rows.take_rows(
                self._forms, self._tables, words[self._plain_words :]
            )
            words = words[: self._plain_words]
        if self._sparse:
            pulls.take_entries(self._sparse, self._plain, words)
        elif self._plain:
            pulls.assign_entries(self._plain, words)
        self.connection.clock.assign(reply.clock)

    def _put_back(self, pushed: PushedGradients) -> bool:
        """Keep what was pushed, which came too late."""
        assert pushed.step is not None  # as there are no tables with "backup"
        sent, _ = pushed.step.outcome.decode()
        kept = [r.local() for r in self._worker_state.residual]
        both = [
            k + tf.cast(tf.reshape(s, k.shape), k.dtype)
            for k, s in zip(kept, sent, strict=True)
        ]
        self._worker_state.store_residual(both)
        return True


def split_tables(items: Sequence, tabular: Sequence[bool]) -> tuple[list, list]:
    """Return those of the variables that are no tables, and those of tables."""
    pairs = list(zip(items, tabular, strict=True))
    return [i for i, is_table in pairs if not is_table], [i for i, t in pairs if t]
