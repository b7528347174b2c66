"""Compares learning rates and densities in the first steps of short runs.

    python study/first_steps.py --data DATA --json rows.jsonl --tasks cifar10 \
        --steps 2000 --workers 2 --seeds 0,1,2,3,4

Trains tasks of the study (`study/plan.md`) with their recipes: densely, and with
`tf_dgc.dgc_for_steps` (`dgc`), either with one sparsity in all steps or with a lower
one in the first twentieth (`early`; the default of `dgc_for_steps` up to 2,000 steps is
75 %). Each run has the learning rate of the recipe, or one that rises to it linearly
over the first tenth (`rising`). `--list` shows the runs, `--runs` selects some of them.

mean        final metric, mean over seeds, and its standard deviation
loss        training loss over the last eighth of the steps
vs. dense   mean difference from the dense runs of the same seeds, with half of its 95 %
            interval (Student); `vs. dense rising`, from dense runs with a rising rate
bytes/step  bytes that a worker passes to the collectives

`--data` is the folder that has `tensorflow_datasets`. `--tuning` does not use the test
set, but holds back a part of the training data for evaluation. A row is appended to
`--json` when a run ends, and is not run again; an interrupted run resumes.
`--from_json` reports rows without training.
"""

import functools
import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import benchmarks_path  # noqa: F401
import tensorflow as tf
from absl import app, flags
from common import progress, reporting, resumable
from experiments import first_steps
from experiments.first_steps import Run
from registered import registry
from training.trainer import make_strategy

TASKS = ["cifar10", "mnist", "shakespeare"]

_DATA = flags.DEFINE_string("data", None, "Folder of the data sets.")
_TASKS = flags.DEFINE_list("tasks", TASKS, "Tasks.")
_RUNS = flags.DEFINE_list("runs", [], "Names of runs; empty for all.")
_LIST = flags.DEFINE_bool("list", False, "Print the names of runs and exit.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of a run.", lower_bound=20)
_WORKERS = flags.DEFINE_integer("workers", 4, "Workers.", lower_bound=2)
_TUNING = flags.DEFINE_bool("tuning", False, "Evaluate on held-back training data.")
_JSON = flags.DEFINE_string("json", None, "File for the rows, one line per run.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of rows to report without training."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "File for the tables, .md.")

KEYS = ["task", "method", "steps", "workers", "tuning", "seed"]


def train():
    """Do the missing runs, and return all rows of the file."""
    if not _DATA.value:
        raise app.UsageError("--data is needed, or --from_json")
    strategy = make_strategy(_WORKERS.value)  # before TensorFlow creates its devices
    store = resumable.ResumableRows(_JSON.value, KEYS, reporting.provenance())
    tasks = {
        name: registry.TASKS[name](_DATA.value, _TUNING.value) for name in _TASKS.value
    }
    keys = [
        {
            "task": task,
            "method": run,
            "steps": _STEPS.value,
            "seed": seed,
            "workers": _WORKERS.value,
            "tuning": _TUNING.value,
        }
        for task in _TASKS.value
        for seed in map(int, _SEEDS.value)
        for run in _RUNS.value or first_steps.RUNS
    ]
    for key in progress.track(keys, "runs", _run_name):
        store.row(key, functools.partial(_run, tasks[key["task"]], key, strategy))
    return store.rows


def _run(task, key, strategy, checkpoint):
    run = Run(task, key["method"], key["seed"], key["steps"], strategy, checkpoint)
    return run.finish()


def _run_name(key):
    return f"{key['task']}, seed {key['seed']}, {key['method']}"


def main(_):
    """Train or read rows, and report."""
    tf.get_logger().setLevel("ERROR")
    if _LIST.value:
        print("\n".join(first_steps.RUNS))
        return
    if unknown := sorted(set(_TASKS.value) - set(TASKS)):
        raise app.UsageError(f"--tasks has {', '.join(TASKS)}. Received: {unknown}")
    if unknown := sorted(set(_RUNS.value) - set(first_steps.RUNS)):
        raise app.UsageError(f"--runs has names that --list shows. Received: {unknown}")
    paths = _FROM_JSON.value
    tables = first_steps.tables(resumable.read_rows(paths) if paths else train())
    reporting.report_all(tables, _MARKDOWN.value)


if __name__ == "__main__":
    app.run(main)
