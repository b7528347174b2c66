"""What exchanging every H steps costs in accuracy, and how soon a target is reached.

    python study/periods.py --data_dir ~/tensorflow_datasets --json rows.jsonl

Trains the tasks of `convergence.py` on workers of this process: dense, by DGC and DeMo
in every step, and by local SGD, DiLoCo and SparseLoCo with an exchange every H steps.
`dense` is the task's SGD with momentum, which local SGD takes on each worker too, and
SparseLoCo as `sparse_loco_sgd`; DiLoCo and SparseLoCo have AdamW inside, to which
`dense adamw` is the control. Rates decay by a cosine; that of AdamW is the best of
three, and of one or two more beyond if it is at their edge, for the control, by a seed
that does not count, and the same for both presets and all H.

A row is appended to `--json` when a run ends, seed after seed, so the same command goes
on where it was killed; `--from_json` reports without training. `to dense` is of the
loss; `steps to target` is when a run was first as good as the dense one at its end, but
for 0.01 of accuracy or 0.1 of loss, blank if any seed was not.

`--links` names rows of `benchmarks/distant.py`, which measured steps and exchanges of a
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

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_TASKS = flags.DEFINE_list("tasks", list(small.TASKS), "Tasks.")
_METHODS = flags.DEFINE_list("methods", [], "Names of methods; empty for all.")
_PERIODS = flags.DEFINE_list("periods", ["1", "8", "32", "128"], "Steps of a round.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 384, "Steps of a run.", lower_bound=16)
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers.", lower_bound=2)
_JSON = flags.DEFINE_string("json", None, "A file for all runs, a line each.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs, to be reported without training."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "A file for the tables, .md.")
_LINKS = flags.DEFINE_string("links", None, "Rows of `benchmarks/distant.py`.")
_MODEL = flags.DEFINE_string("model", "tiny", "Model of the rows of `--links`.")
_STEP = flags.DEFINE_float("step_seconds", 0.1, "Step time of the rows of `--links`.")

POINTS = 12  # of a curve
RATES = (1e-3, 3e-3, 1e-2)
"""Learning rates of an AdamW, one of which is chosen."""
KEYS = ["task", "method", "period", "rate", "steps", "workers", "seed"]

EVERY_STEP = ("dense", presets.CONTROL, "dgc", "demo")
LOCAL = {**presets.LOCAL, "sparse_loco_sgd": presets.LOCAL["sparse_loco"]}
"""Exchange every H steps; the last one with the SGD of `dense` inside."""

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
        strategy: of `trainer.make_strategy`.
        done: a `resumable.ResumableRows`.
    """

    def __init__(self, task, strategy, done):
        self._task, self._strategy, self._done = task, strategy, done
        # One for all seeds, as tracing takes as long as a run.
        self._trainer = functools.cache(self._make_trainer)

    def run(self, method, period, seed):
        """Train with a method and its rate, which is chosen first."""
        self._row(method, period, self._rate(method), seed)

    def _rate(self, method):
        if method not in presets.WITH_ADAMW:
            rate = self._task.learning_rate
            _, settings = method_settings.method("demo")
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
        return self._done.row(key, lambda _: self._measure(method, period, rate, seed))

    def _measure(self, method, period, rate, seed):
        trainer = self._trainer(method, period, rate)
        curve = trainer.run(seed, _STEPS.value, max(1, _STEPS.value // POINTS))
        _, sent, value = curve[-1]
        if sent is None:  # the stock optimizer, which counts nothing
            sent = 4 * trainer.num_parameters * _STEPS.value
        return {
            "metric": self._task.metric,
            "value": value,
            "loss": trainer.look(self._task.test_loss),
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
            return method_settings.method(method)[0](inner, steps)

        return Trainer(self._task, make_optimizer, self._strategy)


def train():
    """Run what is not done, and return all rows of the file."""
    strategy = make_strategy(_WORKERS.value)  # before data are read
    done = resumable.ResumableRows(_JSON.value, KEYS, reporting.provenance())
    given = [small.TASKS[name](_DATA_DIR.value) for name in _TASKS.value]
    comparisons = {task.name: Comparison(task, strategy, done) for task in given}
    todo = itertools.product(range(_SEEDS.value), comparisons, _runs())
    for seed, name, (method, period) in progress.track(todo, "runs", _named):
        comparisons[name].run(method, period, seed)
    return done.rows


def _named(run):
    seed, name, (method, period) = run
    return f"{name}, {method}, H = {period}, seed {seed}"


def _runs():
    known = [*EVERY_STEP, *LOCAL]
    chosen = _METHODS.value or known
    if unknown := [name for name in chosen if name not in known]:
        raise app.UsageError(f"Methods are {', '.join(known)}. Received: {unknown}")
    periods = [int(period) for period in _PERIODS.value]
    if any(period < 1 or _STEPS.value % period for period in periods):
        raise app.UsageError(
            f"Runs of {_STEPS.value} steps are to end with a round. "
            f"Received: --periods={periods}"
        )
    return [(name, h) for name in chosen for h in (periods if name in LOCAL else [1])]


def _title(row):
    title = f"{row['task']}: {row['metric']} after {row['steps']} steps"
    return f"{title}, {row['workers']} workers"


def main(_):
    """Run what the flags ask for, and report."""
    tf.get_logger().setLevel("ERROR")
    rows = resumable.read_rows(_FROM_JSON.value) if _FROM_JSON.value else train()
    tables = [(_title(shown[0]), shown, COLUMNS) for shown in periods.summaries(rows)]
    reporting.report_all(tables, _MARKDOWN.value)
    if _LINKS.value:
        title = "Seconds until as good as the dense run at its end"
        reporting.report(_seconds_on_links(rows), periods.COLUMNS, title, origin={})


def _seconds_on_links(rows):
    wanted = {"model": _MODEL.value, "step_seconds": _STEP.value}
    measured = resumable.read_rows([_LINKS.value])
    chosen = [row for row in measured if wanted.items() <= row.items()]
    if not chosen:
        raise app.UsageError(f"--links has no rows of {wanted}: {_LINKS.value}")
    try:
        return periods.seconds(distant_runs.add_comparisons(chosen), rows)
    except periods.SizeError as error:
        raise app.UsageError(str(error)) from error


if __name__ == "__main__":
    app.run(main)
