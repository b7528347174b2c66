"""The runs of `first_steps.py`, and its tables."""

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from common import resumable
from registered import intervals
from training.replicas import Replicas

import tf_dgc
from tf_dgc.schedules import PiecewiseConstantSparsity, for_steps

EARLY = 0.05
"""Share of the steps with the early sparsity."""
RISING = 0.1
"""Share of the steps in which the learning rate rises."""
DENSE, DENSE_RISING = "dense", "dense rising"
COLUMNS = [
    ("method", "method", ""),
    ("seeds", "seeds", "d"),
    ("value", "mean", ".4f"),
    ("spread", "std", ".4f"),
    ("loss", "loss", ".4f"),
    ("difference", "vs. dense", "+.4f"),
    ("half_width", "± 95 %", ".4f"),
    ("to_rising", "vs. dense rising", "+.4f"),
    ("rising_half_width", "± 95 %", ".4f"),
    ("bytes_per_step", "bytes/step", ",.0f"),
]


class FirstSteps(NamedTuple):
    """Settings of the first steps of a run.

    Attributes:
        rising: whether the learning rate rises.
        early: sparsity of the first steps; None for that of all others.
        dense: whether training is dense, with Keras's own optimizer.
    """

    rising: bool = False
    early: float | None = None
    dense: bool = False

    def make(self, recipe, steps):
        """Return the optimizer of a run.

        Args:
            recipe: a `recipes.Recipe`.
            steps: number of steps.
        """
        sgd = recipe.sgd(steps)
        if self.rising:
            sgd.learning_rate = Rising(recipe.schedule(steps), round(RISING * steps))
        if self.dense:
            return sgd
        return tf_dgc.dgc_for_steps(sgd, steps, sparsity=self._sparsity(steps))

    def _sparsity(self, steps):
        last = for_steps(steps)
        if self.early is None:
            return last
        return PiecewiseConstantSparsity([round(EARLY * steps)], [self.early, last])


class Rising(keras.optimizers.schedules.LearningRateSchedule):
    """Multiplies a schedule by a factor that rises linearly to 1.

    Args:
        schedule: a learning-rate schedule.
        steps: number of steps until the factor is 1.
    """

    def __init__(self, schedule, steps):
        self.schedule, self.steps = schedule, steps

    def __call__(self, step):
        """Return the learning rate of a step."""
        share = (tf.cast(step, tf.float32) + 1) / self.steps
        return self.schedule(step) * tf.minimum(1.0, share)

    def get_config(self):
        """Return the constructor's arguments."""
        return {"schedule": self.schedule, "steps": self.steps}


_EARLY = {"": None, " 75 % early": 0.75, " 50 % early": 0.5, " all early": 0.0}
RUNS = {
    DENSE: FirstSteps(dense=True),
    DENSE_RISING: FirstSteps(dense=True, rising=True),
    **{
        f"dgc{name}{rate}": FirstSteps(rising=bool(rate), early=early)
        for name, early in _EARLY.items()
        for rate in ("", " rising")
    },
}


def tables(rows):
    """Return a title, lines and columns for each setting.

    Args:
        rows: rows of `first_steps.py`.
    """
    groups = resumable.group_rows(rows, ["task", "steps", "workers", "tuning"])
    return [(_title(group[0]), _lines(group), COLUMNS) for group in groups.values()]


def _title(row):
    data = ", data held back" if row["tuning"] else ""
    title = f"{row['task']}: {row['metric']} after {row['steps']} steps"
    return f"{title}, {row['workers']} workers{data}"


def _lines(rows):
    names = [name for name in RUNS if any(row["method"] == name for row in rows)]
    return [_line(name, rows) for name in names]


def _line(name, rows):
    runs = [row for row in rows if row["method"] == name]
    return {
        **runs[0],
        **intervals.mean_and_spread(runs),
        "seeds": len(runs),
        "loss": np.mean([row["loss"] for row in runs]),
        "bytes_per_step": np.mean([row["bytes_per_step"] for row in runs]),
        **_difference(rows, name, DENSE, "difference", "half_width"),
        **_difference(rows, name, DENSE_RISING, "to_rising", "rising_half_width"),
    }


def _difference(rows, name, other, *columns):
    """Return the paired difference as two columns; None if it is not available."""
    difference = intervals.paired(rows, name, other)
    cells = {} if name == other else difference.as_columns(*columns)
    return {**dict.fromkeys(columns), **cells}


POINTS = 8  # per curve


class Run:
    """A resumable run.

    Args:
        task: a `recipe_task.Task`.
        name: name of the run in `RUNS`.
        seed: seed of the run.
        steps: number of steps.
        strategy: strategy of `trainer.make_strategy`.
        checkpoint: a `resumable.RunCheckpoint`.
    """

    def __init__(self, task, name, seed, steps, strategy, checkpoint):
        keras.backend.clear_session()
        make = RUNS[name].make
        self._task, self._steps, self._checkpoint = task, steps, checkpoint
        self._replicas = Replicas(
            task, lambda: make(task.recipe, steps), strategy, seed
        )
        self._losses, self._curve = [], []
        if loaded := checkpoint.load():
            state, notes = loaded
            self._replicas.restore(state)
            self._losses, self._curve = notes["losses"], notes["curve"]

    def finish(self):
        """Train to the end, and return the row without its key."""
        every = max(1, self._steps // POINTS)
        while self._replicas.step < self._steps:
            self._losses.append(self._replicas.train())
            remaining = self._steps - self._replicas.step
            is_point = self._replicas.step % every == 0 and remaining >= every
            if is_point or remaining == 0:
                self._add_point()
            if self._checkpoint.is_due():
                notes = {"losses": self._losses, "curve": self._curve}
                self._checkpoint.save(self._replicas.state(), notes)
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
