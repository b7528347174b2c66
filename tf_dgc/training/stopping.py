"""Stopping: workers leave Keras's training loop together, whoever asked for it.

Every worker's callbacks see logs of its own, so one may set `model.stop_training` where
the others do not, and leave them waiting in the next step. Here a worker that wants to
stop says so through the coordination service, and all do after the same step. While
nobody wants to, nothing is exchanged within an epoch; at its end all ask each other.
"""

import atexit
import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import trainer
from tf_dgc.cluster import coordination, watchdog, workers

_ANSWER_SECONDS = 1.0  # for the others to say that they want to stop as well
_STOP = "stop"
_SILENT = "-1 nobody"  # has rung yet
_LISTEN_SECONDS = 0.5  # between looks for a verdict
_numbers = itertools.count()  # equal on all workers, as all call `fit` alike


class Stopping:
    """When the workers of one `fit` stop within an epoch.

    They attempt to agree, one attempt after the other. Whoever takes part in one notes
    after which step it does. If all noted the same step, they stop there; a callback
    that decides by the number of the step is obeyed at once. Otherwise the verdict is a
    step, soon, at which all who have heard of it take part in the next attempt. The
    first verdict that is published counts. As no worker gets into a step's exchange
    before the others, those who do not take part in an attempt wait there meanwhile.

    Args:
        strategy: strategy of several workers.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._me = workers.me(strategy)
        self._peers = workers.peers(strategy)
        self._key = f"tf_dgc/stopping/{next(_numbers)}"
        self._steps = 0
        self._attempt = 0
        self._next: int | None = None  # the step after which to attempt it again
        self._verdicts: list[str] = []  # that were heard of
        self._ended = threading.Event()
        self.wanted = False  # by this worker
        self.agreed = False
        self._lock = threading.RLock()  # Keras may call callbacks in a thread
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        atexit.register(self._exit)

    def end(self) -> None:
        """Hear no more of the others."""
        self._ended.set()

    def _exit(self) -> None:
        self.end()
        self._listener.join(2 * _ANSWER_SECONDS)

    def after_step(self) -> bool:
        """Count a step; return whether all stop after it."""
        with self._lock:
            self._steps += 1
            while self._attempt < len(self._verdicts):
                self._accept(self._verdicts[self._attempt])
            if self._next is not None and self._steps >= self._next:
                self._meet()
            return self.agreed

    def want(self) -> bool:
        """Want to stop after this step; return whether all do."""
        with self._lock:
            if not self.wanted and not self.agreed:
                self.wanted = True
                self._meet()
            return self.agreed

    def _meet(self) -> None:
        self._next = self._steps
        while not self.agreed and self._next <= self._steps:
            self._accept(self._try())

    def _accept(self, verdict: str) -> None:
        self._attempt += 1
        self.agreed = verdict == _STOP
        self._next = self._steps if self.agreed else int(verdict)

    def _try(self) -> str:
        """Take part in an attempt; return its verdict."""
        key = f"{self._key}/{self._attempt}"
        limit = workers.timeout_seconds()
        coordination.publish(f"{key}/{self._me}", str(self._steps), limit)
        noted = self._noted(key)
        proposal = str(max(noted or [0]) + 2 ** (self._attempt + 1))
        if noted == [self._steps] * (1 + len(self._peers)):
            proposal = _STOP
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            coordination.publish(f"{key}/verdict", proposal, limit)
            self._ring()
        return coordination.lookup(f"{key}/verdict", limit)

    def _noted(self, key: str) -> list[int]:
        """Return what is noted of an attempt, up to the first that is missing."""
        noted = [self._steps]
        deadline = time.monotonic() + _ANSWER_SECONDS
        with contextlib.suppress(tf.errors.DeadlineExceededError):
            for peer in self._peers:
                left = max(0.01, deadline - time.monotonic())
                noted.append(int(coordination.lookup(f"{key}/{peer}", left)))
        return noted

    # Each time a verdict is asked for that is not there, the service keeps something of
    # that. So what is asked for again and again is a bell, which always has a value:
    # another one since the last verdict. Of two that ring at once one may not be heard,
    # but then the other's value came after both verdicts.

    def _ring(self) -> None:
        with contextlib.suppress(tf.errors.NotFoundError):
            coordination.unpublish(f"{self._key}/bell", workers.timeout_seconds())
        self._hang_up_bell(f"{self._attempt} {self._me}")

    def _hang_up_bell(self, value: str) -> None:
        limit = workers.timeout_seconds()
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            coordination.publish(f"{self._key}/bell", value, limit)

    def _listen(self) -> None:
        heard = _SILENT
        with contextlib.suppress(tf.errors.OpError):  # the cluster has failed
            self._hang_up_bell(_SILENT)
            while not self._ended.wait(_LISTEN_SECONDS):
                value = self._ask("bell")
                if value not in (None, heard) and self._hear_verdicts(value):
                    heard = value
        atexit.unregister(self._exit)

    def _hear_verdicts(self, value: str) -> bool:
        """Hear all there are; return whether that which the bell rang for is heard."""
        while verdict := self._ask(f"{len(self._verdicts)}/verdict"):
            self._verdicts.append(verdict)
        return len(self._verdicts) > int(value.split(maxsplit=1)[0])

    def _ask(self, key: str) -> str | None:
        with contextlib.suppress(tf.errors.DeadlineExceededError):
            return coordination.lookup(f"{self._key}/{key}", _ANSWER_SECONDS)
        return None


class StopTogether(keras.callbacks.Callback):
    """The last callback of a `fit`: holds back what not all have agreed on.

    Args:
        stopping: agreement of the workers of this `fit`.
        gather: function of an integer that returns those of all workers.
        loop: loop of this `fit`, which is told the number of its epoch.
    """

    def __init__(
        self,
        stopping: Stopping,
        gather: Callable[[int], list[int]],
        loop: trainer.Loop,
    ):
        super().__init__()
        self._stopping, self._gather, self._loop = stopping, gather, loop

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """From now on the workers need each other, until the epoch has ended."""
        self._loop.epoch = epoch
        watchdog.expect_others(True)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Let the model stop now if all do."""
        if self.model.stop_training:
            self.model.stop_training = self._stopping.want()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Let all stop if one wants to, since within the epoch or since its end."""
        wanted = self.model.stop_training or self._stopping.wanted
        self.model.stop_training = any(self._gather(int(wanted)))
        watchdog.expect_others(False)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """End."""
        self._stopping.end()
