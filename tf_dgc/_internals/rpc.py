"""TensorFlow's experimental remote calls (`tf.distribute.experimental.rpc`).

There is one method per slot, which takes and returns a vector. Vectors are sent as
float32 with the same bits: TensorFlow encodes int32 number by number, which takes
several times as long. TensorFlow rejects messages above 4 MiB in both directions.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

MOST_WORDS = 2**20 - 1024
"""Maximum number of words of a message: 4 MiB, less the overhead."""

_VECTOR = tf.TensorSpec([None], tf.float32)
_CAPACITY = 10_000


class Server:
    """Receives calls, which wait until they are answered, in order for each slot."""

    # Methods are queue operations, because Python handlers would each block a thread.

    def __init__(self, address: str, num_slots: int):
        with tf.device("CPU:0"):
            self._inbox = tf.queue.FIFOQueue(_CAPACITY, [tf.int32, tf.float32])
            self._outboxes = [
                tf.queue.FIFOQueue(_CAPACITY, [tf.float32]) for _ in range(num_slots)
            ]
            self._server = tf.distribute.experimental.rpc.Server.create("grpc", address)
            for slot in range(num_slots):  # not possible after `start`
                self._server.register(f"slot{slot}", self._method(slot))
            self._server.start()
        # TensorFlow's server ends only when all calls have ended: unanswered ones would
        # keep it, and this process, alive for ever.
        weakref.finalize(self, _close, [*self._outboxes, self._inbox])

    def _method(self, slot: int) -> Any:
        @tf.function(input_signature=[_VECTOR])
        def call(words: tf.Tensor) -> tf.Tensor:
            put = self._inbox.enqueue([tf.constant(slot), words])
            with tf.control_dependencies([put]):
                return tf.ensure_shape(self._outboxes[slot].dequeue(), [None])

        return call

    def take(self) -> tuple[int, np.ndarray]:
        """Wait for a call or `wake`; return the slot, -1 for `wake`, and the words."""
        slot, words = self._inbox.dequeue()
        # The signature is checked only in this process: a caller may send any shape.
        return int(slot), np.ravel(words.numpy()).view(np.int32)

    def wake(self) -> None:
        """Make `take` return; call it from another thread."""
        self._inbox.enqueue([tf.constant(-1), tf.zeros([0])])

    def answer(self, slot: int, words: np.ndarray) -> None:
        """Answer the slot's oldest call, once for each call, with int32 `[w]`."""
        self._outboxes[slot].enqueue([tf.constant(words.view(np.float32))])


def _close(queues: Sequence[tf.queue.FIFOQueue]) -> None:
    with tf.init_scope():  # garbage collection may run while a function is traced
        for queue in queues:
            queue.close(cancel_pending_enqueues=True)


class Client:
    """Calls one server, eagerly and within functions."""

    def __init__(self, address: str, name: str, seconds: float):
        with tf.device("CPU:0"):
            self._client = tf.distribute.experimental.rpc.Client.create(
                "grpc", address, name=name, timeout_in_ms=int(1000 * seconds)
            )

    def call(
        self, slot: int, words: tf.Tensor, seconds: float = 0.0
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the error's code, or 0, its text, and the reply."""
        with tf.device("CPU:0"):
            message = tf.bitcast(words, tf.float32)
            result = self._client.call(
                f"slot{slot}", [message], _VECTOR, timeout_in_ms=int(1000 * seconds)
            )
            code, text = result.get_error()
            code = tf.ensure_shape(code, [])

            def value() -> tf.Tensor:
                return tf.ensure_shape(result.get_value(), [None])

            reply = tf.cond(tf.equal(code, 0), value, lambda: tf.zeros([0]))
            return code, tf.ensure_shape(text, []), tf.bitcast(reply, tf.int32)
