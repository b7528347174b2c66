"""The watch: ends a worker that others keep waiting, and says for whom it waited.

TensorFlow notices by itself, within seconds, when another process is gone, for its own
threads send heartbeats. It never notices when a process lives but does not come to the
collective that this worker waits in. That is for threads here: every worker publishes
how many collectives it has started, and who waits too long looks who is behind.
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
# What is lost TCP sends again, after pauses each twice as long as the one before: after
# a silence of so long, the next attempt comes within as long again.
_NETWORK_SECONDS = 15.0
_UNKNOWN_SHAPE = "a collective whose shape is known at run time only"
_LONGEST_LINE = 120  # characters of the user's line that are shown
_NAMED = 8  # workers in different collectives; more are counted
_numbers = itertools.count()  # equal on all workers, as strategies are


class Watch:
    """Watches over what a worker waits for in.

    Args:
        strategy: strategy of several workers.
        count: function that returns how many collectives of each group of workers this
            one has started and finished.
        pending_keys: function that returns the key of the collective of each group that
            this worker has started and not finished, or 0.

    Raises:
        ValueError: for environment variables that are not times.
    """

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
        self._started = self._finished = 0  # waits outside of collectives, for all
        self._purpose = ""  # of the wait outside of collectives that goes on
        self._lost: dict[Group, int] = {}  # which an error ended: they count no finish
        self._lost_keys: Mapping[Group, int] = {}
        self._published: Position | None = None
        self._published_at = -math.inf
        self._beats = itertools.count(1)
        self._beats_of_others: dict[str, tuple[int, float]] = {}  # and since when
        self._seen: dict[Group, tuple[int, int]] = {}
        self._since = self._excused = self._moved = time.monotonic()
        self._progress: Any = None  # of everyone, as last heard
        self._heard: set[str] = set()
        self._turns = itertools.count()
        self._stop = threading.Event()
        # One may have to wait long for a slow network, which the other is to notice.
        self._threads = [
            threading.Thread(target=target, name="tf_dgc", daemon=True)
            for target in (self._publish_often, self._blame_often, self._tell_often)
        ]
        self._watchdog: watchdog.Watchdog | None = None
        self._place: Any = None  # of the main thread, when it was last looked at

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
        """Count what is done within as a collective.

        Args:
            purpose: purpose of that, the same text on all workers.
        """
        self._started, self._purpose = self._started + 1, purpose
        try:
            yield
        finally:
            self._finished, self._purpose = self._finished + 1, ""

    def _end(self) -> None:
        self._stop.set()
        if self._watchdog is not None:
            self._watchdog.end()
        for thread in self._threads:
            thread.join(1.0)  # it may wait for who coordinates, in vain
        if failures.reported.is_set():
            failures.limit_teardown()

    def _publish_often(self) -> None:
        self._often(lambda: self._publish(self._look()))
        with contextlib.suppress(tf.errors.OpError):
            failures.note_end(self._strategy)

    def _blame_often(self) -> None:
        reason = self._often(self._blame_or_get_to_know)
        if reason is not None:
            self._give_up(reason)

    def _tell_often(self) -> None:
        self._often(self._tell_watchdog)

    def _tell_watchdog(self) -> None:
        """Tell the watchdog whether the main thread makes progress.

        One that waits in a collective does: the watch looks after it.
        """
        position, before = self._look(), self._place
        frame = failures.main_thread_frame()
        self._place = position.counts, id(frame), frame and frame.f_lasti
        if self._watchdog is not None:
            progress = bool(position.waits_in) or self._place != before
            self._watchdog.tell(progress)

    def _often(self, look: Callable[[], str | None]) -> str | None:
        """Look again and again until there is a reason to give up, or all ends.

        Without the coordination service there is nothing to watch with: the cluster
        has failed, and TensorFlow has ended its collectives. Any other error is a fault
        of the watch, told once; a worker that nobody watches might wait for ever.
        """
        told: set[type] = set()
        while not self._stop.is_set():  # at once: a worker may soon be stuck
            try:
                if (reason := look()) is not None:
                    return reason
            except tf.errors.OpError:
                pass
            except Exception as error:
                if type(error) not in told:
                    told.add(type(error))
                    sys.stderr.write("tf_dgc: a fault of the watch, which goes on:\n")
                    traceback.print_exc()
            self._stop.wait(self._interval)
        return None

    def _blame_or_get_to_know(self) -> str | None:
        reason = self._blame(self._look())
        if reason is None:
            self._get_to_know_one()
        return reason

    def _look(self) -> Position:
        """Return where this worker is."""
        counts, keys = self._count(), self._pending_keys()
        idle = not tracing.is_executing(self._frames_of_others())
        steady = self._count() == counts  # nothing was started or finished meanwhile
        # What nothing runs any more has ended.
        if idle and steady:
            self._lost = {g: started - done for g, (started, done) in counts.items()}
            self._lost_keys = keys
        place = failures.source_location(failures.main_thread_frame())
        position = Position(
            {g: self._with_others(g, *pair) for g, pair in counts.items()},
            any(map(tracing.is_tracing, self._frames_of_others())),
            place,
            failures.source_line(place)[:_LONGEST_LINE],
        )
        if steady:
            for group in position.waits_in:
                if collective := self._pending(group, keys.get(group, 0), place):
                    position.collectives[group] = collective
        return position

    def _pending(self, group: Group, key: int, place: str) -> Collective | None:
        """Return the collective of a group that this worker waits in, if it is known.

        Args:
            group: group that it waits in.
            key: sum of the keys of what was started there and did not finish.
            place: place in the user's program where it waits.
        """
        if group is None and (purpose := self._purpose):
            return Collective.of_purpose(purpose)
        key -= self._lost_keys.get(group, 0)
        launch = tf_collectives.launch_of(key)
        if launch is None:
            return Collective(key, _UNKNOWN_SHAPE) if key else None
        name = f"{launch.kind} of {launch.dtype} {launch.shape}"
        traced = failures.place_in(launch.places)
        if traced not in ("", place):
            name = f"{name}, traced at {traced}"
        return Collective(key, name)

    def _with_others(self, group: Group, started: int, done: int) -> tuple[int, int]:
        """Add what is no collective, and what an error ended."""
        done += self._lost.get(group, 0)
        if group is not None:
            return started, done
        return started + self._started, done + self._finished

    def _frames_of_others(self) -> list[FrameType]:
        mine = {thread.ident for thread in self._threads}
        return [f for i, f in sys._current_frames().items() if i not in mine]

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
        """Whether to publish a position now.

        At once if it waits in a collective, or begins or ends to trace. A worker that
        waits for this one reads its position after `_limit / 2`, and acts on it after
        `_limit`: so one that goes on without waiting, as in local steps, need not
        publish more often than that. It would at each look otherwise, as its place in
        the program changes. One that traces says from time to time that it still does.
        """
        if self._published is None:
            return True
        age = time.monotonic() - self._published_at
        if position.tracing and age >= self._limit / 4:
            return True
        if position.waits_in or position.tracing != self._published.tracing:
            return position != self._published
        return age >= self._limit / 2 and position != self._published

    def _blame(self, position: Position) -> str | None:
        """Return why to give up, if this worker has waited for too long."""
        now = time.monotonic()
        if position.counts != self._seen or not position.waits_in:
            self._seen, self._since = position.counts, now
        waited = now - self._since
        if waited < self._limit / 2:
            return None
        index = {p: i for i, p in enumerate(workers.all_names(self._strategy))}
        others = {
            peer: self._lookup(peer)
            for peer in workers.other_names(self._strategy)
            if position.waits_for(index[peer])
        }
        self._note_progress(others)
        different = {
            p: o for p, o in others.items() if o and positions.differ(position, o)
        }
        if different:  # that does not pass
            return self._in_different_ones(position, different)
        behind = {
            p: o
            for p, o in others.items()
            if o and positions.workers_behind(position, o, index[p])
        }
        if waited < self._tracing_limit:
            self._excused = max(self._excused, self._last_beat(behind))
        late = {p: o for p, o in behind.items() if not o.waits_in}
        if late or not self._heard.issuperset(others):
            patience, since = 0.0, self._since
        else:  # all wait for the network
            patience, since = min(self._limit, _NETWORK_SECONDS), self._moved
        if now - max(since, self._excused) < self._limit + patience:
            return None
        me = index[workers.own_name(self._strategy)]
        crossed = {
            p: o
            for p, o in behind.items()
            if positions.wait_for_each_other(position, me, o, index[p])
        }
        if crossed and not late:
            return self._in_different_ones(position, crossed)
        where = positions.describe_positions(position)
        return (
            f"{self._name(workers.own_name(self._strategy))} has waited {waited:.0f} "
            f"s in "
            f"{where} {self._for_whom(others, late)}. If it is only slow, set "
            f"{workers.TIMEOUT_VARIABLE} to more seconds than {self._limit:g}"
        )

    def _last_beat(self, others: dict[str, Position]) -> float:
        """Return when another worker was last known to trace, and not to be stuck."""
        now = time.monotonic()
        for peer, position in others.items():
            if position.tracing:
                beat = self._beats_of_others.get(peer)
                if beat is None or beat[0] != position.beat:
                    self._beats_of_others[peer] = position.beat, now
        tracing = [self._beats_of_others[p][1] for p, o in others.items() if o.tracing]
        return max(tracing, default=-math.inf)

    def _in_different_ones(
        self, position: Position, others: dict[str, Position]
    ) -> str:
        """Return the reason if workers are in collectives that never meet."""
        known = {workers.own_name(self._strategy): position, **others}
        names = [name for name in workers.all_names(self._strategy) if name in known]
        items = [self._where(name, known[name]) for name in names[:_NAMED]]
        if len(names) > _NAMED:
            items.append(f"and {len(names) - _NAMED} more workers")
        return failures.itemize(
            f"the workers {failures.IN_DIFFERENT_COLLECTIVES}, and wait for each other",
            items,
        )

    def _where(self, worker: str, position: Position) -> str:
        """Return where a worker waits: its place, the line there and the collective."""
        found = [collective.name for collective in position.collectives.values()]
        names = " and ".join(found) or positions.describe_positions(position)
        line = f": {position.line}" if position.line else ""
        return f"{self._name(worker)} at {position.place}{line} [{names}]"

    def _get_to_know_one(self) -> None:
        """Hear of a worker while the network is free; later it may be too slow."""
        unknown = sorted(set(workers.other_names(self._strategy)) - self._heard)
        if unknown:  # in turn: one that is not there yet takes the time of the others
            peer = unknown[next(self._turns) % len(unknown)]
            if self._lookup(peer) is not None:
                self._heard.add(peer)

    def _note_progress(self, others: dict[str, Position | None]) -> None:
        """Remember when anyone was last known to start or finish a collective."""
        heard = {p: o for p, o in others.items() if o is not None}
        self._heard |= heard.keys()
        before = self._progress
        self._progress = self._seen, {p: o.counts for p, o in heard.items()}
        if before is None or before[0] != self._seen:
            self._moved = self._since
        elif any(before[1].get(p) != at for p, at in self._progress[1].items()):
            self._moved = time.monotonic()

    def _for_whom(
        self, others: dict[str, Position | None], late: dict[str, Position]
    ) -> str:
        silent = [self._name(peer) for peer, where in others.items() if where is None]
        names = [f"{self._name(p)} (at {o.place})" for p, o in late.items()]
        # One that was heard of, and is not any more, is stuck: its process still sends
        # heartbeats, or the cluster would have failed.
        stuck = [p for p, where in others.items() if where is None and p in self._heard]
        if late or stuck:
            names += map(self._name, stuck)
            return f"for {' and '.join(names)}, {failures.DOES_NOT_COME}"
        if silent:
            return (
                f"for {' and '.join(silent)}, of which nothing is to be heard: it has "
                "not called `tf_dgc.prepare` yet, or the network is too slow"
            )
        return (
            f"for data from {' and '.join(map(self._name, others))}, which waits in a "
            "collective too: the network is too slow for it, or loses too much"
        )

    def _lookup(self, peer: str) -> Position | None:
        try:
            text = coordination.lookup(f"{self._key}/{peer}", 2 * self._interval)
        except tf.errors.DeadlineExceededError:
            return None
        return Position.from_json(text)

    def _name(self, worker: str) -> str:
        return workers.full_name(self._strategy, worker)

    def _give_up(self, reason: str) -> None:
        """Let the collective fail; if that does not free the main thread, end here."""
        before = failures.main_thread_frame()
        instruction = before and before.f_lasti
        start_daemon_thread(lambda: _fail(reason), "tf_dgc")
        if self._stop.wait(_STUCK_SECONDS):
            return
        after = failures.main_thread_frame()
        if after is before and (after and after.f_lasti) == instruction:
            text = failures.error_text(self._strategy, reason)
            sys.stderr.write(f"{text} The main thread is stuck; ending this process.\n")
            sys.stderr.flush()
            os._exit(STUCK_EXIT_CODE)


def _fail(reason: str) -> None:
    coordination.abort_collectives(f"tf_dgc: {reason}")  # even if nobody can be told
    failures.report_to_workers(reason)
