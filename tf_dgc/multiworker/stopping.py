"""Stopping: workers leave Keras's training loop together, whoever asked for it.

Every worker's callbacks see logs of its own, so one may set `model.stop_training` where
the others do not, and leave them waiting in the next step. Here a worker that wants to
stop says so through the coordination service, and all do after the same step. While
nobody wants to, not a single packet is sent within an epoch; at its end all ask each
other.
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

from tf_dgc._internals import keras_trainer
from tf_dgc.multiworker import coordination, failures, watchdog, workers

_ANSWER_SECONDS = 1.0  # for the others to say that they want to stop as well
_STOP = "stop"
_numbers = itertools.count()  # equal on all workers, as all call `fit` alike


class StopSignal:
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
        self._me = workers.own_name(strategy)
        self._peers = workers.other_names(strategy)
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
        """Stop listening to the other workers."""
        if self._ended.is_set():
            return
        self._ended.set()
        with contextlib.suppress(tf.errors.OpError):
            self._ring(self._me, len(self._verdicts), "over", _ANSWER_SECONDS)

    def _exit(self) -> None:
        if failures.reported.is_set():  # the service may not answer any more
            failures.limit_teardown()
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
            for worker in [*self._peers, self._me]:
                self._ring(worker, self._attempt, proposal, limit)
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

    # Each worker waits for a key of its own, the bell of the next attempt, in one call
    # that the service answers when the key is set. To look for the verdict again and
    # again would take packets all the time, and the service would keep something of
    # each look. As the bell is this worker's own, it can also end the call.

    def _bell(self, worker: str, attempt: int) -> str:
        return f"{self._key}/{attempt}/bell/{worker}"

    def _ring(self, worker: str, attempt: int, verdict: str, seconds: float) -> None:
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            coordination.publish(self._bell(worker, attempt), verdict, seconds)

    def _listen(self) -> None:
        with contextlib.suppress(tf.errors.OpError):  # the cluster has failed
            while not self._ended.is_set():
                bell = self._bell(self._me, len(self._verdicts))
                verdict = coordination.lookup(bell, None)
                if self._ended.is_set():
                    coordination.unpublish(bell, _ANSWER_SECONDS)
                else:
                    self._verdicts.append(verdict)
        atexit.unregister(self._exit)


class StopTogether(keras.callbacks.Callback):
    """The last callback of a `fit`: holds back what not all have agreed on.

    Args:
        stopping: agreement of the workers of this `fit`.
        gather: function of an integer that returns those of all workers.
        loop: loop of this `fit`, which is told the number of its epoch.
    """

    def __init__(
        self,
        stopping: StopSignal,
        gather: Callable[[int], list[int]],
        loop: keras_trainer.Loop,
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
