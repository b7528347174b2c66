"""Measures the share of the work that gets done while workers fail again and again.

    python benchmarks/goodput.py --workers 2 --every 60 --minutes 20
    python benchmarks/goodput.py --workers 2,4 --optimizers dgc --optimizers local

For each optimizer and number of workers `tf-dgc run --max-restarts` trains a small
model twice, for the same number of steps: undisturbed, and with a fault every `--every`
seconds on average, in a random worker: SIGKILL, or SIGSTOP, after which the worker is
silent. Times between faults are exponential, and their seed is fixed.

goodput     time of the undisturbed run divided by that of the disturbed one
lost        seconds from a fault until training is where it was: the sum of the
            following columns
detection   until the launcher says that a worker failed
shutdown    until it starts all workers again
python      until the last worker's interpreter runs the script
imports     until TensorFlow, Keras and the package are imported everywhere
build       until `fit` begins: strategy, model, restored state
tracing     until the first step has ended
repeated    until the step is reached at which the fault came
equal       whether the final weights are bit for bit those of the undisturbed run

The workers share this machine. A step lasts at least `--step_seconds`, so that four
workers do not compete for two cores.
"""

import itertools
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from absl import app, flags
from common import reporting

PHASES = [
    *("detection", "shutdown", "python", "imports", "build", "tracing"),
    "repeated",
]
COLUMNS = [
    ("optimizer", "optimizer", ""),
    ("workers", "workers", "d"),
    ("faults", "faults", "d"),
    ("goodput", "goodput", ".1%"),
    ("lost", "lost (s)", ".1f"),
    *((phase, f"{phase} (s)", ".1f") for phase in PHASES),
    ("equal", "equal", ""),
]
_WORKER = pathlib.Path(__file__).parent / "workers" / "goodput_worker.py"
_RESTARTS = 10_000

_WORKERS = flags.DEFINE_list("workers", ["2"], "Numbers of workers.")
_OPTIMIZERS = flags.DEFINE_multi_enum(
    "optimizers", ["dgc"], ["dgc", "local"], "Optimizers, each by a flag."
)
_EVERY = flags.DEFINE_float("every", 60.0, "Mean seconds between faults.", 1.0)
_MINUTES = flags.DEFINE_float("minutes", 20.0, "Length of the undisturbed run.", 0.05)
_STOPS = flags.DEFINE_float(
    "stops", 0.2, "Share of SIGSTOP among the faults.", 0.0, 1.0
)
_STEP_SECONDS = flags.DEFINE_float("step_seconds", 0.05, "Shortest time of a step.")
_SAVE_EVERY = flags.DEFINE_integer("save_every", 40, "Steps between backups.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the faults.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")


def main(_):
    """Run and report."""
    rows = [
        measure(optimizer, int(workers))
        for optimizer in _OPTIMIZERS.value
        for workers in _WORKERS.value
    ]
    reporting.report(rows, COLUMNS, "Work done while workers fail", _JSON.value)


def measure(optimizer, workers):
    """Return the row of an optimizer and a number of workers."""
    steps_per_epoch = 200
    epochs = round(60 * _MINUTES.value / _STEP_SECONDS.value / steps_per_epoch)
    settings = {
        "optimizer": optimizer,
        "steps": max(1, epochs) * steps_per_epoch,
        "steps_per_epoch": steps_per_epoch,
        "batch_size": 16 * workers,
        "step_seconds": _STEP_SECONDS.value,
        "save_every": _SAVE_EVERY.value,
    }
    undisturbed = Training(settings, workers).run()
    disturbed = Training(settings, workers).run(random.Random(_SEED.value))
    return {
        "optimizer": optimizer,
        "workers": workers,
        "steps": settings["steps"],
        "faults": len(disturbed.faults),
        "goodput": undisturbed.seconds / disturbed.seconds,
        "equal": "yes" if disturbed.digests == undisturbed.digests else "NO",
        **disturbed.mean_phases(),
    }


