"""A resumable run."""

import io
import json
import math
import pathlib
import signal
import time

import numpy as np
from training.replicas import Replicas

from registered import registry, rows
from registered.specs import INTERRUPTED
from tf_dgc._internals import tracing
from tf_dgc.multiworker.launch import onednn

EVALUATIONS = 10  # per run


class Run:
    """A run that saves a checkpoint after its first step and every few minutes.

    A resumed run gives the same bits as an uninterrupted one. While the folder has a
    file `PAUSE`, the run waits between two steps.

    Args:
        spec: a `specs.Spec`.
        data: folder of the data sets.
        work: folder of checkpoints (`running`) and of finished rows (`runs`).
        strategy: strategy of `trainer.make_strategy`.
        commit: commit of this checkout.
        save_every: seconds between two checkpoints.
        other_commit: whether to resume a run that was begun at another commit. The row
            then has both commits, and the result may differ in bits.

    Raises:
        ValueError: if the run was begun at another commit and `other_commit` is false.
    """

    def __init__(
        self,
        spec,
        data,
        work,
        strategy,
        commit,
        save_every=180.0,
        other_commit=False,
    ):
        work = pathlib.Path(work)
        self._spec, self._work, self._save_every = spec, work, save_every
        self._checkpoint = spec.checkpoint(work)
        self._commits = self._commits_with(commit, other_commit)
        self._pause = work / "PAUSE"
        self._stopped = False
        self._task = registry.make_task(spec, data)
        self._replicas = Replicas(
            self._task,
            lambda: registry.make_optimizer(spec, self._task),
            strategy,
            spec.seed,
        )
        self._curve, self._losses, self._seconds = [], [], 0.0
        self._started = rows.now()
        if self._checkpoint.exists():
            self._restore()

    def finish(self):
        """Train to the end, or until the loss is not finite, and append the row.

        Raises:
            SystemExit: with `INTERRUPTED`, after saving, if a signal interrupts.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        # Saving the first step tells the queue that the run was able to start.
        saved_at = -math.inf
        every = max(1, self._spec.steps // EVALUATIONS)
        while self._replicas.step < self._spec.steps and self._finite():
            self._advance(every)
            if self._stopped or time.monotonic() - saved_at > self._save_every:
                self.save()
                saved_at = time.monotonic()
            self._wait_while_paused()
        rows.append(self._work / "runs", self.row())
        self._checkpoint.unlink(missing_ok=True)

    def row(self):
        """Return the row of the run so far."""
        value = self._curve[-1]["value"] if self._finite() and self._curve else None
        spec = self._spec
        row = {
            "task": spec.task,
            "method": spec.method,
            "settings": spec.settings,
            "workers": spec.workers,
            "seed": spec.seed,
            "steps": spec.steps,
            "metric": self._task.metric,
            "value": value,
            "curve": self._curve,
            "bytes_per_worker": self._replicas.sent_bytes,
            "seconds": round(self._seconds, 1),
            "commit": self._commits[0],
            "command": spec.command,
            "started": self._started,
            "processor": onednn.processor(),
            "onednn": tracing.uses_onednn(),
            **self._error(value),
        }
        if self._commits[1:]:
            row["resumed_at"] = self._commits[1:]
        return row

    def _error(self, value):
        if not self._finite():
            return {"error": "the loss is not finite"}
        if value is None and self._replicas.step == self._spec.steps:
            return {"error": f"the {self._task.metric} is not finite"}
        return {}

    def save(self):
        """Save a checkpoint with the complete state of the run."""
        notes = {
            "curve": self._curve,
            "losses": self._losses,
            "seconds": self._seconds,
            "started": self._started,
            "commit": self._commits[0],
            "resumed_at": self._commits[1:],
        }
        content = io.BytesIO()
        np.savez(content, notes=json.dumps(notes), **self._replicas.state())
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        rows.replace(self._checkpoint, content.getvalue())

    def _commits_with(self, commit, other_commit):
        """Return the commits of the run in order, including this one."""
        if not self._checkpoint.exists():
            return [commit]
        with np.load(self._checkpoint) as state:
            notes = json.loads(str(state["notes"]))
        commits = [notes["commit"], *notes.get("resumed_at", [])]
        if commits[-1] == commit:
            return commits
        if not other_commit:
            raise ValueError(
                f"A run goes on at the commit that it was begun at, {commits[-1]}, "
                "unless `other_commit=True` (`--other_commit`). Received: "
                f"commit={commit!r}, and {self._checkpoint}"
            )
        return [*commits, commit]

    def _restore(self):
        with np.load(self._checkpoint) as state:
            notes = json.loads(str(state["notes"]))
            self._replicas.restore(state)
        self._curve, self._losses = notes["curve"], notes["losses"]
        self._seconds, self._started = notes["seconds"], notes["started"]

    def _advance(self, every):
        start = time.monotonic()
        self._losses.append(self._replicas.train())
        step = self._replicas.step
        at_end = step == self._spec.steps
        evaluates = (step % every == 0 and self._spec.steps - step >= every) or at_end
        value = self._replicas.evaluate() if evaluates and self._finite() else None
        if value is not None and not math.isfinite(value):
            value = None  # the loss may be finite, and training may recover
        self._seconds += time.monotonic() - start
        if evaluates or not self._finite():
            self._add_point(value)

    def _add_point(self, value):
        self._curve.append(
            {
                "step": self._replicas.step,
                "bytes": self._replicas.sent_bytes,
                "seconds": round(self._seconds, 1),
                "loss": float(np.mean(self._losses)) if self._finite() else None,
                "value": value,
            }
        )
        if self._finite():
            self._losses = []

    def _finite(self):
        return not self._losses or math.isfinite(self._losses[-1])

    def _wait_while_paused(self):
        if self._pause.exists() and not self._stopped:
            self.save()
        while self._pause.exists() and not self._stopped:
            time.sleep(1)
        if self._stopped:
            self.save()
            raise SystemExit(INTERRUPTED)

    def _stop(self, number, frame):
        del number, frame
        self._stopped = True
