"""Takes up the plan where it stands: a process for each run, one after another."""

import contextlib
import dataclasses
import fcntl
import pathlib
import re
import signal
import subprocess
import time

from common import reporting

from registered import plan, rows
from registered.specs import INTERRUPTED, Spec

ATTEMPTS = 3  # of a run that ends by itself, without a row
_HOW = "%s ended by itself %d times, %s. Nothing further is run:\n%s"


class Queue:
    """What is pending, run by run.

    Args:
        work: folder of all runs; see `single.Run`.
        command: what starts a run, before its arguments.
        folders: further arguments.
        pending: function from rows to what is still to be run.
        pause: seconds before a run is tried again.
    """

    def __init__(self, work, command, folders=(), pending=plan.pending, pause=10.0):
        self._work = pathlib.Path(work)
        self._command, self._folders = command, folders
        self._pending, self._pause = pending, pause
        self._child = self._lock = self._last_failure = None
        self._stopped = False

    def run(self):
        """Run until nothing is pending; return whether it came to that.

        A signal ends the run in progress, after it has saved what it remembers.

        Raises:
            RuntimeError: if another process works in the same folder; and where what
                fails is not a run, but what all of them need: if one ends without
                having saved a step, or two after each other end alike.
        """
        self._work.mkdir(parents=True, exist_ok=True)
        with open(self._work / "lock", "w") as lock, self._signals():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RuntimeError(f"Somebody else runs in {self._work}.") from error
            self._lock = lock.fileno()
            while todo := self._pending(self._rows()):
                self._attempt(todo[0])
                if self._stopped:
                    return False
        return True

    def _rows(self):
        return rows.read(self._work / "runs")

    def _attempt(self, spec):
        known, attempt = self._count(spec), 0
        while attempt < ATTEMPTS:
            saved = self._saved_at(spec)
            status, message = self._start(spec)
            if self._stopped:
                return
            if self._count(spec) > known:
                self._last_failure = None
                return
            attempt += status != INTERRUPTED
            print(f"{spec.key} ended with {status}, attempt {attempt}", flush=True)
            time.sleep(self._pause)
        error = f"status {status}: {message}"
        if self._saved_at(spec) == saved:
            how = "the last time before it had saved a step"
            raise RuntimeError(_HOW % (spec.key, ATTEMPTS, how, error))
        failure = status, _last_line(message)
        if failure == self._last_failure:
            how = "as the run before it"
            raise RuntimeError(_HOW % (spec.key, ATTEMPTS, how, error))
        self._last_failure = failure
        rows.append(self._work / "runs", _failure(spec, error))

    def _count(self, spec):
        return sum(Spec.of(row) == spec for row in self._rows())

    def _saved_at(self, spec):
        file = spec.saved_in(self._work)
        return file.stat().st_mtime_ns if file.exists() else None

    def _start(self, spec):
        print(f"{rows.now()} {spec.command}", flush=True)
        log = self._work / "last_error"
        folders = [f"--work={self._work}", *self._folders]
        with open(log, "w") as errors:
            command = [*self._command, *spec.arguments(), *folders]
            # With the lock: nobody else begins while a run is left behind.
            self._child = subprocess.Popen(
                command,
                stderr=errors,
                start_new_session=True,
                pass_fds=[self._lock],
            )
            give_way(self._child.pid)
            if self._stopped:
                self._child.terminate()
            status = self._child.wait()
        return status, log.read_text(errors="replace")[-1000:]

    @contextlib.contextmanager
    def _signals(self):
        # A run is in a session of its own, and hears of nothing by itself.
        numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
        before = [signal.signal(number, self._stop) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _stop(self, number, frame):
        del number, frame
        self._stopped = True
        if self._child and self._child.poll() is None:
            self._child.terminate()


def give_way(pid):
    """Let other sessions go before that of a process.

    Where Linux divides processors by sessions, `nice` counts only within one.
    """
    with contextlib.suppress(OSError):
        pathlib.Path(f"/proc/{pid}/autogroup").write_text("19")


def again(work, key):
    """Return what is pending where a run is to be tried again, as for `Queue`.

    Args:
        work: folder of all runs.
        key: key of a run of which a process failed; see `specs.Spec`.

    Raises:
        ValueError: if no run of this key ended so, or one came to its end.
    """
    found = [r for r in rows.read(pathlib.Path(work) / "runs") if Spec.of(r).key == key]
    # What came to its end comes to the same end again.
    if not found or any(row["bytes_per_worker"] is not None for row in found):
        raise ValueError(
            "`key` must be that of a run of which a process failed, and that has not "
            f"come to its end since. Received: key={key!r}, of which there are "
            f"{len(found)} rows"
        )
    spec = Spec.of(found[0])

    def pending(finished):
        tried = sum(Spec.of(row) == spec for row in finished) > len(found)
        return [] if tried else [spec]

    return pending


def _last_line(message):
    """Return what failures that are alike share: the last line, without numbers."""
    return re.sub(r"\d+", "", message.strip().rpartition("\n")[2])


def _failure(spec, message):
    """Return the row of a run that did not come to its end."""
    return {
        **dataclasses.asdict(spec),
        **{"metric": None, "value": None, "curve": []},
        **{"bytes_per_worker": None, "seconds": None},
        **{"commit": reporting.commit(), "command": spec.command},
        "started": rows.now(),
        "error": message,
    }
