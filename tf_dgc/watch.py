"""The watch: ends a worker that others keep waiting, and says for whom it waited.

TensorFlow notices by itself, within seconds, when another process is gone, for its own
threads send heartbeats. It never notices when a process lives but does not come to the
collective that this worker waits in. That is for a thread here: every worker publishes
how many collectives it has started, and who waits too long looks who is behind.
"""

import atexit
import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import tensorflow as tf

from tf_dgc import _internals, cluster, failures

STUCK_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: starting again may help
_GRACE_SECONDS = 5.0
_numbers = itertools.count()  # equal on all workers, as strategies are


class Watch:
    """Watches over what a worker waits for in.

    Args:
        strategy: of several workers.
        count: returns how many collectives this worker has started and finished.

    Raises:
        ValueError: for environment variables that are not times.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, count: Callable[[], list[int]]
    ):
        self._strategy = strategy
        self._count = count
        self._limit = cluster.timeout_seconds()
        self._tracing_limit = cluster.tracing_timeout_seconds()
        self._interval = min(2.0, self._limit / 10)
        self._key = f"tf_dgc/watch/{next(_numbers)}"
        self._started = self._finished = 0  # waits outside of collectives
        self._seen = (0, 0)
        self._since = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tf_dgc", daemon=True)

    def start(self) -> None:
        """Start the thread; it ends before the interpreter does."""
        self._thread.start()
        atexit.register(self._end)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what is done within as a collective."""
        self._started += 1
        yield
        self._finished += 1

    def _end(self) -> None:
        self._stop.set()
        self._thread.join(1.0)  # it may wait for who coordinates, in vain

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            # Without the service there is nothing to watch with: the cluster has
            # failed, and TensorFlow has ended its collectives.
            with contextlib.suppress(tf.errors.OpError):
                position = self._look()
                self._publish(position)
                reason = self._blame(position)
                if reason is not None:
                    return self._give_up(reason)

    def _look(self) -> dict[str, Any]:
        """Return where this worker is."""
        started, finished = self._count()
        frame = _main_frame()
        return {
            "started": started + self._started,
            "finished": finished + self._finished,
            "tracing": frame is not None and _internals.is_tracing(frame),
            "place": _place(frame),
        }

    def _publish(self, position: dict[str, Any]) -> None:
        key = f"{self._key}/{cluster.me(self._strategy)}"
        with contextlib.suppress(tf.errors.NotFoundError):
            _internals.unpublish(key)
        _internals.publish(key, json.dumps(position))

    def _blame(self, position: dict[str, Any]) -> str | None:
        """Return why to give up, if this worker has waited for too long."""
        seen = position["started"], position["finished"]
        now = time.monotonic()
        if seen != self._seen or position["finished"] == position["started"]:
            self._seen, self._since = seen, now
        waited = now - self._since
        if waited < self._limit:
            return None
        others = {peer: self._lookup(peer) for peer in cluster.peers(self._strategy)}
        behind = {p: o for p, o in others.items() if o["started"] < seen[0]}
        if not behind:
            return self._stalled(waited, others)
        if waited < self._tracing_limit and any(o["tracing"] for o in behind.values()):
            return None
        return self._late(waited, behind, seen[0])

    def _lookup(self, peer: str) -> dict[str, Any]:
        try:
            text = _internals.lookup(f"{self._key}/{peer}", 2 * self._interval)
        except tf.errors.DeadlineExceededError:  # it has not got as far as here
            return {"started": -1, "tracing": False, "place": "before `tf_dgc.prepare`"}
        return json.loads(text)

    def _late(self, waited: float, behind: dict[str, Any], number: int) -> str:
        full_names = [
            f"{cluster.full_name(self._strategy, peer)} ({where['place']})"
            for peer, where in behind.items()
        ]
        return (
            f"{self._name()} has waited {waited:.0f} s in collective {number} for "
            f"{' and '.join(full_names)}, which responds but does not come. If it is "
            f"only slow, set {cluster.TIMEOUT_VARIABLE} to more seconds than "
            f"{self._limit:g}"
        )

    def _stalled(self, waited: float, others: dict[str, Any]) -> str:
        full_names = [cluster.full_name(self._strategy, peer) for peer in others]
        return (
            f"{self._name()} has waited {waited:.0f} s for data from "
            f"{' and '.join(full_names)}, which responds and has sent it. The network "
            "is too slow for a collective of this size, or loses too much. If it is "
            f"only slow, set {cluster.TIMEOUT_VARIABLE} to more seconds than "
            f"{self._limit:g}"
        )

    def _name(self) -> str:
        return cluster.full_name(self._strategy, cluster.me(self._strategy))

    def _give_up(self, reason: str) -> None:
        """Let the collective fail; if that does not free the main thread, end here."""
        before = _main_frame()
        instruction = before and before.f_lasti
        _internals.abort_collectives(f"tf_dgc: {reason}")
        failures.tell(reason)
        if self._stop.wait(_GRACE_SECONDS):
            return
        after = _main_frame()
        if after is before and (after and after.f_lasti) == instruction:
            text = failures.error_text(self._strategy, reason)
            sys.stderr.write(f"{text} The main thread is stuck; ending this process.\n")
            sys.stderr.flush()
            os._exit(STUCK_EXIT_CODE)


def _main_frame() -> FrameType | None:
    identity = threading.main_thread().ident
    return None if identity is None else sys._current_frames().get(identity)


def _place(frame: FrameType | None) -> str:
    """Return where in the user's program a stack is, past TensorFlow and Keras."""
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None:
        return "at an unknown place"
    code = frame.f_code
    return f"at {code.co_filename}:{frame.f_lineno} in {code.co_name}"


def _is_library(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.split(".")[0] in ("tensorflow", "keras", "tf_dgc")
