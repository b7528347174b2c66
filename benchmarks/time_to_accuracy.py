"""Wall time to the dense run's accuracy, by real processes over links of a rate.

    sudo python benchmarks/time_to_accuracy.py --data_dir ~/tensorflow_datasets \
        --rates 1gbit,100mbit --json rows.jsonl

Worker processes in network namespaces train a task, each by its own part of the
examples: `cifar10`, a residual network whose gradient is small for what a step computes
(690 kB); and `digits`, MNIST by a wide perceptron, whose gradient is large for it. All
methods take the recipe of the dense run (`study/recipes.py`): `dense` is stock Keras;
`dgc` what the documentation advises for so many steps, `tf_dgc.dgc_for_steps`; others
are `CompressedOptimizer`s with their defaults. Nothing sleeps.

accuracy     at the end, of the test set
to dense     points behind the dense run of this seed, at its end
s to target  seconds until it first was at most `--tolerance` worse than that; `times`
             those of the dense run by this method's
step         median of a step, update and exchange included
bytes        of a worker's step, on its link, protocols included; `handed`, what the
             optimizer handed to the collectives

Weights of worker 0 are copied every `--every` seconds of a run, and looked at when it
is over. A row is appended to `--json` as soon as it is there, and is not measured
again; `--from_json` reports without training.
"""

import sys
import tempfile

from absl import app, flags
from common import network, pieces, progress, reporting, signals
from common.cluster import WorkerError
from study import accuracy_runs
from study.accuracy_runs import METHODS

TASKS = ["cifar10", "digits"]
COLUMNS = [
    ("task", "task", ""),
    ("workers", "workers", "d"),
    ("rate", "rate", ""),
    ("mode", "method", ""),
    ("value", "accuracy", ".4f"),
    ("to_dense", "to dense", "+.4f"),
    ("target_seconds", "s to target", ",.0f"),
    ("times", "times", ".2f"),
    ("seconds", "whole run (s)", ",.0f"),
    ("step_ms", "step (ms)", ",.1f"),
    ("bytes", "bytes", ",d"),
    ("handed", "handed", ",d"),
]

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_TASKS = flags.DEFINE_list("tasks", TASKS, "Tasks.")
_METHODS = flags.DEFINE_list("methods", METHODS, "What to compare.")
_RATES = flags.DEFINE_list("rates", ["1gbit", "100mbit"], "Of links, as for `tc`.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Worker processes.", lower_bound=2)
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Of weights and of what is drawn.")
_STEPS = flags.DEFINE_integer("steps", 2000, "Of a run.", lower_bound=8)
_WIDTH = flags.DEFINE_integer("width", 1024, "Units of a hidden layer of `digits`.", 1)
_EVERY = flags.DEFINE_float("every", 5.0, "Seconds between two looks.", 0.01)
_TOLERANCE = flags.DEFINE_float("tolerance", 0.005, "Of the target.", 0.0, 1.0)
_TIMEOUT = flags.DEFINE_float("timeout", 3600.0, "Seconds for an answer of a worker.")
_JSON = flags.DEFINE_string("json", None, "A file for the rows, a line each.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs, to be reported without training."
)


def main(_):
    """Measure what is not there, and report."""
    rows = pieces.read(_FROM_JSON.value) if _FROM_JSON.value else train()
    shown = accuracy_runs.compared(rows, _TOLERANCE.value)
    reporting.report(shown, COLUMNS, "Time to the dense run's accuracy", origin=rows[0])


def train():
    """Run what is not done, and return all rows of the file."""
    if unknown := sorted(set(_TASKS.value) - set(TASKS)):
        raise app.UsageError(f"--tasks has {', '.join(TASKS)}. Received: {unknown}")
    signals.end_orderly()
    done = pieces.Pieces(_JSON.value, accuracy_runs.KEYS, reporting.provenance())
    with tempfile.TemporaryDirectory() as folder:
        try:
            accuracy_runs.prepare(_TASKS.value, _DATA_DIR.value, folder)
            for key in progress.track(_keys(), "runs", _named):
                asks = key, folder, _EVERY.value, _TIMEOUT.value
                row = done.row(key, lambda _, a=asks: accuracy_runs.measure(*a))
                said = {name: row[name] for name in ("value", "seconds", "bytes")}
                print(said, file=sys.stderr, flush=True)
        except (PermissionError, network.NetworkError, WorkerError) as error:
            sys.exit(f"time_to_accuracy.py: {error}")
        except KeyboardInterrupt:
            sys.exit("time_to_accuracy.py: interrupted")
    return done.rows


def _keys():
    return accuracy_runs.keys(
        *(_TASKS.value, _RATES.value, _METHODS.value, list(map(int, _SEEDS.value))),
        *(_WORKERS.value, _STEPS.value, _WIDTH.value),
    )


def _named(key):
    return f"{key['task']}, {key['rate']}, {key['mode']}, seed {key['seed']}"


if __name__ == "__main__":
    app.run(main)