class Training:
    """A run of `tf-dgc run`, with faults if there is a generator of random numbers."""

    def __init__(self, settings, workers):
        self._directory = tempfile.TemporaryDirectory(prefix="goodput-")
        self._path = pathlib.Path(self._directory.name)
        self._settings = {**settings, "directory": str(self._path)}
        self._workers = workers
        self.faults = []  # (time, step at that time)
        self.said = []  # (time, line) of the launcher
        self.seconds = 0.0

    def run(self, faults=None):
        """Train to the end; return this object."""
        command = [sys.executable, "-m", "tf_dgc", "run", f"--workers={self._workers}"]
        command += [f"--max-restarts={_RESTARTS}", f"--log-dir={self._path / 'logs'}"]
        command += [str(_WORKER), json.dumps(self._settings)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as launcher:
            reader = threading.Thread(target=self._read, args=(launcher.stdout,))
            reader.start()
            try:
                if faults is not None:
                    self._cause(faults, launcher)
                if launcher.wait():
                    raise RuntimeError("".join(line for _, line in self.said[-20:]))
            finally:
                launcher.terminate()
                reader.join()
        steps = self._events("step")
        self.seconds = steps[-1]["time"] - steps[0]["time"]
        self.digests = sorted({row["digest"] for row in self._events("end")})
        return self

    def _read(self, lines):
        for line in lines:
            self.said.append((time.time(), line))

    def _cause(self, faults, launcher):
        """Kill or stop a random worker from time to time, once training runs."""
        due = None
        while launcher.poll() is None:
            time.sleep(0.05)
            pids = self._training_pids()
            if not pids:
                due = None
                continue
            if due is None:
                due = time.time() + faults.expovariate(1 / _EVERY.value)
            if time.time() >= due:
                number = signal.SIGKILL
                if faults.random() < _STOPS.value:
                    number = signal.SIGSTOP
                step = self._events("step")[-1]["step"]
                try:
                    os.kill(faults.choice(pids), number)
                except ProcessLookupError:  # training has just ended
                    continue
                self.faults.append((time.time(), step))
                self._wait_for_restart(launcher)
                due = None

    def _wait_for_restart(self, launcher):
        attempts = self._num_attempts()
        while launcher.poll() is None and self._num_attempts() == attempts:
            time.sleep(0.05)

    def _num_attempts(self):
        return sum("starting all" in line for _, line in self.said)

    def _training_pids(self):
        """Return the processes of the workers once all take steps, else nothing."""
        latest = [self._last_event(rank) for rank in range(self._workers)]
        if any(row is None or row["event"] != "step" for row in latest):
            return []
        attempts = {row["attempt"] for row in latest}
        if attempts != {self._num_attempts() + 1}:
            return []
        return [row["pid"] for row in latest]

    def _events(self, event):
        """Return the events of one kind of the first worker, in order; ends of all."""
        ranks = range(self._workers) if event == "end" else [0]
        return [r for k in ranks for r in self._read_events(k) if r["event"] == event]

    def _last_event(self, rank):
        """Return the last event of a worker, or None, from the end of its file."""
        # Called many times a second: reading whole files would slow the workers down.
        events = self._read_events(rank, num_bytes=1000)
        return events[-1] if events else None

    def _read_events(self, rank, num_bytes=None):
        """Return the complete events in a worker's file, or in its last bytes."""
        path = self._path / f"events-{rank}.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            if num_bytes is not None:
                file.seek(max(0, path.stat().st_size - num_bytes))
            lines = file.read().decode().splitlines()
        return [
            json.loads(line)
            for line in lines
            if line.startswith("{") and line.endswith("}")
        ]

    def mean_phases(self):
        """Return the mean seconds of each phase of the faults, and their sum."""
        phases = [self._phases(number) for number in range(len(self.faults))]
        if not phases:
            return dict.fromkeys(["lost", *PHASES], 0.0)
        means = {n: statistics.mean(phase[n] for phase in phases) for n in PHASES}
        return {"lost": sum(means.values()), **means}

    def _phases(self, number):
        fault, step = self.faults[number]
        attempt = number + 2  # the first attempt is 1
        failed = self._said_after(fault, r"failed with exit code")
        restarted = self._said_after(fault, r"starting all")
        rows = [
            row
            for rank in range(self._workers)
            for row in self._read_events(rank)
            if row["attempt"] >= attempt
        ]
        python, imports, train = (
            max(
                row["time"]
                for row in rows
                if row["event"] == event and row["attempt"] == attempt
            )
            for event in ("python", "imports", "train")
        )
        steps = [row for row in rows if row["event"] == "step"]
        first = min(row["time"] for row in steps)
        # The next fault may come first; its loss then counts twice.
        reached = min(row["time"] for row in steps if row["step"] >= step)
        times = [fault, failed, restarted, python, imports, train, first, reached]
        spans = [after - before for before, after in itertools.pairwise(times)]
        return dict(zip(PHASES, spans, strict=True))

    def _said_after(self, moment, pattern):
        return next(
            t for t, line in self.said if t > moment and re.search(pattern, line)
        )


if __name__ == "__main__":
    app.run(main)
