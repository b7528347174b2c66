"""Measures training with a parameter server and workers of unequal speed.

    python benchmarks/server.py --workers 4 --speeds 1,0.1
    sudo python benchmarks/server.py --rate loopback,1gbit,100mbit --json server.json

A worker computes a gradient and sleeps until `--step_ms` have passed, as on its own
machine; the last worker has a share of that speed. All modes of a server, and
`mirrored`, which is DGC without a server, run for some seconds each.

updates  updates of the weights per second
pushes   gradients per second that were part of these updates
fast     median of steps per second of the workers that are not slowed down
late     share of pushes that arrived after their step (`backup`)
age      updates since the weights that a push was computed with; the JSON has all ages

A rate other than loopback puts every worker and the server into a network namespace
with a link of that rate, which needs root. Bytes are counted on these links and include
protocols: for a worker's step, those that it pushed and those that the server sent to
it. On loopback they are all bytes that this machine sent to itself.
"""

import itertools
import sys

from absl import app, flags
from common import network, progress, reporting, server_runs, signals
from common.cluster import WorkerError

MODES = ["mirrored", *server_runs.SERVED]
COLUMNS = [
    ("workers", "workers", "d"),
    ("rate", "rate", ""),
    ("speed", "speed", "g"),
    ("mode", "mode", ""),
    ("updates_per_second", "updates/s", ",.1f"),
    ("pushes_per_second", "pushes/s", ",.1f"),
    ("fast_per_second", "fast, steps/s", ",.1f"),
    ("late", "late", ".0%"),
    ("mean_age", "age, mean", ".1f"),
    ("largest_age", "most", "d"),
    ("pushed_bytes", "pushed", ",d"),
    ("pulled_bytes", "pulled", ",d"),
    ("bytes", "bytes per step", ",d"),
]

_MODEL = flags.DEFINE_enum("model", "medium", ["tiny", "medium", "mlp"], "Model.")
_WORKERS = flags.DEFINE_list("workers", ["2", "4"], "Numbers of workers.")
_RATE = flags.DEFINE_list("rate", ["loopback"], "Rates of the links, as for `tc`.")
_MODES = flags.DEFINE_list("modes", MODES, "Modes to compare.")
_SPEEDS = flags.DEFINE_list("speeds", ["1", "0.5", "0.1"], "Last worker's speeds.")
_STEP = flags.DEFINE_float("step_ms", 100.0, "Time of a step without communication.")
_STALENESS = flags.DEFINE_integer("staleness", 3, "Staleness of `ssp`.")
_QUORUM = flags.DEFINE_integer("quorum", None, "`backup`'s; None for N - 1.")
_PULL = flags.DEFINE_enum("pull", "sparse", ["whole", "sparse"], "Kind of pulls.")
_SPARSITY = flags.DEFINE_float("sparsity", 0.999, "Pushes' sparsity.", 0.0, 0.999999)
_SECONDS = flags.DEFINE_float("seconds", 15.0, "Seconds of a run.")
_TIMEOUT = flags.DEFINE_float("timeout", 300.0, "Seconds for an answer of a worker.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")


def main(_):
    """Measure all runs and report."""
    signals.raise_on_signals()
    rows = []
    try:
        runs = itertools.product(
            _RATE.value,
            map(int, _WORKERS.value),
            map(float, _SPEEDS.value),
            _MODES.value,
        )
        for rate, num_workers, speed, mode in progress.track(runs, "runs", _label):
            rows.append(measure(rate, num_workers, speed, mode))
            print(rows[-1], file=sys.stderr, flush=True)
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"server.py: {error}")
    except KeyboardInterrupt:
        sys.exit("server.py: interrupted")
    finally:
        if rows:
            title = f"A parameter server, {_MODEL.value}, {_STEP.value:g} ms a step"
            reporting.report(rows, COLUMNS, title, _JSON.value)


def _label(run):
    rate, num_workers, speed, mode = run
    return f"{rate}, {num_workers} workers, speed {speed:g}, {mode}"


def measure(rate, num_workers, speed, mode):
    """Return the row of one run of `--seconds`.

    In mode "mirrored" the number of steps is fixed: all workers must take as many.
    """
    settings = {
        "mode": mode,
        "model": _MODEL.value,
        "step_ms": _STEP.value,
        "batch_size": 4,
        "sparsity": _SPARSITY.value,
        "staleness": _STALENESS.value,
        "quorum": _QUORUM.value or max(1, num_workers - 1),
        "pull": _PULL.value,
        "speeds": server_runs.speeds(num_workers, speed),
    }
    with server_runs.start_run(
        settings, rate, "server_worker.py", _TIMEOUT.value
    ) as run:
        if mode == "mirrored":
            count = max(2, int(_SECONDS.value / run.step))
            figures = run.measure(seconds=10**9, count=count)
        else:
            figures = run.measure(seconds=_SECONDS.value, count=10**9)
    return {
        "rate": rate,
        "workers": num_workers,
        "speed": speed,
        **settings,
        **run.warmup_figures,
        **figures,
    }


if __name__ == "__main__":
    app.run(main)
