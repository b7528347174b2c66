"""Training by a parameter server: how good it is, and how soon, with a slow worker.

    python study/server_training.py --data_dir ~/tensorflow_datasets
    sudo python study/server_training.py --data_dir ~/tensorflow_datasets \
        --rate 1gbit --inner sgd --json rows.jsonl

Worker processes train a perceptron on MNIST, each by its own part of the examples:
`dense`, Keras's optimizer by all-reduce of whole gradients; `dgc`, `DGCOptimizer`; and
the modes of `ServerOptimizer`, with a server. A worker computes a gradient and sleeps,
so that a step takes `--step_ms` without the update; the last one has a share of that
speed. Every run ends with as many gradients, `--steps` of each worker in the mean; what
the optimizer's rate is decays over these by a cosine. SGD has momentum, which is on the
workers but for `dense`; the rate of Adam is divided by the number of workers where each
push is a step, in `async` and `ssp`.

accuracy     at the end, of the test set; `dense` that of the dense run of this seed
within       whether it is at most 0.01 worse
s to target  seconds until it first was; `updates` of the optimizer until then
seconds      of the run; `pushes/s`, gradients per second that were part of steps
age          updates since the weights that a push was computed by
bytes        of a worker's step, on the links; `less` is how many times less than two
             models of float32, one pushed and one pulled
push, pull   bytes of a step that were handed over, without protocols

Weights are copied every `--every` seconds of a run, by the server itself or by worker 0
where there is none, and looked at when it is over. Its time begins behind the first 3
steps of each worker, by which functions are traced. Bytes are counted as `server.py`
does: on loopback all that this machine sent to itself. A row is appended to `--json` as
soon as it is there, and is not measured again; `--from_json` reports without training.
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

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_INNER = flags.DEFINE_list("inner", INNERS, "Inner optimizers.")
_WORKERS = flags.DEFINE_list("workers", ["2", "4"], "Numbers of workers.")
_SPEEDS = flags.DEFINE_list("speeds", ["1", "0.25"], "Of the last worker.")
_RATE = flags.DEFINE_list("rate", ["loopback"], "Of links, as `tc` writes them.")
_MODES = flags.DEFINE_list("modes", MODES, "What to compare.")
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Of weights and of what is drawn.")
_STEPS = flags.DEFINE_integer("steps", 600, "Of each worker, in the mean.", 8)
_STEP = flags.DEFINE_float("step_ms", 40.0, "Of a step without the update.", 0.0)
_BATCH = flags.DEFINE_integer("batch_size", 32, "Examples of a worker's step.", 1)
_WIDTH = flags.DEFINE_integer("width", 1024, "Units of a hidden layer.", 1)
_SGD = flags.DEFINE_float("sgd_rate", 0.1, "Learning rate, with momentum 0.9.")
_ADAM = flags.DEFINE_float("adam_rate", 0.001, "Learning rate.")
_SPARSITY = flags.DEFINE_float("sparsity", 0.999, "Of pushes.", 0.0, 0.999999)
_MASKING = flags.DEFINE_bool(
    "factor_masking", True, "Whether what was sent loses its momentum."
)
_PULL = flags.DEFINE_enum("pull", "sparse", ["whole", "sparse"], "What is pulled.")
_PULL_SPARSITY = flags.DEFINE_float(
    "pull_sparsity", None, "Of a sparse pull; None for as much as all push.", 0.0, 1.0
)
_STALENESS = flags.DEFINE_integer("staleness", 3, "Of ssp.")
_QUORUM = flags.DEFINE_integer("quorum", None, "Of backup; None for all but one.")
_EVERY = flags.DEFINE_float("every", 1.0, "Seconds between two looks.", 0.01)
_TIMEOUT = flags.DEFINE_float("timeout", 300.0, "Seconds for an answer of a worker.")
_JSON = flags.DEFINE_string("json", None, "A file for the rows, a line each.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs, to be reported without training."
)


def main(_):
    """Measure what is not there, and report."""
    rows = resumable.read_rows(_FROM_JSON.value) if _FROM_JSON.value else train()
    shown = server_training.compared(rows)
    title = f"MNIST by a perceptron of {rows[0]['parameters']:,} parameters"
    reporting.report(shown, COLUMNS, title, origin={})


def train():
    """Run what is not done, and return all rows of the file."""
    _check("inner", _INNER.value, INNERS)
    _check("modes", _MODES.value, MODES)
    signals.end_orderly()
    done = resumable.ResumableRows(
        _JSON.value, server_training.KEYS, reporting.provenance()
    )
    with tempfile.TemporaryDirectory() as folder:
        digits.prepare(_DATA_DIR.value, folder)
        plan = _plan(folder)
        try:
            for key in progress.track(_keys(plan), "runs", _named):
                row = done.row(key, lambda _, k=key: server_training.measure(plan, k))
                said = {name: row[name] for name in ("value", "seconds", "bytes")}
                print(said, file=sys.stderr, flush=True)
        except (PermissionError, network.NetworkError, WorkerError) as error:
            sys.exit(f"server_training.py: {error}")
        except KeyboardInterrupt:
            sys.exit("server_training.py: interrupted")
    return done.rows


def _named(key):
    run = f"{key['inner']}, {key['workers']} workers, speed {key['speed']:g}"
    return f"{run}, {key['rate']}, {key['mode']}, seed {key['seed']}"


def _check(name, given, known):
    if unknown := [each for each in given if each not in known]:
        raise app.UsageError(f"--{name} has {', '.join(known)}. Received: {unknown}")


def _plan(folder):
    return server_training.Plan(
        folder, _STEPS.value, _STEP.value, _BATCH.value, _WIDTH.value,
        {"sgd": _SGD.value, "adam": _ADAM.value},
        _SPARSITY.value, _MASKING.value, _PULL.value, _PULL_SPARSITY.value,
        _STALENESS.value, _QUORUM.value, _EVERY.value, _TIMEOUT.value,
    )  # fmt: skip


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
