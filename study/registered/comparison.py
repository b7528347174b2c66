"""What the rows say of each method: means, differences by pairs, and bytes."""

import dataclasses
import statistics

from registered import intervals, plan
from registered.rows import has_value
from registered.specs import Spec


@dataclasses.dataclass(frozen=True)
class Unit:
    """How a task's values are written.

    Attributes:
        factor: of a value.
        of_value: unit of a value times its factor.
        of_difference: unit of a difference; relative ones are in per cent.
        digits: behind the point.
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
        """Name of what was measured; rows of processes that failed do not have it."""
        from registered import registry  # loads TensorFlow

        return registry.TASKS[self.task].metric

    @property
    def unit(self):
        """The task's `Unit`."""
        return TASKS[self.task]

    @property
    def labels(self):
        """Labels of the methods, in the order of the plan; others last."""
        found = dict.fromkeys(map(plan.label_of, self.rows))
        others = plan.UNMASKED, plan.TIGHTER, *plan.FOR_LENGTHS
        order = [*plan.ALL, *others, *plan.ABLATION, *plan.OTHERS]
        return sorted(found, key=lambda label: _position(label, order))

    def of(self, label):
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
        found = {row["seed"]: row["value"] for row in self.of(label)}
        values = [v for seed, v in found.items() if seeds is None or seed in seeds]
        return self.unit.factor * statistics.mean(values) if values else None

    def difference(self, label, other="dense"):
        """Return the paired difference, in the unit of the task's differences.

        Seeds that led to a label are no evidence about it, and are left out.
        """
        factor = self.unit.factor
        relative = self.unit.of_difference == "%"

        def scaled(mine, theirs):
            return 100 * (mine / theirs - 1) if relative else factor * (mine - theirs)

        led = plan.LED_TO.get(label, {}).get(self.task, ())
        rows = [row for row in self.rows if row["seed"] not in led]
        return intervals.paired(rows, label, other, plan.label_of, scaled)

    def sent(self, label):
        """Return the bytes that a worker handed to collectives in a run."""
        rows = self.of(label)
        return statistics.mean(r["bytes_per_worker"] for r in rows) if rows else None

    def sent_at_end(self, label):
        """Return the same per step of the last tenth of a run; None without a row."""
        rows = [row for row in self.of(label) if len(row["curve"]) > 1]
        if not rows:
            return None
        before, last = rows[0]["curve"][-2:]
        return (last["bytes"] - before["bytes"]) / (last["step"] - before["step"])

    def on_a_ring(self, label, handed, steps=None):
        """Return what of `sent`, or of `sent_at_end`, a link of a ring carries.

        Args:
            label: label of the rows.
            handed: bytes, or None.
            steps: number of steps that they are of; None for a whole run.
        """
        from registered import traffic  # loads TensorFlow

        if handed is None:
            return None
        spec = Spec.of(self.of(label)[0])
        return traffic.on_a_ring(spec, handed, steps or spec.steps)

    def verdict(self, label):
        """Return what the interval says about the plan's margin, in words.

        A run without a value is left out of no interval in silence: with one, of the
        method or of its control, there is no other verdict. The margin is for `dgc`.
        """
        if self.task not in plan.MARGINS or label == "dense":
            return ""
        found = self.difference(label)
        if found.failed:
            begun = len(found.seeds) + len(found.failed)
            return f"failed in {len(found.failed)} of {begun}"
        if label != "dgc":
            return "exploratory"
        # What the planned seeds say is the plan's verdict; before, it may still turn.
        pairs, planned = len(found.seeds), plan.PLANNED_SEEDS
        early = self.task == "cifar10" and 1 < pairs < planned
        note = f" ({pairs} of {planned} pairs so far)" if early else ""
        return self._by_interval(found) + note

    def _by_interval(self, found):
        if len(found.seeds) < 2:
            return "no interval yet"
        margin, aim = plan.MARGINS[self.task]
        worst = found.half_width + (-1 if self.task == "cifar10" else 1) * found.mean
        if worst <= aim:
            return f"within the aim, {aim}"
        if worst <= margin:
            return f"not inferior by {margin}"
        best = worst - 2 * found.half_width
        return f"inferior by more than {margin}" if best > margin else "open"


def comparisons(rows):
    """Return what can be compared, in the order of the plan."""
    tasks = list(plan.STEPS)
    groups = {}
    for row in rows:
        model = row["settings"].get("model", {})
        key = (
            row["workers"],
            tasks.index(row["task"]),
            tuple(sorted(model.items())),
            row["steps"],  # with others it is another run
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
