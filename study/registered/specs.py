"""Specs of runs, their keys and commands."""

import dataclasses
import hashlib
import json
import pathlib
import shlex
from typing import Any

KEYS = [
    *("task", "method", "settings", "workers", "seed", "steps", "metric", "value"),
    *("curve", "bytes_per_worker", "seconds", "commit", "command", "started"),
]
"""Keys that every row has.

Rows of finished runs also have `processor` and `onednn` (whether TensorFlow used
oneDNN), except the first ones. Rows without a value have `error`. Rows of runs that
resumed at other commits than `commit` have them in order as `resumed_at`.
"""

INTERRUPTED = 75  # exit status of a run that can be resumed


@dataclasses.dataclass(frozen=True)
class Spec:
    """A run.

    Attributes:
        task: name of the task.
        method: `dense` (float32), `dgc`, or the name of another method.
        settings: deviations from the defaults: `model`, arguments of the task;
            `recipe`, fields of its recipe; `method`, arguments of the method;
            `optimizer`, further arguments of `CompressedOptimizer`; `tuning`, true for
            runs that do not use the test set.
        workers: number of workers.
        seed: seed; runs with the same seed form a pair.
        steps: number of steps.
    """

    task: str
    method: str
    settings: dict[str, Any]
    workers: int
    seed: int
    steps: int

    @classmethod
    def of(cls, row):
        """Return the spec of a row, or of another dictionary with the same keys."""
        return cls(**{f.name: row[f.name] for f in dataclasses.fields(cls)})

    @property
    def key(self):
        """Unique name of the run, also a file name."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{self.task}-{self.method}-{self.workers}-{self.seed}-{digest}"

    def checkpoint(self, work):
        """Return the path of the run's checkpoint.

        Args:
            work: folder of all runs; see `run.Run`.
        """
        return pathlib.Path(work) / "running" / f"{self.key}.npz"

    @property
    def command(self):
        """Command that repeats the run, from the project's root."""
        return shlex.join(["python", "study/evidence.py", *self.arguments()])

    def arguments(self):
        """Return the arguments of `evidence.py`."""
        flags = {
            "task": self.task,
            "method": self.method,
            "workers": self.workers,
            "seed": self.seed,
            "steps": self.steps,
        }
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        if self.settings:
            settings = json.dumps(self.settings, sort_keys=True)
            arguments.append(f"--settings={settings}")
        return ["one", *arguments]
