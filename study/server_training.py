"""Measures accuracy and speed of training with a parameter server and a slow worker.

    python study/server_training.py --data_dir ~/tensorflow_datasets
    sudo python study/server_training.py --data_dir ~/tensorflow_datasets \
        --rate 1gbit --inner sgd --json rows.jsonl

Worker processes train a perceptron on MNIST, each with its own part of the examples:
`dense`, Keras's optimizer with all-reduced gradients; `dgc`, `DGCOptimizer`; and the
modes of `ServerOptimizer`, with a server. A worker computes a gradient and sleeps, so
that a step takes `--step_ms` without the update; the last worker is slower. All runs
use the same number of gradients, `--steps` per worker on average, over which the
learning rate decays by a cosine. SGD has momentum, on the workers except in `dense`. In
`async` and `ssp`, where each push is a step, the rate of Adam is divided by the number
of workers.

accuracy     final test accuracy; `dense`, that of the dense run of this seed
within       whether the accuracy is at most 0.01 worse
s to target  seconds until it first was; `updates` of the optimizer until then
seconds      duration of the run; `pushes/s`, gradients per second that entered steps
age          updates since the weights for which a pushed gradient was computed
bytes        per step and worker, on the links; `less` is the ratio of two models of
             float32, one pushed and one pulled, to these bytes
push, pull   payload bytes per step, without protocols

The server, or worker 0 without a server, copies the weights every `--every` seconds and
evaluates them after the run. Time begins after the first 3 steps of each worker, which
trace functions. Bytes are counted as in `server.py`: on loopback, all traffic of this
machine to itself. A row is appended to `--json` when a run ends, and is not measured
again; `--from_json` reports rows without training.
"""

import sys
import tempfile

import benchmarks_path  # noqa: F401
from absl import app, flags
from common import network, progress, reporting, resumable, signals
from common.cluster import WorkerError
from experiments import server_training
from experiments.server_training import INNERS, MODES
from tasks import digits

COLUMNS = [
    ("inner", "inner", ""),
    ("workers", "workers", "d"),
    ("rate", "rate", ""),
    ("speed", "speed", "g"),
    ("mode", "mode", ""),
    ("value", "accuracy", ".4f"),
    ("dense", "dense", ".4f"),
    ("within", "within", ""),
    ("target_seconds", "s to target", ",.1f"),
    ("target_updates", "updates", ",d"),
    ("seconds", "seconds", ",.1f"),
    ("pushes_per_second", "pushes/s", ",.1f"),
    ("mean_age", "age", ".1f"),
    ("pushed_bytes", "pushed", ",d"),
    ("pulled_bytes", "pulled", ",d"),
    ("bytes", "bytes", ",d"),
    ("less", "less", ",.0f"),
    ("push", "push", ",d"),
    ("pull_bytes", "pull", ",d"),
]

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of TensorFlow Datasets.")
_INNER = flags.DEFINE_list("inner", INNERS, "Inner optimizers.")
_WORKERS = flags.DEFINE_list("workers", ["2", "4"], "Numbers of workers.")
_SPEEDS = flags.DEFINE_list("speeds", ["1", "0.25"], "Speeds of the last worker.")
_RATE = flags.DEFINE_list("rate", ["loopback"], "Rates of links, as for `tc`.")
_MODES = flags.DEFINE_list("modes", MODES, "Modes to compare.")
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds of the weights and the data.")
_STEPS = flags.DEFINE_integer("steps", 600, "Mean number of steps per worker.", 8)
_STEP = flags.DEFINE_float("step_ms", 40.0, "Step time without the update.", 0.0)
_BATCH = flags.DEFINE_integer("batch_size", 32, "Examples per step and worker.", 1)
_WIDTH = flags.DEFINE_integer("width", 1024, "Units of a hidden layer.", 1)
_SGD = flags.DEFINE_float("sgd_rate", 0.1, "Learning rate, with momentum 0.9.")
_ADAM = flags.DEFINE_float("adam_rate", 0.001, "Learning rate.")
_SPARSITY = flags.DEFINE_float("sparsity", 0.999, "Sparsity of pushes.", 0.0, 0.999999)
_MASKING = flags.DEFINE_bool(
    "factor_masking", True, "Whether to mask the momentum of sent entries."
)
_PULL = flags.DEFINE_enum("pull", "sparse", ["whole", "sparse"], "Kind of pulls.")
_PULL_SPARSITY = flags.DEFINE_float(
    "pull_sparsity", None, "Sparsity of pulls; None for as much as N pushes.", 0.0, 1.0
)
_STALENESS = flags.DEFINE_integer("staleness", 3, "Maximum staleness of ssp.")
_QUORUM = flags.DEFINE_integer("quorum", None, "Of backup; None for all but one.")
_EVERY = flags.DEFINE_float("every", 1.0, "Seconds between two snapshots.", 0.01)
_TIMEOUT = flags.DEFINE_float("timeout", 300.0, "Seconds for a worker's reply.")
_JSON = flags.DEFINE_string("json", None, "File for the rows, one line per run.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of rows to report without training."
)


def main(_):
    """Train or read rows, and report."""
    rows = resumable.read_rows(_FROM_JSON.value) if _FROM_JSON.value else train()
    title = f"MNIST by a perceptron of {rows[0]['parameters']:,} parameters"
    reporting.report(server_training.compared(rows), COLUMNS, title, origin={})


def train():
    """Do the missing runs, and return all rows of the file."""
    _check("inner", _INNER.value, INNERS)
    _check("modes", _MODES.value, MODES)
    signals.raise_on_signals()
    store = resumable.ResumableRows(
        _JSON.value, server_training.KEYS, reporting.provenance()
    )
    with tempfile.TemporaryDirectory() as folder:
        digits.prepare(_DATA_DIR.value, folder)
        plan = _plan(folder)
        try:
            for key in progress.track(_keys(plan), "runs", _run_name):
                row = store.row(key, lambda _, k=key: server_training.measure(plan, k))
                figures = {name: row[name] for name in ("value", "seconds", "bytes")}
                print(figures, file=sys.stderr, flush=True)
        except (PermissionError, network.NetworkError, WorkerError) as error:
            sys.exit(f"server_training.py: {error}")
        except KeyboardInterrupt:
            sys.exit("server_training.py: interrupted")
    return store.rows


def _run_name(key):
    run = f"{key['inner']}, {key['workers']} workers, speed {key['speed']:g}"
    return f"{run}, {key['rate']}, {key['mode']}, seed {key['seed']}"


def _check(flag, values, allowed):
    if unknown := [value for value in values if value not in allowed]:
        raise app.UsageError(f"--{flag} has {', '.join(allowed)}. Received: {unknown}")


def _plan(folder):
    return server_training.Plan(
        folder=folder,
        steps=_STEPS.value,
        step_ms=_STEP.value,
        batch_size=_BATCH.value,
        width=_WIDTH.value,
        learning_rates={"sgd": _SGD.value, "adam": _ADAM.value},
        sparsity=_SPARSITY.value,
        factor_masking=_MASKING.value,
        pull=_PULL.value,
        pull_sparsity=_PULL_SPARSITY.value,
        staleness=_STALENESS.value,
        quorum=_QUORUM.value,
        every=_EVERY.value,
        timeout=_TIMEOUT.value,
    )


def _keys(plan):
    return server_training.keys(
        plan,
        _INNER.value,
        list(map(int, _WORKERS.value)),
        list(map(float, _SPEEDS.value)),
        _RATE.value,
        _MODES.value,
        list(map(int, _SEEDS.value)),
    )


if __name__ == "__main__":
    app.run(main)
