"""The watch: ends this worker if it waits too long for another one, and names that one.

TensorFlow itself notices within seconds that another process is gone, because its own
threads send heartbeats. It never notices a process that lives but does not come to the
collective that this worker waits in. Threads notice that here: every worker publishes
how many collectives it has started, and a worker that waits too long looks up which
worker has started fewer.
"""

import atexit
import contextlib
import dataclasses
import itertools
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import tensorflow as tf

from tf_dgc._internals import tf_collectives, tracing
from tf_dgc._internals.coordination import start_daemon_thread
from tf_dgc.multiworker import coordination, failures, positions, watchdog, workers
from tf_dgc.multiworker.positions import Collective, Counts, Group, Position

STUCK_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: starting again may help
_STUCK_SECONDS = 8.0
# TCP retransmits after pauses that double each time: after a silence of this length,
# the next attempt comes within the same time.
_NETWORK_SECONDS = 15.0
_UNKNOWN_SHAPE = "a collective whose shape is known at run time only"
_LONGEST_LINE = 120  # characters of the user's line that errors show
_MAX_LISTED = 8  # workers listed in an error; more are counted
_numbers = itertools.count()  # equal on all workers, as strategies are


class Watch:
    """Threads that watch what this worker waits in."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        count: Callable[[], Counts],
        pending_keys: Callable[[], Mapping[Group, int]] = dict,
    ):
        self._strategy = strategy
        self._count = count
        self._pending_keys = pending_keys
        self._limit = workers.timeout_seconds()
        self._tracing_limit = workers.tracing_timeout_seconds()
        self._interval = min(2.0, self._limit / 10)
        self._key = f"tf_dgc/watch/{next(_numbers)}"
        # Waits outside of collectives, in which all workers take part.
        self._started = 0
        self._finished = 0
        self._purpose = ""  # of the current one
        # Collectives that an error ended: TensorFlow never counts them as finished.
        self._aborted: dict[Group, int] = {}
        self._aborted_keys: Mapping[Group, int] = {}
        self._published: Position | None = None
        self._published_at = -math.inf
        self._beats = itertools.count(1)
        self._peer_beats: dict[str, tuple[int, float]] = {}  # and when it changed
        self._counts: Counts = {}
        self._waiting_since = time.monotonic()
        self._excused_until = self._waiting_since
        self._last_progress = self._waiting_since  # of any worker, as far as known
        self._progress: Any = None  # counts of all workers when they were last read
        self._contacted: set[str] = set()  # workers whose position was read
        self._turns = itertools.count()
        self._stop = threading.Event()
        # Several threads: one that waits for a slow network must not delay the others.
        self._threads = [
            threading.Thread(target=target, name="tf_dgc", daemon=True)
            for target in (self._run_publisher, self._run_checks, self._run_watchdog)
        ]
        self._watchdog: watchdog.Watchdog | None = None
        self._main_thread: Any = None  # state of the main thread at the last look

    def start(self) -> None:
        """Start the threads; they end before the interpreter does."""
        peers = workers.other_names(self._strategy)
        addresses = workers.addresses(self._strategy.cluster_resolver.cluster_spec())
        self._watchdog = watchdog.start(
            self._name(workers.own_name(self._strategy)),
            [addresses[peer] for peer in peers],
            self._limit,
        )
        for thread in self._threads:
            thread.start()
        atexit.register(self._end)

    @contextlib.contextmanager
    def waiting(self, purpose: str) -> Iterator[None]:
        """Watch the wait within as if it were a collective."""
        self._started += 1
        self._purpose = purpose
        try:
            yield
        finally:
            self._finished += 1
            self._purpose = ""

    def _end(self) -> None:
        self._stop.set()
        if self._watchdog is not None:
            self._watchdog.end()
        for thread in self._threads:
            thread.join(1.0)  # it may wait for a coordinator that does not answer
        if failures.reported.is_set():
            failures.limit_teardown()

    # What the threads do

    def _run_publisher(self) -> None:
        self._repeat(lambda: self._publish(self._position()))
        with contextlib.suppress(tf.errors.OpError):
            failures.note_end(self._strategy)

    def _run_checks(self) -> None:
        reason = self._repeat(self._check)
        if reason is not None:
            self._give_up(reason)

    def _run_watchdog(self) -> None:
        self._repeat(self._tell_watchdog)

    def _repeat(self, task: Callable[[], str | None]) -> str | None:
        """Repeat a task until it returns a reason to give up, or the watch ends."""
        # An error of the coordination service means that the cluster has failed, and
        # TensorFlow has ended its collectives. Any other error is a fault of the watch,
        # printed once; without the watch, this worker might wait for ever.
        printed: set[type] = set()
        while not self._stop.is_set():  # at once: a worker may soon be stuck
            try:
                if (reason := task()) is not None:
                    return reason
            except tf.errors.OpError:
                pass
            except Exception as error:
                if type(error) not in printed:
                    printed.add(type(error))
                    sys.stderr.write("tf_dgc: error in the watch, which continues:\n")
                    traceback.print_exc()
            self._stop.wait(self._interval)
        return None

    def _check(self) -> str | None:
        reason = self._reason_to_give_up(self._position())
        if reason is None:
            self._contact_next_peer()
        return reason

    def _tell_watchdog(self) -> None:
        """Tell the watchdog of progress, which waiting in a collective counts as."""
        position = self._position()
        frame, instruction = _main_thread_place()
        state = position.counts, id(frame), instruction
        progress = bool(position.waits_in) or state != self._main_thread
        self._main_thread = state
        if self._watchdog is not None:
            self._watchdog.tell(progress)

    # This worker's position

    def _position(self) -> Position:
        counts, keys = self._count(), self._pending_keys()
        own_threads = {thread.ident for thread in self._threads}
        with failures.thread_frames() as frames:
            others = [f for i, f in frames.items() if i not in own_threads]
            idle = not tracing.is_executing(others)
            is_tracing = any(map(tracing.is_tracing, others))
            place = failures.source_location(failures.main_thread(frames))
        steady = self._count() == counts  # nothing was started or finished meanwhile
        if idle and steady:  # what has not finished never will
            self._aborted = {g: started - done for g, (started, done) in counts.items()}
            self._aborted_keys = keys
        position = Position(
            {group: self._adjusted(group, *pair) for group, pair in counts.items()},
            is_tracing,
            place,
            failures.source_line(place)[:_LONGEST_LINE],
        )
        if steady:
            for group in position.waits_in:
                if collective := self._pending(group, keys.get(group, 0), place):
                    position.collectives[group] = collective
        return position

    def _adjusted(self, group: Group, started: int, done: int) -> tuple[int, int]:
        done += self._aborted.get(group, 0)
        if group is not None:
            return started, done
        return started + self._started, done + self._finished

    def _pending(self, group: Group, key: int, place: str) -> Collective | None:
        """Return the collective that waits; `key` sums the keys of unfinished ones."""
        if group is None and (purpose := self._purpose):
            return Collective.of_purpose(purpose)
        key -= self._aborted_keys.get(group, 0)
        traced = tf_collectives.find_collective(key)
        if traced is None:
            return Collective(key, _UNKNOWN_SHAPE) if key else None
        name = f"{traced.kind} of {traced.dtype} {traced.shape}"
        traced_at = failures.place_in(traced.places)
        if traced_at not in ("", place):
            name = f"{name}, traced at {traced_at}"
        return Collective(key, name)

    def _publish(self, position: Position) -> None:
        if not self._is_news(position):
            return
        position = dataclasses.replace(position, beat=next(self._beats))
        key = f"{self._key}/{workers.own_name(self._strategy)}"
        with contextlib.suppress(tf.errors.NotFoundError):
            coordination.unpublish(key, self._limit)
        coordination.publish(key, position.to_json(), self._limit)
        self._published, self._published_at = position, time.monotonic()

    def _is_news(self, position: Position) -> bool:
        """Whether to publish a position now."""
        # At changes, and from time to time while tracing. Otherwise the interval is
        # `_limit / 2`: the others read the position after they have waited that long
        # and act on it after `_limit`. Publishing more often would cost packets.
        if self._published is None:
            return True
        age = time.monotonic() - self._published_at
        if position.tracing and age >= self._limit / 4:
            return True
        if position.waits_in or position.tracing != self._published.tracing:
            return position != self._published
        return age >= self._limit / 2 and position != self._published

    # The other workers' positions

    def _reason_to_give_up(self, position: Position) -> str | None:
        now = time.monotonic()
        if position.counts != self._counts or not position.waits_in:
            self._counts, self._waiting_since = position.counts, now
        waited = now - self._waiting_since
        if waited < self._limit / 2:
            return None
        index = {p: i for i, p in enumerate(workers.all_names(self._strategy))}
        peers = {
            peer: self._lookup(peer)
            for peer in workers.other_names(self._strategy)
            if position.waits_for(index[peer])
        }
        self._note_progress(peers)
        different = {
            peer: other
            for peer, other in peers.items()
            if other and positions.in_different_collectives(position, other)
        }
        if different:  # waiting longer does not help
            return self._different_collectives(position, different)
        behind = {
            peer: other
            for peer, other in peers.items()
            if other and positions.is_behind(position, other, index[peer])
        }
        if waited < self._tracing_limit:
            self._excused_until = max(self._excused_until, self._last_beat(behind))
        late = {peer: other for peer, other in behind.items() if not other.waits_in}
        if late or not self._contacted.issuperset(peers):
            patience, since = 0.0, self._waiting_since
        else:  # all wait for the network
            patience, since = min(self._limit, _NETWORK_SECONDS), self._last_progress
        if now - max(since, self._excused_until) < self._limit + patience:
            return None
        this_worker = workers.own_name(self._strategy)
        crossed = {
            peer: other
            for peer, other in behind.items()
            if positions.wait_for_each_other(
                position, index[this_worker], other, index[peer]
            )
        }
        if crossed and not late:
            return self._different_collectives(position, crossed)
        return (
            f"{self._name(this_worker)} has waited {waited:.0f} s in "
            f"{positions.describe_position(position)} {self._for_whom(peers, late)}. "
            f"If it is only slow, set {workers.TIMEOUT_VARIABLE} to more seconds than "
            f"{self._limit:g}"
        )

    def _last_beat(self, peers: dict[str, Position]) -> float:
        now = time.monotonic()
        times = [-math.inf]
        for peer, position in peers.items():
            if position.tracing:
                beat = self._peer_beats.get(peer)
                if beat is None or beat[0] != position.beat:
                    beat = self._peer_beats[peer] = position.beat, now
                times.append(beat[1])
        return max(times)

    def _note_progress(self, peers: dict[str, Position | None]) -> None:
        """Note when any worker was last known to start or finish a collective."""
        counts = {p: other.counts for p, other in peers.items() if other is not None}
        self._contacted |= counts.keys()
        before = self._progress
        self._progress = self._counts, counts
        if before is None or before[0] != self._counts:
            self._last_progress = self._waiting_since
        elif any(before[1].get(peer) != count for peer, count in counts.items()):
            self._last_progress = time.monotonic()

    def _contact_next_peer(self) -> None:
        """Read a position while the network is free; later it may be too slow."""
        unknown = sorted(set(workers.other_names(self._strategy)) - self._contacted)
        if unknown:  # in turn: each that is not there yet takes time
            peer = unknown[next(self._turns) % len(unknown)]
            if self._lookup(peer) is not None:
                self._contacted.add(peer)

    def _lookup(self, peer: str) -> Position | None:
        try:
            text = coordination.lookup(f"{self._key}/{peer}", 2 * self._interval)
        except tf.errors.DeadlineExceededError:
            return None
        return Position.from_json(text)

    # The error

    def _different_collectives(
        self, position: Position, peers: dict[str, Position]
    ) -> str:
        """Return the reason if workers are in collectives that never meet."""
        by_name = {workers.own_name(self._strategy): position, **peers}
        names = [name for name in workers.all_names(self._strategy) if name in by_name]
        items = [self._where(name, by_name[name]) for name in names[:_MAX_LISTED]]
        if len(names) > _MAX_LISTED:
            items.append(f"and {len(names) - _MAX_LISTED} more workers")
        return failures.itemize(
            f"the workers {failures.IN_DIFFERENT_COLLECTIVES}, and wait for each other",
            items,
        )

    def _where(self, worker: str, position: Position) -> str:
        pending = [collective.name for collective in position.collectives.values()]
        names = " and ".join(pending) or positions.describe_position(position)
        line = f": {position.line}" if position.line else ""
        return f"{self._name(worker)} at {position.place}{line} [{names}]"

    def _for_whom(
        self, peers: dict[str, Position | None], late: dict[str, Position]
    ) -> str:
        names = [f"{self._name(p)} (at {other.place})" for p, other in late.items()]
        silent = [peer for peer, other in peers.items() if other is None]
        # A worker that was contacted before and is silent now is stuck: its process
        # still sends heartbeats, or the cluster would have failed.
        stuck = [peer for peer in silent if peer in self._contacted]
        if late or stuck:
            names += map(self._name, stuck)
            return f"for {' and '.join(names)}, {failures.DOES_NOT_COME}"
        if silent:
            return (
                f"for {' and '.join(map(self._name, silent))}, which has sent nothing "
                "yet: it has not called `tf_dgc.prepare`, or the network is too slow"
            )
        return (
            f"for data from {' and '.join(map(self._name, peers))}, which waits in a "
            "collective too: the network is too slow for it, or loses too many packets"
        )

    def _name(self, worker: str) -> str:
        return workers.full_name(self._strategy, worker)

    def _give_up(self, reason: str) -> None:
        """End the collective; end the process if its main thread stays stuck."""
        before = _main_thread_place()
        start_daemon_thread(lambda: _end_collectives(reason), "tf_dgc")
        if self._stop.wait(_STUCK_SECONDS):
            return
        if _main_thread_place() == before:
            text = failures.error_text(self._strategy, reason)
            sys.stderr.write(f"{text} The main thread is stuck; ending this process.\n")
            sys.stderr.flush()
            os._exit(STUCK_EXIT_CODE)


def _main_thread_place() -> tuple[FrameType | None, int | None]:
    """Return the frame and the instruction that the main thread executes."""
    with failures.thread_frames() as frames:
        frame = failures.main_thread(frames)
        return frame, frame and frame.f_lasti


def _end_collectives(reason: str) -> None:
    # Here first, in case the others cannot be reached.
    coordination.abort_collectives(f"tf_dgc: {reason}")
    failures.report_to_workers(reason)
