"""What a run is asked for, and how it is asked for again."""

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
"""Keys of a row. It has `processor` and `onednn`, whether TensorFlow used oneDNN, too
where a process ran to its end, but for the first days; `error` if there is no value;
and `resumed_at` if the run went on at other commits than `commit`, where it was begun:
these, in their order.
"""

INTERRUPTED = 75  # the exit status of a run that is to be gone on with


@dataclasses.dataclass(frozen=True)
class Spec:
    """A run.

    Attributes:
        task: name of the task.
        method: `dense` (float32), `dgc`, or the name of another method.
        settings: what differs from the plan's usual: `model`, arguments of the task;
            `recipe`, fields of its recipe; `method`, arguments of the method;
            `optimizer`, those of `CompressedOptimizer` around it; `tuning`, true for
            runs that do not see the test set.
        workers: number of workers.
        seed: seed; runs of one seed are a pair.
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
        """Return what a row, or other dictionary, was asked for."""
        return cls(**{f.name: row[f.name] for f in dataclasses.fields(cls)})

    @property
    def key(self):
        """Name of the run, for files: the same for the same run, and for no other."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{self.task}-{self.method}-{self.workers}-{self.seed}-{digest}"

    def saved_in(self, work):
        """Return the file in which a run remembers what it needs to go on.

        Args:
            work: folder of all runs; see `single.Run`.
        """
        return pathlib.Path(work) / "running" / f"{self.key}.npz"

    @property
    def command(self):
        """Command that runs it again, from the project's root."""
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
        given = [f"--{name}={value}" for name, value in flags.items()]
        if self.settings:
            given.append(f"--settings={json.dumps(self.settings, sort_keys=True)}")
        return ["one", *given]
