"""Comparisons of the methods of one task: means, paired differences, and bytes."""

import dataclasses
import statistics

from registered import intervals, plan
from registered.rows import has_value
from registered.specs import Spec


@dataclasses.dataclass(frozen=True)
class Unit:
    """How the report writes a task's values.

    Attributes:
        factor: multiplies a value.
        of_value: unit of a value times its factor.
        of_difference: unit of a difference; relative differences are in per cent.
        digits: digits after the decimal point.
    """

    factor: int
    of_value: str
    of_difference: str
    digits: int = 2


TASKS = {
    "cifar10": Unit(100, "%", "points"),
    "mnist": Unit(100, "%", "points"),
    "ptb": Unit(1, "", "%"),
    "shakespeare": Unit(1, "nats", "nats", digits=3),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Rows of one task, model and number of workers.

    Attributes:
        task: name of the task.
        model: arguments of the task, or an empty dictionary.
        workers: number of workers.
        rows: their rows.
    """

    task: str
    model: dict
    workers: int
    rows: list

    @property
    def metric(self):
        """Name of the metric; rows of failed processes lack it."""
        from registered import registry  # loads TensorFlow

        return registry.TASKS[self.task].metric

    @property
    def unit(self):
        """The task's `Unit`."""
        return TASKS[self.task]

    @property
    def labels(self):
        """Labels of the methods, in the order of the plan; others last."""
        labels = dict.fromkeys(map(plan.label_of, self.rows))
        others = plan.UNMASKED, plan.TIGHTER, *plan.FOR_LENGTHS
        order = [*plan.ALL, *others, *plan.ABLATION, *plan.OTHER_METHODS]
        return sorted(labels, key=lambda label: _position(label, order))

    def rows_of(self, label):
        """Return the rows of a label that ended with a value."""
        return [
            row for row in self.rows if plan.label_of(row) == label and has_value(row)
        ]

    def mean(self, label, seeds=None):
        """Return the mean of the metric, in the task's unit; None without a row.

        Args:
            label: label of the rows.
            seeds: seeds of the rows; None for all.
        """
        by_seed = {row["seed"]: row["value"] for row in self.rows_of(label)}
        values = [v for seed, v in by_seed.items() if seeds is None or seed in seeds]
        return self.unit.factor * statistics.mean(values) if values else None

    def difference(self, label, other="dense"):
        """Return the paired difference, in the unit of the task's differences.

        Leaves out seeds whose results led to the label: they are no evidence about it.
        """
        factor = self.unit.factor
        relative = self.unit.of_difference == "%"

        def scale(value, other_value):
            if relative:
                return 100 * (value / other_value - 1)
            return factor * (value - other_value)

        excluded = plan.EXCLUDED_SEEDS.get(label, {}).get(self.task, ())
        rows = [row for row in self.rows if row["seed"] not in excluded]
        return intervals.paired(rows, label, other, plan.label_of, scale)

    def bytes_sent(self, label):
        """Return the bytes that a worker passed to collectives in a run."""
        rows = self.rows_of(label)
        return statistics.mean(r["bytes_per_worker"] for r in rows) if rows else None

    def bytes_per_step_at_end(self, label):
        """Return a worker's bytes per step in the last tenth of a run, or None."""
        rows = [row for row in self.rows_of(label) if len(row["curve"]) > 1]
        if not rows:
            return None
        before, last = rows[0]["curve"][-2:]
        return (last["bytes"] - before["bytes"]) / (last["step"] - before["step"])

    def ring_bytes(self, label, num_bytes, steps=None):
        """Return how many bytes a link of a ring carries.

        Args:
            label: label of the rows.
            num_bytes: `bytes_sent` or `bytes_per_step_at_end`, or None.
            steps: number of steps in which they were sent; None for a whole run.
        """
        from registered import traffic  # loads TensorFlow

        if num_bytes is None:
            return None
        spec = Spec.of(self.rows_of(label)[0])
        return traffic.ring_bytes(spec, num_bytes, steps or spec.steps)

    def verdict(self, label):
        """Return how the interval compares with the plan's margin, in words.

        If a run of the method or of its control has no value, the verdict says so and
        nothing else. The margin is for `dgc`.
        """
        if self.task not in plan.MARGINS or label == "dense":
            return ""
        difference = self.difference(label)
        if difference.failed:
            begun = len(difference.seeds) + len(difference.failed)
            return f"failed in {len(difference.failed)} of {begun}"
        if label != "dgc":
            return "exploratory"
        # The verdict of the planned seeds is final; an earlier one may still change.
        pairs, planned = len(difference.seeds), plan.PLANNED_SEEDS
        early = self.task == "cifar10" and 1 < pairs < planned
        note = f" ({pairs} of {planned} pairs so far)" if early else ""
        return self._verdict_of_interval(difference) + note

    def _verdict_of_interval(self, difference):
        if len(difference.seeds) < 2:
            return "no interval yet"
        margin, aim = plan.MARGINS[self.task]
        sign = -1 if self.task == "cifar10" else 1
        worst = difference.half_width + sign * difference.mean
        if worst <= aim:
            return f"within the aim, {aim}"
        if worst <= margin:
            return f"not inferior by {margin}"
        best = worst - 2 * difference.half_width
        return f"inferior by more than {margin}" if best > margin else "open"


def from_rows(rows):
    """Return the `Comparison`s of rows, in the order of the plan."""
    tasks = list(plan.STEPS)
    groups = {}
    for row in rows:
        model = row["settings"].get("model", {})
        key = (
            row["workers"],
            tasks.index(row["task"]),
            tuple(sorted(model.items())),
            row["steps"],  # runs of different lengths are not compared
        )
        groups.setdefault(key, []).append(row)
    return [
        Comparison(
            tasks[task], dict(model), workers, groups[workers, task, model, steps]
        )
        for workers, task, model, steps in sorted(groups)
    ]


def _position(label, order):
    return order.index(label) if label in order else len(order)
