"""A run of `beginnings.py`, which goes on where it was interrupted."""

import keras
import numpy as np
from study.replicas import Replicas

from adaptive import beginnings

POINTS = 8  # of a curve


class Run:
    """A run on its way.

    Args:
        task: a `tasks.Task`.
        name: of `beginnings.RUNS`.
        seed: of the run.
        steps: number of steps.
        strategy: of `training.make_strategy`.
        saved: a `pieces.Saved`.
    """

    def __init__(self, task, name, seed, steps, strategy, saved):
        keras.backend.clear_session()
        make = beginnings.RUNS[name].make
        self._task, self._steps, self._saved = task, steps, saved
        self._replicas = Replicas(
            task, lambda: make(task.recipe, steps), strategy, seed
        )
        self._losses, self._curve = [], []
        if loaded := saved.load():
            state, notes = loaded
            self._replicas.restore(state)
            self._losses, self._curve = notes["losses"], notes["curve"]

    def finish(self):
        """Train to the end, and return what there is to say of it."""
        every = max(1, self._steps // POINTS)
        while self._replicas.step < self._steps:
            self._losses.append(self._replicas.train())
            left = self._steps - self._replicas.step
            if left == 0 or (self._replicas.step % every == 0 and left >= every):
                self._add_point()
            if self._saved.is_due():
                notes = {"losses": self._losses, "curve": self._curve}
                self._saved.save(self._replicas.state(), notes)
        return {
            "metric": self._task.metric,
            "value": self._curve[-1]["value"],
            "loss": self._curve[-1]["loss"],
            "bytes_per_step": self._replicas.sent_bytes / self._steps,
            "curve": self._curve,
        }

    def _add_point(self):
        point = {
            "step": self._replicas.step,
            "bytes": self._replicas.sent_bytes,
            "loss": float(np.mean(self._losses)),
            "value": self._replicas.evaluate(),
        }
        self._curve.append(point)
        self._losses = []
