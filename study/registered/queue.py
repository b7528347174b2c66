"""Does the pending runs of the plan, one process per run, one at a time."""

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

ATTEMPTS = 3  # of a run that keeps ending without a row
_ERROR = "%s ended by itself %d times, %s. Nothing further is run:\n%s"


class Queue:
    """Runs pending specs, each in a process.

    Args:
        work: folder of all runs; see `run.Run`.
        command: command that starts a run, without its arguments.
        options: further arguments of each run.
        pending: function from rows to the specs that remain.
        pause: seconds before a run is tried again.
    """

    def __init__(self, work, command, options=(), pending=plan.pending, pause=10.0):
        self._work = pathlib.Path(work)
        self._command, self._options = command, options
        self._pending, self._pause = pending, pause
        self._child = None
        self._lock = None
        self._last_failure = None
        self._stopped = False

    def run(self):
        """Run until nothing is pending; return False if a signal came before.

        A signal ends the run in progress after it has saved a checkpoint.

        Raises:
            RuntimeError: if another process works in the same folder; or if the cause
                of a failure is likely to affect all runs: a run ends before it has
                saved a step, or two runs in a row end with the same error.
        """
        self._work.mkdir(parents=True, exist_ok=True)
        with open(self._work / "lock", "w") as lock, self._signals():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RuntimeError(f"Somebody else runs in {self._work}.") from error
            self._lock = lock.fileno()
            while pending := self._pending(self._rows()):
                self._run_one(pending[0])
                if self._stopped:
                    return False
        return True

    def _rows(self):
        return rows.read(self._work / "runs")

    def _run_one(self, spec):
        num_rows, attempt = self._num_rows(spec), 0
        while attempt < ATTEMPTS:
            saved_at = self._saved_at(spec)
            status, message = self._start(spec)
            if self._stopped:
                return
            if self._num_rows(spec) > num_rows:
                self._last_failure = None
                return
            attempt += status != INTERRUPTED
            print(f"{spec.key} ended with {status}, attempt {attempt}", flush=True)
            time.sleep(self._pause)
        error = f"status {status}: {message}"
        if self._saved_at(spec) == saved_at:
            when = "the last time before it had saved a step"
            raise RuntimeError(_ERROR % (spec.key, ATTEMPTS, when, error))
        failure = status, _last_line(message)
        if failure == self._last_failure:
            how = "as the run before it"
            raise RuntimeError(_ERROR % (spec.key, ATTEMPTS, how, error))
        self._last_failure = failure
        rows.append(self._work / "runs", _failure_row(spec, error))

    def _num_rows(self, spec):
        return sum(Spec.of(row) == spec for row in self._rows())

    def _saved_at(self, spec):
        checkpoint = spec.checkpoint(self._work)
        return checkpoint.stat().st_mtime_ns if checkpoint.exists() else None

    def _start(self, spec):
        print(f"{rows.now()} {spec.command}", flush=True)
        log = self._work / "last_error"
        options = [f"--work={self._work}", *self._options]
        with open(log, "w") as errors:
            command = [*self._command, *spec.arguments(), *options]
            # The child inherits the lock, so no other queue starts while it lives.
            self._child = subprocess.Popen(
                command,
                stderr=errors,
                start_new_session=True,
                pass_fds=[self._lock],
            )
            lower_priority(self._child.pid)
            if self._stopped:
                self._child.terminate()
            status = self._child.wait()
        return status, log.read_text(errors="replace")[-1000:]

    @contextlib.contextmanager
    def _signals(self):
        # A run has its own session, and so does not get the signals of this one.
        numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
        handlers = [signal.signal(number, self._stop) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, handlers, strict=True):
                signal.signal(number, handler)

    def _stop(self, number, frame):
        del number, frame
        self._stopped = True
        if self._child and self._child.poll() is None:
            self._child.terminate()


def lower_priority(pid):
    """Lower the priority of a process's session.

    `nice` alone is not enough: with autogroups, Linux applies it only within a session.
    """
    with contextlib.suppress(OSError):
        pathlib.Path(f"/proc/{pid}/autogroup").write_text("19")


def retry(work, key):
    """Return a `pending` function for a `Queue` that repeats one failed run.

    Args:
        work: folder of all runs.
        key: key of a run whose process failed; see `specs.Spec`.

    Raises:
        ValueError: if no run of this key failed, or one has finished since.
    """
    failed = [
        row for row in rows.read(pathlib.Path(work) / "runs") if Spec.of(row).key == key
    ]
    # A finished run would give the same result again.
    if not failed or any(row["bytes_per_worker"] is not None for row in failed):
        raise ValueError(
            "`key` must be that of a run of which a process failed, and that has not "
            f"come to its end since. Received: key={key!r}, of which there are "
            f"{len(failed)} rows"
        )
    spec = Spec.of(failed[0])

    def pending(finished_rows):
        repeated = sum(Spec.of(row) == spec for row in finished_rows) > len(failed)
        return [] if repeated else [spec]

    return pending


def _last_line(message):
    """Return the last line without numbers, to compare failures."""
    return re.sub(r"\d+", "", message.strip().rpartition("\n")[2])


def _failure_row(spec, message):
    """Return the row of a run that did not finish."""
    return {
        **dataclasses.asdict(spec),
        **{"metric": None, "value": None, "curve": []},
        **{"bytes_per_worker": None, "seconds": None},
        **{"commit": reporting.commit(), "command": spec.command},
        "started": rows.now(),
        "error": message,
    }
