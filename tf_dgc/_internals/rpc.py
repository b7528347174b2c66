"""TensorFlow's experimental remote calls (`tf.distribute.experimental.rpc`).

Of one method per slot, which takes and returns a vector. It travels as float32, whose
bits are kept: int32 would be coded number by number, in several times the time. What is
longer than 4 MiB is refused by TensorFlow, in both directions.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

MOST_WORDS = 2**20 - 1024
"""Words of a message at the most: 4 MiB, less what stands around them."""

_VECTOR = tf.TensorSpec([None], tf.float32)
_CAPACITY = 10_000


class Server:
    """Takes calls, which wait until they are answered, each slot's in their order.

    Methods are queue operations, as Python handlers would each block a thread.

    Args:
        address: host and port to listen on, and no other.
        num_slots: number of slots, of which each has one caller.

    Raises:
        tf.errors.OpError: if nobody can listen there.
    """

    def __init__(self, address: str, num_slots: int):
        with tf.device("CPU:0"):
            self._inbox = tf.queue.FIFOQueue(_CAPACITY, [tf.int32, tf.float32])
            self._boxes = [
                tf.queue.FIFOQueue(_CAPACITY, [tf.float32]) for _ in range(num_slots)
            ]
            self._server = tf.distribute.experimental.rpc.Server.create("grpc", address)
            for slot in range(num_slots):  # not possible any more behind `start`
                self._server.register(f"slot{slot}", self._method(slot))
            self._server.start()
        # TensorFlow's server does not end before all calls have: those that nobody
        # answers would keep it, and this process, for ever.
        weakref.finalize(self, _close, [*self._boxes, self._inbox])

    def _method(self, slot: int) -> Any:
        @tf.function(input_signature=[_VECTOR])
        def call(words: tf.Tensor) -> tf.Tensor:
            put = self._inbox.enqueue([tf.constant(slot), words])
            with tf.control_dependencies([put]):
                return tf.ensure_shape(self._boxes[slot].dequeue(), [None])

        return call

    def take(self) -> tuple[int, np.ndarray]:
        """Wait for a call or a wake-up; return its slot, -1 of that, and its words."""
        slot, words = self._inbox.dequeue()
        # The signature holds in this process alone: a caller sends any shape.
        return int(slot), np.ravel(words.numpy()).view(np.int32)

    def wake(self) -> None:
        """Let `take` return; from another thread."""
        self._inbox.enqueue([tf.constant(-1), tf.zeros([0])])

    def answer(self, slot: int, words: np.ndarray) -> None:
        """Return from the slot's oldest call, once for each.

        Args:
            slot: slot that was called.
            words: reply, int32 `[w]`.
        """
        self._boxes[slot].enqueue([tf.constant(words.view(np.float32))])


def _close(queues: Sequence[tf.queue.FIFOQueue]) -> None:
    """Let all calls that wait end with an error."""
    with tf.init_scope():  # garbage is collected while others are traced, too
        for queue in queues:
            queue.close(cancel_pending_enqueues=True)


class Client:
    """Calls one server; eagerly and within functions.

    Args:
        address: address of the server.
        name: name of this client in the process, of which there is no other.
        seconds: seconds that a call may take.

    Raises:
        tf.errors.OpError: if the server does not answer within that time.
    """

    def __init__(self, address: str, name: str, seconds: float):
        with tf.device("CPU:0"):
            self._client = tf.distribute.experimental.rpc.Client.create(
                "grpc", address, name=name, timeout_in_ms=int(1000 * seconds)
            )

    def call(
        self, slot: int, words: tf.Tensor, seconds: float = 0.0
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the error's code, 0 if there is none, its text, and the reply.

        Args:
            slot: slot of the caller.
            words: message, int32 `[w]`.
            seconds: seconds that the call may take; 0 for those of the client.
        """
        with tf.device("CPU:0"):
            sent = tf.bitcast(words, tf.float32)
            result = self._client.call(
                f"slot{slot}", [sent], _VECTOR, timeout_in_ms=int(1000 * seconds)
            )
            code, text = result.get_error()
            code = tf.ensure_shape(code, [])

            def value() -> tf.Tensor:
                return tf.ensure_shape(result.get_value(), [None])

            reply = tf.cond(tf.equal(code, 0), value, lambda: tf.zeros([0]))
            return code, tf.ensure_shape(text, []), tf.bitcast(reply, tf.int32)
