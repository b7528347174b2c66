"""Early stopping: all workers leave Keras's training loop after the same step.

Every worker's callbacks see their own logs, so one may set `model.stop_training` where
the others do not, and leave them waiting in the next step. Here such a worker publishes
its request through the coordination service, and all stop after the same step. While
nobody wants to stop, no packet is sent within an epoch; at its end, all compare.
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
_numbers = itertools.count()  # equal on all workers, as all call `fit` equally often


class StopSignal:
    """Decides when the workers of one `fit` stop within an epoch."""

    # The workers agree in attempts, one after the other. Each participant publishes the
    # step after which it takes part. If all published the same step, they stop there,
    # so a callback that decides by the number of the step takes effect at once.
    # Otherwise the verdict is a step, soon, at which all who know of it take part in
    # the next attempt. The first published verdict counts. Workers that do not take
    # part in an attempt wait in the next step's exchange meanwhile.

    def __init__(self, strategy: tf.distribute.Strategy):
        self._me = workers.own_name(strategy)
        self._peers = workers.other_names(strategy)
        self._key = f"tf_dgc/stopping/{next(_numbers)}"
        self._steps = 0
        self._attempt = 0
        self._next: int | None = None  # step after which to attempt again
        self._verdicts: list[str] = []  # received
        self._ended = threading.Event()
        self.requested = False  # by this worker
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
                self._agree()
            return self.agreed

    def request(self) -> bool:
        """Request to stop after this step; return whether all stop after it."""
        with self._lock:
            if not self.requested and not self.agreed:
                self.requested = True
                self._agree()
            return self.agreed

    def _agree(self) -> None:
        self._next = self._steps
        while not self.agreed and self._next <= self._steps:
            self._accept(self._attempt_verdict())

    def _accept(self, verdict: str) -> None:
        self._attempt += 1
        self.agreed = verdict == _STOP
        self._next = self._steps if self.agreed else int(verdict)

    def _attempt_verdict(self) -> str:
        key = f"{self._key}/{self._attempt}"
        limit = workers.timeout_seconds()
        coordination.publish(f"{key}/{self._me}", str(self._steps), limit)
        steps = self._published_steps(key)
        proposal = str(max(steps) + 2 ** (self._attempt + 1))
        if steps == [self._steps] * (1 + len(self._peers)):
            proposal = _STOP
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            coordination.publish(f"{key}/verdict", proposal, limit)
            for worker in [*self._peers, self._me]:
                self._ring(worker, self._attempt, proposal, limit)
        return coordination.lookup(f"{key}/verdict", limit)

    def _published_steps(self, key: str) -> list[int]:
        """Return this worker's step and the others', up to the first missing one."""
        steps = [self._steps]
        deadline = time.monotonic() + _ANSWER_SECONDS
        with contextlib.suppress(tf.errors.DeadlineExceededError):
            for peer in self._peers:
                seconds = max(0.01, deadline - time.monotonic())
                steps.append(int(coordination.lookup(f"{key}/{peer}", seconds)))
        return steps

    # Each worker waits for a key of its own, the bell of the next attempt, in one call
    # that the service answers when the key is set. Polling for the verdict would send
    # packets all the time, and the service would store something for each call. As the
    # bell is this worker's own, it can also end the call.

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
    """The last callback of a `fit`: resets `stop_training` until all workers agree."""

    def __init__(
        self,
        stop_signal: StopSignal,
        gather: Callable[[int], list[int]],
        loop: keras_trainer.Loop,
    ):
        super().__init__()
        self._stop_signal, self._gather, self._loop = stop_signal, gather, loop

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Tell the watchdog that the workers need each other until the epoch ends."""
        self._loop.epoch = epoch
        watchdog.expect_others(True)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Request to stop; stop now if all workers do."""
        if self.model.stop_training:
            self.model.stop_training = self._stop_signal.request()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stop all workers if one of them requests it, within the epoch or now."""
        requested = self.model.stop_training or self._stop_signal.requested
        self.model.stop_training = any(self._gather(int(requested)))
        watchdog.expect_others(False)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stop listening to the other workers."""
        self._stop_signal.end()
