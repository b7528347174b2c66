"""Measures the cost in accuracy of synchronizing every H steps, and time to a target.

    python study/periods.py --data_dir ~/tensorflow_datasets --json rows.jsonl

Trains the tasks of `convergence.py` on workers of this process: densely, with DGC and
DeMo in every step, and with local SGD, DiLoCo and SparseLoCo, which synchronize every H
steps. `dense` is the task's SGD with momentum; local SGD and `sparse_loco_sgd` have it
as inner optimizer. DiLoCo and SparseLoCo have AdamW, whose control is `dense adamw`.
Rates decay by a cosine. The rate of AdamW is the best one of the control with a seed
that is not used again, of three rates and up to two more beyond their edge. Both
presets use it for all H.

A row is appended to `--json` when a run ends, one seed after another, so the same
command does only the missing runs; `--from_json` reports rows without training. `to
dense` compares losses. `steps to target` is when a run was first as good as the dense
one at its end, up to 0.01 of accuracy or 0.1 of loss; blank if any seed never was.

`--links` names rows of `benchmarks/distant.py` that measured steps and exchanges of a
model of about this size (`--model`, `--step_seconds`). A second table then has the
seconds until each run reached its target on those links.
"""

import functools
import itertools
import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import benchmarks_path  # noqa: F401
import keras
import tensorflow as tf
from absl import app, flags
from common import (
    distant_runs,
    method_settings,
    presets,
    progress,
    reporting,
    resumable,
)
from experiments import periods
from tasks import small
from training import rate_search
from training.trainer import Trainer, make_strategy

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of TensorFlow Datasets.")
_TASKS = flags.DEFINE_list("tasks", list(small.TASKS), "Tasks.")
_METHODS = flags.DEFINE_list("methods", [], "Names of methods; empty for all.")
_PERIODS = flags.DEFINE_list("periods", ["1", "8", "32", "128"], "Steps of a round.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Number of seeds.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 384, "Steps of a run.", lower_bound=16)
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers.", lower_bound=2)
_JSON = flags.DEFINE_string("json", None, "File for the rows, one line per run.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of rows to report without training."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "File for the tables, .md.")
_LINKS = flags.DEFINE_string("links", None, "Rows of `benchmarks/distant.py`.")
_MODEL = flags.DEFINE_string("model", "tiny", "Model of the rows of `--links`.")
_STEP = flags.DEFINE_float("step_seconds", 0.1, "Step time of the rows of `--links`.")

POINTS = 12  # per curve
RATES = (1e-3, 3e-3, 1e-2)
"""Learning rates of AdamW from which a search selects."""
KEYS = ["task", "method", "period", "rate", "steps", "workers", "seed"]

EVERY_STEP = ("dense", presets.CONTROL, "dgc", "demo")
LOCAL = {**presets.LOCAL, "sparse_loco_sgd": presets.LOCAL["sparse_loco"]}
"""Presets that synchronize every H steps; the last one has the SGD of `dense`."""

COLUMNS = [
    ("method", "method", ""),
    ("period", "H", "d"),
    ("rate", "rate", ".2g"),
    ("value", "reached", ".4f"),
    ("spread", "+-", ".4f"),
    ("loss", "loss", ".4f"),
    ("to_dense", "to dense", "+.1%"),
    ("bytes_per_step", "bytes/step", ",.0f"),
    ("steps_to_target", "steps to target", ",.0f"),
    ("runs", "runs", "d"),
]


class Comparison:
    """All runs of a task.

    Args:
        task: a `small.Task`.
        strategy: strategy of `trainer.make_strategy`.
        store: a `resumable.ResumableRows`.
    """

    def __init__(self, task, strategy, store):
        self._task, self._strategy, self._store = task, strategy, store
        # All seeds share a trainer, since tracing takes as long as a run.
        self._trainer = functools.cache(self._make_trainer)

    def run(self, method, period, seed):
        """Train with a method, after a search for its learning rate if needed."""
        self._row(method, period, self._rate(method), seed)

    def _rate(self, method):
        if method not in presets.WITH_ADAMW:
            rate = self._task.learning_rate
            _, settings = method_settings.create_method("demo")
            return rate * settings["rate"] if method == "demo" else rate
        seed = periods.SEED_OF_RATES
        return rate_search.best_rate(
            RATES, lambda rate: self._row(presets.CONTROL, 1, rate, seed)["loss"]
        )

    def _row(self, method, period, rate, seed):
        key = {
            "task": self._task.name,
            "method": method,
            "period": period,
            "rate": rate,
            "steps": _STEPS.value,
            "workers": self._strategy.num_replicas_in_sync,
            "seed": seed,
        }
        return self._store.row(key, lambda _: self._measure(method, period, rate, seed))

    def _measure(self, method, period, rate, seed):
        trainer = self._trainer(method, period, rate)
        curve = trainer.run(seed, _STEPS.value, max(1, _STEPS.value // POINTS))
        _, sent, value = curve[-1]
        if sent is None:  # stock optimizers do not count bytes
            sent = 4 * trainer.num_parameters * _STEPS.value
        return {
            "metric": self._task.metric,
            "value": value,
            "loss": trainer.evaluate(self._task.test_loss),
            "bytes": sent,
            "curve": curve,
            "seconds": trainer.seconds,
        }

    def _make_trainer(self, method, period, rate):
        steps, clipnorm = _STEPS.value, self._task.clipnorm
        decay = keras.optimizers.schedules.CosineDecay(rate, steps)

        def make_optimizer():
            momentum = 0.0 if method == "demo" else 0.9
            inner = keras.optimizers.SGD(decay, momentum, global_clipnorm=clipnorm)
            if method in presets.WITH_ADAMW:
                inner = keras.optimizers.AdamW(decay, global_clipnorm=clipnorm)
            if method in LOCAL:
                return LOCAL[method](inner, period)
            if method.startswith("dense"):
                return inner
            return method_settings.create_method(method)[0](inner, steps)

        return Trainer(self._task, make_optimizer, self._strategy)


def train():
    """Do the missing runs, and return all rows of the file."""
    strategy = make_strategy(_WORKERS.value)  # before TensorFlow creates its devices
    store = resumable.ResumableRows(_JSON.value, KEYS, reporting.provenance())
    tasks = [small.TASKS[name](_DATA_DIR.value) for name in _TASKS.value]
    comparisons = {task.name: Comparison(task, strategy, store) for task in tasks}
    runs = itertools.product(range(_SEEDS.value), comparisons, _runs())
    for seed, task_name, (method, period) in progress.track(runs, "runs", _run_name):
        comparisons[task_name].run(method, period, seed)
    return store.rows


def _run_name(run):
    seed, task_name, (method, period) = run
    return f"{task_name}, {method}, H = {period}, seed {seed}"


def _runs():
    """Return (method, period) of all runs of a seed and task."""
    all_methods = [*EVERY_STEP, *LOCAL]
    methods = _METHODS.value or all_methods
    if unknown := [name for name in methods if name not in all_methods]:
        raise app.UsageError(
            f"Methods are {', '.join(all_methods)}. Received: {unknown}"
        )
    periods = [int(period) for period in _PERIODS.value]
    if any(period < 1 or _STEPS.value % period for period in periods):
        raise app.UsageError(
            f"Each period must divide the {_STEPS.value} steps of a run. "
            f"Received: --periods={periods}"
        )
    return [(name, h) for name in methods for h in (periods if name in LOCAL else [1])]


def _title(row):
    title = f"{row['task']}: {row['metric']} after {row['steps']} steps"
    return f"{title}, {row['workers']} workers"


def main(_):
    """Train or read rows, and report."""
    tf.get_logger().setLevel("ERROR")
    rows = resumable.read_rows(_FROM_JSON.value) if _FROM_JSON.value else train()
    tables = [(_title(lines[0]), lines, COLUMNS) for lines in periods.summaries(rows)]
    reporting.report_all(tables, _MARKDOWN.value)
    if _LINKS.value:
        title = "Seconds until as good as the dense run at its end"
        reporting.report(_seconds_on_links(rows), periods.COLUMNS, title, origin={})


def _seconds_on_links(rows):
    setting = {"model": _MODEL.value, "step_seconds": _STEP.value}
    link_rows = [
        row
        for row in resumable.read_rows([_LINKS.value])
        if setting.items() <= row.items()
    ]
    if not link_rows:
        raise app.UsageError(f"--links has no rows of {setting}: {_LINKS.value}")
    try:
        return periods.seconds(distant_runs.add_comparisons(link_rows), rows)
    except periods.SizeError as error:
        raise app.UsageError(str(error)) from error


if __name__ == "__main__":
    app.run(main)
