"""Signs of life of a worker, from a thread; and its good-bye."""

import atexit
import sys
import threading
import time

import numpy as np
import tensorflow as tf

from tf_dgc._internals import rpc
from tf_dgc.cluster import workers
from tf_dgc.server import messages
from tf_dgc.server.messages import REQUEST, Kind, seal
from tf_dgc.server.tasks import Task

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
        words = seal(
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
