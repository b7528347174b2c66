"""What does it take to train in a few hundred steps? At the bytes that DGC takes today.

    python benchmarks/horizons.py --data_dir ~/tensorflow_datasets --json runs.jsonl

Trains the tasks of `convergence.py` densely, by DGC at 99.9 % with the paper's warm-up
in the first fifth, and by schedules, settings and methods that hand over as many bytes
in all. `--runs` chooses of what `--list` shows. `gap` is how far a run ends from dense,
as a share of how far `dgc` does: below 0.5 is the aim.

A row is appended to `--json` when a run ends; the same command does only what is not
done. `--from_json` reports rows without training.
"""

import os
import statistics

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from absl import app, flags
from adaptive import short
from adaptive.budget import Budget
from common import pieces, progress, reporting, tasks, training

_TASKS = flags.DEFINE_list("tasks", list(tasks.TASKS), "Tasks.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_RUNS = flags.DEFINE_list("runs", [], "Names of runs; empty for all.")
_LIST = flags.DEFINE_bool("list", False, "Show names of runs only.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the runs of each.")
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of a run.", lower_bound=20)
_WORKERS = flags.DEFINE_integer("workers", 4, "Workers.", lower_bound=2)
_JSON = flags.DEFINE_string("json", None, "A file for all runs, a line each.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs, to be reported without training."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "A file for the tables, .md.")

POINTS = 3  # of a curve
KEYS = ["task", "method", "steps", "workers", "seed"]
COLUMNS = [
    ("method", "method", ""),
    ("value", "reached", ".4f"),
    ("spread", "+-", ".4f"),
    ("difference", "to dense", "+.4f"),
    ("bytes_per_step", "bytes/step", ",.0f"),
    ("gap", "gap", ".2f"),
]


class Comparison:
    """Runs of a task.

    Args:
        task: a `tasks.Task`.
        strategy: of `training.make_strategy`.
        done: a `pieces.Pieces`.
    """

    def __init__(self, task, strategy, done):
        self._task, self._strategy, self._done = task, strategy, done
        shapes = [tuple(v.shape) for v in task.model().trainable_variables]
        self._budget = Budget(shapes, _STEPS.value, _WORKERS.value)

    def add(self, name):
        """Train in one way, with all seeds."""
        made = []

        def trainer():  # it is traced once, and not at all if nothing is to be done
            if not made:
                keras.backend.clear_session()
                made.append(self._trainer(name))
            return made[0]

        for seed in progress.track(map(int, _SEEDS.value), "seeds"):
            values = self._task.name, name, _STEPS.value, _WORKERS.value, seed
            self._done.row(
                dict(zip(KEYS, values, strict=True)),
                lambda saved, seed=seed: self._run(trainer(), seed, saved),
            )

    def _trainer(self, name):
        def make_optimizer():
            task = self._task
            decay = keras.optimizers.schedules.CosineDecay(
                task.learning_rate, _STEPS.value
            )
            sgd = keras.optimizers.SGD(decay, 0.9, global_clipnorm=task.clipnorm)
            return short.RUNS[name].make(sgd, self._budget, task)

        return training.Trainer(self._task, make_optimizer, self._strategy)

    def _run(self, trainer, seed, saved):
        curve = trainer.run(seed, _STEPS.value, max(1, _STEPS.value // POINTS), saved)
        size = 4 * trainer.num_parameters
        curve = [(at, at * size if sent is None else sent, v) for at, sent, v in curve]
        return {
            "metric": self._task.metric,
            "value": curve[-1][2],
            "bytes_per_step": curve[-1][1] / _STEPS.value,
            "seconds": trainer.seconds,
            "curve": curve,
        }


def train():
    """Run what is not done, and return all rows of the file."""
    strategy = training.make_strategy(_WORKERS.value)  # before data are read
    done = pieces.Pieces(_JSON.value, KEYS, reporting.provenance())
    for name in progress.track(_TASKS.value, "tasks", str):
        comparison = Comparison(tasks.TASKS[name](_DATA_DIR.value), strategy, done)
        for run in progress.track(_RUNS.value or short.RUNS, "runs", str):
            comparison.add(run)
    return done.rows


def summaries(rows):
    """Return a row per run and setting: medians over seeds, in pairs with dense."""
    found = {}
    for row in rows:
        found.setdefault((_setting(row), row["method"]), {})[row["seed"]] = row
    return [_summary(setting, runs, found) for (setting, _), runs in found.items()]


def _summary(setting, runs, found):
    values = [row["value"] for row in runs.values()]
    line = {
        **next(iter(runs.values())),
        "value": statistics.median(values),
        "spread": (max(values) - min(values)) / 2,
        "bytes_per_step": statistics.median(r["bytes_per_step"] for r in runs.values()),
        "seeds": len(runs),
        "difference": _to_dense(runs, found.get((setting, "dense"), {})),
        "gap": None,
    }
    today = found.get((setting, "dgc"), {})
    today = {seed: row for seed, row in today.items() if seed in runs}
    usual = _to_dense(today, found.get((setting, "dense"), {}))
    if usual and line["difference"] is not None:
        line["gap"] = line["difference"] / usual
    return line


def _to_dense(runs, dense):
    """Return the mean distance of runs from the dense ones of their seeds, or None."""
    found = [r["value"] - dense[s]["value"] for s, r in runs.items() if s in dense]
    return statistics.mean(found) if found else None


def _setting(row):
    return tuple(row[name] for name in ("task", "steps", "workers"))


def main(_):
    """Run what the flags ask for, and report."""
    tf.get_logger().setLevel("ERROR")
    if _LIST.value:
        print("\n".join(f"{name}: {run.why}" for name, run in short.RUNS.items()))
        return
    unknown = [name for name in _RUNS.value if name not in short.RUNS]
    if unknown:
        raise app.UsageError(f"--runs has names that --list does not show: {unknown}")
    paths = _FROM_JSON.value
    lines = summaries(pieces.read(paths) if paths else train())
    tables = []
    for setting in dict.fromkeys(map(_setting, lines)):
        shown = [line for line in lines if _setting(line) == setting]
        task, steps, workers = setting
        title = f"{task}: {shown[0]['metric']} after {steps} steps, {workers} workers, "
        title += f"seeds: {', '.join(map(str, sorted({s['seeds'] for s in shown})))}"
        reporting.report(shown, COLUMNS, title, origin={})
        tables += [f"### {title}", reporting.markdown(shown, COLUMNS)]
        tables += [reporting.setting(shown, {})]
    if _MARKDOWN.value:
        with open(_MARKDOWN.value, "w", encoding="utf-8") as file:
            file.write("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    app.run(main)
