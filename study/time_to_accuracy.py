"""Measures wall time to the dense run's accuracy, with processes and limited links.

    sudo python study/time_to_accuracy.py --data_dir ~/tensorflow_datasets \
        --rates 1gbit,100mbit --seeds 0,1,2 --json rows.jsonl

Worker processes in network namespaces train a task, each with its own part of the
examples. `cifar10` is a residual network whose gradient (690 kB) is small relative to
the computation of a step; `digits`, MNIST by a wide perceptron, has a relatively large
gradient. All methods use the recipe of the dense run (`tasks/recipes.py`): `dense` is
stock Keras; `dgc` is `tf_dgc.dgc_for_steps`, the documented settings for the length of
the run; others are `CompressedOptimizer`s with defaults. Workers do not sleep.

accuracy     final test accuracy
to dense     difference to the final accuracy of the dense run of this seed
s to target  seconds until the first evaluation that was at most `--tolerance` below the
             dense run's final accuracy; `since`, time of the evaluation before;
             `lasting`, time from which all evaluations were good enough
times        ratio of the dense run's seconds to this run's, and its range, as the
target
             was reached between two evaluations. Over seeds, the geometric mean and its
             95 % interval (Student); none unless every run reached the target
step         median step time, including update and exchange
bytes        bytes of a worker's step on its link, protocols included; `handed`, payload
             bytes that the optimizer passed to the collectives

Seconds cover all `--steps` from the initial weights. They exclude the start: processes
start, read the data, build the model, and take 3 steps on unlimited links to trace
functions and open connections; then weights, the optimizer's state and the order of the
data are restored. All workers copy their weights `--looks` times at equal numbers of
steps, the same for all methods, and evaluate them after the run. Copying is part of the
seconds (`copying` in the rows). Layer statistics are averaged over workers before the
evaluation, as in `fit`, and all workers must have the same weights.

A row is appended to `--json` when a run ends, and is not measured again; `--from_json`
reports rows without training. If a method fails, its row has the error; `--retry`
repeats it and keeps that row. If a dense run fails, the command ends.
"""

import sys
import tempfile

import benchmarks_path  # noqa: F401
from absl import app, flags
from common import network, progress, reporting, resumable, signals
from common.cluster import WorkerError
from experiments import time_to_accuracy
from experiments.time_to_accuracy import METHODS

TASKS = ["cifar10", "digits"]
_OF_RUN = [
    ("task", "task", ""),
    ("workers", "workers", "d"),
    ("rate", "rate", ""),
    ("mode", "method", ""),
]
_TIMES = [
    ("times_least", "from", ".2f"),
    ("times", "times", ".2f"),
    ("times_most", "to", ".2f"),
]
COLUMNS = [
    *_OF_RUN,
    ("seed", "seed", "d"),
    ("attempt", "failed tries", "d"),
    ("failed", "failed", ""),
    ("value", "accuracy", ".4f"),
    ("to_dense", "to dense", "+.4f"),
    ("since", "since", ",.1f"),
    ("target_seconds", "s to target", ",.1f"),
    ("target_updates", "steps", ",d"),
    ("lasting", "lasting", ",.1f"),
    *_TIMES,
    ("seconds", "whole run (s)", ",.1f"),
    ("step_ms", "step (ms)", ",.1f"),
    ("bytes", "bytes", ",d"),
    ("handed", "handed", ",d"),
]
SUMMARY = [
    *_OF_RUN,
    ("runs", "runs", "d"),
    ("failures", "failed", "d"),
    ("reached", "reached", "d"),
    ("value", "accuracy", ".4f"),
    ("to_dense", "to dense", "+.4f"),
    ("half_width", "+-", ".4f"),
    ("target_seconds", "s to target", ",.1f"),
    *_TIMES,
]

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of TensorFlow Datasets.")
_TASKS = flags.DEFINE_list("tasks", TASKS, "Tasks.")
_METHODS = flags.DEFINE_list("methods", METHODS, "Methods to compare.")
_RATES = flags.DEFINE_list(
    "rates", ["1gbit", "100mbit"], "Rates of links, as for `tc`."
)
_WORKERS = flags.DEFINE_integer("workers", 2, "Worker processes.", lower_bound=2)
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds of the weights and the data.")
_STEPS = flags.DEFINE_integer("steps", 2000, "Steps of a run.", lower_bound=8)
_WIDTH = flags.DEFINE_integer("width", 1024, "Units of a hidden layer of `digits`.", 1)
_LOOKS = flags.DEFINE_integer("looks", 40, "Evaluations; `--steps` at most.", 1)
_TOLERANCE = flags.DEFINE_float(
    "tolerance", time_to_accuracy.TOLERANCE, "Tolerance of the target.", 0.0, 1.0
)
_TIMEOUT = flags.DEFINE_float("timeout", 3600.0, "Seconds for a worker's reply.")
_RETRY = flags.DEFINE_bool("retry", False, "Whether to repeat failed runs.")
_JSON = flags.DEFINE_string("json", None, "File for the rows, one line per run.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of rows to report without training."
)


def main(_):
    """Train or read rows, and report."""
    rows = resumable.read_rows(_FROM_JSON.value) if _FROM_JSON.value else train()
    lines = time_to_accuracy.compared(rows, _TOLERANCE.value)
    title = "Time to the dense run's accuracy"
    reporting.report(lines, COLUMNS, title, origin=rows[0])
    summaries = time_to_accuracy.summaries(lines)
    reporting.report(summaries, SUMMARY, "Over seeds", origin=rows[0])
    commits = sorted({row["commit"] for row in rows})
    print(f"Commits: {', '.join(commits)}")


def train():
    """Do the missing runs, and return all rows of the file."""
    _check()
    signals.raise_on_signals()
    origin = reporting.provenance()
    store = resumable.ResumableRows(_JSON.value, time_to_accuracy.KEYS, origin)
    with tempfile.TemporaryDirectory() as folder:
        try:
            time_to_accuracy.prepare(_TASKS.value, _DATA_DIR.value, folder)
            for key in progress.track(_keys(origin, store.rows), "runs", _run_name):
                row = store.row(
                    key,
                    lambda _, k=key: time_to_accuracy.measure(
                        k, folder, _TIMEOUT.value
                    ),
                )
                names = ("value", "seconds", "bytes", "error")
                figures = {name: row[name] for name in names if name in row}
                print(figures, file=sys.stderr, flush=True)
        except (PermissionError, network.NetworkError, WorkerError) as error:
            sys.exit(f"time_to_accuracy.py: {error}")
        except KeyboardInterrupt:
            sys.exit("time_to_accuracy.py: interrupted")
    return store.rows


def _check():
    if unknown := sorted(set(_TASKS.value) - set(TASKS)):
        raise app.UsageError(f"--tasks has {', '.join(TASKS)}. Received: {unknown}")
    try:
        time_to_accuracy.check(_METHODS.value, _LOOKS.value, _STEPS.value)
    except ValueError as error:
        raise app.UsageError(str(error)) from error


def _keys(origin, rows):
    shared = {"workers": _WORKERS.value, "steps": _STEPS.value, "looks": _LOOKS.value}
    return time_to_accuracy.keys(
        _TASKS.value,
        _RATES.value,
        _METHODS.value,
        list(map(int, _SEEDS.value)),
        _WIDTH.value,
        {**origin, **shared},
        rows,
        _RETRY.value,
    )


def _run_name(key):
    return f"{key['task']}, {key['rate']}, {key['mode']}, seed {key['seed']}"


if __name__ == "__main__":
    app.run(main)
