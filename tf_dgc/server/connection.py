"""The worker's end: asks the server, and waits for what it asked for."""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import rpc
from tf_dgc.cluster import failures, workers
from tf_dgc.server import handing, messages, sealing
from tf_dgc.server.heartbeat import Heartbeat
from tf_dgc.server.messages import MOST_WORDS, Kind, Status
from tf_dgc.server.pulls import assign, collect
from tf_dgc.server.sealing import Answer, Asked
from tf_dgc.server.tasks import Task

_CALL_SECONDS = 10.0  # of one call; the server answers within a second or two
_WORDS = tf.TensorSpec([None], tf.int32)
_NO_ANSWER = (0, np.int64(0), 0, np.zeros([0], np.int32))  # of the types of `Answer`


class Connection:
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

    def enter(self, handed: handing.Handed, steps: int) -> tuple[bool, int]:
        """Take part; return whether the server asks for first weights, and its clock.

        Args:
            handed: description of what the server is to be.
            steps: steps that this worker has taken, those before its backup included.

        Raises:
            tf.errors.OpError: if the server refuses that, or does not respond.
        """
        self.heartbeat.start()
        text = tf.constant(
            messages.to_body(handing.to_text({**handed, "steps": steps}))
        )
        _, _, words = self.ask(Kind.JOIN, text)
        told = json.loads(messages.to_text(words.numpy()))
        return told["give"], told["clock"]

    def give(self, variables: Sequence[keras.Variable]) -> None:
        """Give the server its first weights, of its variables.

        Raises:
            tf.errors.OpError: if the server refuses them, or does not respond.
        """
        self.ask(Kind.GIVE, collect(variables))

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
        assign(variables, words)
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
        parts = tf.maximum(1, -(-tf.size(body) // MOST_WORDS))

        def part_of(i: tf.Tensor) -> tf.Tensor:
            return body[i * MOST_WORDS : (i + 1) * MOST_WORDS]

        def send(i: tf.Tensor) -> Answer:
            return Answer(*self._send(kind, step, rate, i, parts, part_of(i)))

        def ask_again(*_: tf.Tensor) -> Answer:
            again = tf.constant(int(Kind.ASK))
            return Answer(*self._send(again, step, rate, 0, 1, body[:0]))

        def send_next(i: tf.Tensor) -> list[tf.Tensor]:
            with tf.control_dependencies([send(i).status]):
                return [i + 1]

        (last,) = _loop(lambda i: i + 1 < parts, send_next, [tf.constant(0)])
        answer = _loop(
            lambda status, *_: tf.equal(status, int(Status.WAIT)),
            ask_again,
            send(last),
        )
        return answer[0], answer[1], self._fetch(Answer(*answer), step, rate)

    def _fetch(self, first: Answer, step: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Return all words of a reply."""
        found = tf.TensorArray(
            tf.int32, first.parts, infer_shape=False, element_shape=[None]
        ).write(0, first.body)
        more, nothing = tf.constant(int(Kind.MORE)), first.body[:0]

        def fetch(i: tf.Tensor, found: tf.TensorArray) -> tuple:
            answer = Answer(*self._send(more, step, rate, i, first.parts, nothing))
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
    ) -> Answer:
        """Send one message until its reply is there."""
        number = self._number.assign_add(1)
        asked = Asked(kind, step, rate, part, parts)
        worker = int(self._task.worker or 0)
        words = sealing.seal(asked, body, number, worker, self._incarnation)

        def call(spent: tf.Tensor, *_: Any) -> tuple:
            begun = tf.timestamp()
            with tf.control_dependencies([begun]):
                _, text, reply = self._client.call(worker, words)
            right, answer = sealing.unseal(reply, number, self._incarnation)
            with tf.control_dependencies([right]):
                took = tf.timestamp() - begun
            # It is the clock of the wall, which may be set meanwhile.
            spent += tf.clip_by_value(took, 0.0, 2 * _CALL_SECONDS)
            return spent, right, text, *answer

        def goes_on(spent: tf.Tensor, right: tf.Tensor, *_: Any) -> tf.Tensor:
            return tf.logical_and(tf.logical_not(right), spent < self._seconds)

        first = tf.constant(0.0, tf.float64), False, "", *_NO_ANSWER
        _, right, text, *answer = _loop(goes_on, call, first)
        found = Answer(*answer)
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
            lambda: tf.strings.join(["tf_dgc: ", sealing.text_of(found.body)]),
            lambda: lost,
        )
        fine = tf.logical_and(right, tf.logical_not(refused))
        verdict = tf.raw_ops.Assert(condition=fine, data=[said], summarize=1)
        with tf.control_dependencies([verdict]):
            return Answer(*map(tf.identity, found))


def _loop(condition: Any, body: Any, first: Sequence[Any]) -> list[tf.Tensor]:
    """Run a loop of one iteration at a time, over values of any length."""
    values = list(map(tf.convert_to_tensor, first))
    shapes = [tf.TensorShape([None] * value.shape.rank) for value in values]
    return tf.while_loop(
        condition, body, values, shape_invariants=shapes, parallel_iterations=1
    )
