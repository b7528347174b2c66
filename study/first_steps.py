"""How should a run of few steps begin? Learning rate and density of its first steps.

    python study/beginnings.py --data DATA --json rows.jsonl --tasks cifar10 \
        --steps 2000 --workers 2 --seeds 0,1,2,3,4

Trains tasks of the study (`study/plan.md`) by their recipes: densely, and by
`tf_dgc.dgc_for_steps`, `dgc`, with one sparsity from the first step to the last, or
with less in the first twentieth (`early`; with 75 %, and up to 2,000 steps, that is
what it does if nothing is said); each with the learning rate of the recipe,
or with one that rises evenly to it over the first tenth (`rising`). `--list` shows
the names, for `--runs`.

reached     the metric at the end, mean over seeds, and its standard deviation
loss        of training, over the last eighth of the steps
to dense    mean difference to the dense runs of the same seeds, with half of its 95 %
            interval by Student; `to rising`, to dense runs whose rate rises
bytes/step  what a worker hands to the collectives

`--data` has the folder `tensorflow_datasets`. With `--tuning` the test set is not
looked at: what is measured on is a part of the training data that is then left out. A
row is appended to `--json` when a run ends, and is not run again; one that was
interrupted goes on. `--from_json` reports without training.
"""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import benchmarks_path  # noqa: F401
import tensorflow as tf
from absl import app, flags
from common import progress, reporting, resumable
from experiments import beginnings
from experiments.beginnings import Run
from registered import registry
from training.trainer import make_strategy

TASKS = ["cifar10", "mnist", "shakespeare"]

_DATA = flags.DEFINE_string("data", None, "Folder of the data sets.")
_TASKS = flags.DEFINE_list("tasks", TASKS, "Tasks.")
_RUNS = flags.DEFINE_list("runs", [], "Names of runs; empty for all.")
_LIST = flags.DEFINE_bool("list", False, "Show names of runs only.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the runs of each.")
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of a run.", lower_bound=20)
_WORKERS = flags.DEFINE_integer("workers", 4, "Workers.", lower_bound=2)
_TUNING = flags.DEFINE_bool("tuning", False, "Leave the test set alone.")
_JSON = flags.DEFINE_string("json", None, "A file for all runs, a line each.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs, to be reported without training."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "A file for the tables, .md.")

KEYS = ["task", "method", "steps", "workers", "tuning", "seed"]


def train():
    """Run what is not done, and return all rows of the file."""
    if not _DATA.value:
        raise app.UsageError("--data is needed, or --from_json")
    strategy = make_strategy(_WORKERS.value)  # before data are read
    done = resumable.ResumableRows(_JSON.value, KEYS, reporting.provenance())
    asked = [
        (name, seed, run)
        for name in _TASKS.value
        for seed in map(int, _SEEDS.value)
        for run in _RUNS.value or beginnings.RUNS
    ]
    tasks = {
        name: registry.TASKS[name](_DATA.value, _TUNING.value) for name in _TASKS.value
    }
    for name, seed, run in progress.track(asked, "runs", str):
        key = {"task": name, "method": run, "steps": _STEPS.value, "seed": seed}
        key |= {"workers": _WORKERS.value, "tuning": _TUNING.value}
        asks = tasks[name], run, seed, _STEPS.value, strategy
        done.row(key, lambda saved, asks=asks: Run(*asks, saved).finish())
    return done.rows


def main(_):
    """Run what the flags ask for, and report."""
    tf.get_logger().setLevel("ERROR")
    if _LIST.value:
        print("\n".join(beginnings.RUNS))
        return
    if unknown := sorted(set(_TASKS.value) - set(TASKS)):
        raise app.UsageError(f"--tasks has {', '.join(TASKS)}. Received: {unknown}")
    if unknown := sorted(set(_RUNS.value) - set(beginnings.RUNS)):
        raise app.UsageError(f"--runs has names that --list shows. Received: {unknown}")
    paths = _FROM_JSON.value
    tables = beginnings.tables(resumable.read_rows(paths) if paths else train())
    reporting.report_all(tables, _MARKDOWN.value)


if __name__ == "__main__":
    app.run(main)
