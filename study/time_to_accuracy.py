"""Wall time to the dense run's accuracy, by real processes over links of a rate.

    sudo python study/time_to_accuracy.py --data_dir ~/tensorflow_datasets \
        --rates 1gbit,100mbit --seeds 0,1,2 --json rows.jsonl

Worker processes in network namespaces train a task, each by its own part of the
examples: `cifar10`, a residual network whose gradient is small for what a step computes
(690 kB); and `digits`, MNIST by a wide perceptron, whose gradient is large for it. All
methods take the recipe of the dense run (`tasks/recipes.py`): `dense` is stock Keras;
`dgc` what the documentation advises for so many steps, `tf_dgc.dgc_for_steps`; others
are `CompressedOptimizer`s with their defaults. Nothing sleeps.

accuracy     at the end, of the test set
to dense     points behind the dense run of this seed, at its end
s to target  seconds until the first look at which it was at most `--tolerance` worse
             than that; `since`, the look before; `lasting`, from where on all looks are
times        seconds of the dense run by this method's, with what the distance of two
             looks leaves open. Over seeds, the geometric mean and its 95 % interval by
             Student; none unless every run came to the target
step         median of a step, update and exchange included
bytes        of a worker's step, on its link, protocols included; `handed`, what the
             optimizer handed to the collectives

Seconds are those of all `--steps`, from the weights as they were drawn. Left out is
what comes before: processes start, read the data, build the model, and take 3 steps on
links without a limit, by which functions are traced and connections made; then weights,
the optimizer's state and what is drawn are put back. All weights are copied `--looks`
times, after equal numbers of steps and so as often with every method, which is part of
the seconds (`copying` in the rows), and looked at when all is over. Statistics of
normalization are averaged over workers before, as `fit` does, and all workers have to
have the same weights.

A row is appended to `--json` as soon as it is there, and is not measured again;
`--from_json` reports without training. A method that fails has a row that says so; with
`--retry` it is run again, and that row stays. If a dense run fails, all ends.
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

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_TASKS = flags.DEFINE_list("tasks", TASKS, "Tasks.")
_METHODS = flags.DEFINE_list("methods", METHODS, "What to compare.")
_RATES = flags.DEFINE_list("rates", ["1gbit", "100mbit"], "Of links, as for `tc`.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Worker processes.", lower_bound=2)
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Of weights and of what is drawn.")
_STEPS = flags.DEFINE_integer("steps", 2000, "Of a run.", lower_bound=8)
_WIDTH = flags.DEFINE_integer("width", 1024, "Units of a hidden layer of `digits`.", 1)
_LOOKS = flags.DEFINE_integer("looks", 40, "Of a run, `--steps` at most.", 1)
_TOLERANCE = flags.DEFINE_float(
    "tolerance", time_to_accuracy.TOLERANCE, "Of the target.", 0.0, 1.0
)
_TIMEOUT = flags.DEFINE_float("timeout", 3600.0, "Seconds for an answer of a worker.")
_RETRY = flags.DEFINE_bool("retry", False, "Whether to run again what has failed.")
_JSON = flags.DEFINE_string("json", None, "A file for the rows, a line each.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs, to be reported without training."
)


def main(_):
    """Measure what is not there, and report."""
    rows = resumable.read_rows(_FROM_JSON.value) if _FROM_JSON.value else train()
    shown = time_to_accuracy.compared(rows, _TOLERANCE.value)
    of_rows = {"origin": rows[0]}
    reporting.report(shown, COLUMNS, "Time to the dense run's accuracy", **of_rows)
    found = time_to_accuracy.summaries(shown)
    reporting.report(found, SUMMARY, "Over seeds", **of_rows)
    commits = sorted({row["commit"] for row in rows})
    print(f"Commits: {', '.join(commits)}")


def train():
    """Run what is not done, and return all rows of the file."""
    _check()
    signals.end_orderly()
    origin = reporting.provenance()
    done = resumable.ResumableRows(_JSON.value, time_to_accuracy.KEYS, origin)
    with tempfile.TemporaryDirectory() as folder:
        try:
            time_to_accuracy.prepare(_TASKS.value, _DATA_DIR.value, folder)
            for key in progress.track(_keys(origin, done.rows), "runs", _named):
                asks = key, folder, _TIMEOUT.value
                row = done.row(key, lambda _, a=asks: time_to_accuracy.measure(*a))
                told = ("value", "seconds", "bytes", "error")
                said = {name: row[name] for name in told if name in row}
                print(said, file=sys.stderr, flush=True)
        except (PermissionError, network.NetworkError, WorkerError) as error:
            sys.exit(f"time_to_accuracy.py: {error}")
        except KeyboardInterrupt:
            sys.exit("time_to_accuracy.py: interrupted")
    return done.rows


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
        *(_TASKS.value, _RATES.value, _METHODS.value, list(map(int, _SEEDS.value))),
        *(_WIDTH.value, {**origin, **shared}, rows, _RETRY.value),
    )


def _named(key):
    return f"{key['task']}, {key['rate']}, {key['mode']}, seed {key['seed']}"


if __name__ == "__main__":
    app.run(main)
