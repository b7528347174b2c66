"""What a parameter server does with workers of unequal speed.

    python benchmarks/server.py --workers 4 --speeds 1,0.1
    sudo python benchmarks/server.py --rate loopback,1gbit,100mbit --json server.json

A worker computes a real gradient and sleeps, so that a step of it takes `--step_ms`
without the update, as on a machine of its own; the last one has a share of that
speed. All modes of a server, and `mirrored`, DGC without one, run some seconds each.

updates  steps of the optimizer per second, of whatever part of the workers
pushes   gradients per second that are part of these
fast     steps per second of the workers that are not slowed down, in the median
late     pushes that came when their step had been taken (`backup`)
age      updates since the weights that a push was computed by; all are in the JSON

A rate other than loopback puts every worker and the server into a network namespace,
behind a link of that rate; that needs root. Bytes are counted on these links, protocols
included, and are of a worker's step: pushed by it, and sent to it by the server. On
loopback both are together what this machine sent to itself.
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

_MODEL = flags.DEFINE_enum("model", "medium", ["tiny", "medium", "mlp"], "Trained.")
_WORKERS = flags.DEFINE_list("workers", ["2", "4"], "Numbers of workers.")
_RATE = flags.DEFINE_list("rate", ["loopback"], "Of links, as `tc` writes them.")
_MODES = flags.DEFINE_list("modes", MODES, "What to compare.")
_SPEEDS = flags.DEFINE_list("speeds", ["1", "0.5", "0.1"], "Of the last worker.")
_STEP = flags.DEFINE_float("step_ms", 100.0, "Of a step without communication.")
_STALENESS = flags.DEFINE_integer("staleness", 3, "Of ssp.")
_QUORUM = flags.DEFINE_integer("quorum", None, "Of backup; None for all but one.")
_PULL = flags.DEFINE_enum("pull", "sparse", ["whole", "sparse"], "What is pulled.")
_SPARSITY = flags.DEFINE_float("sparsity", 0.999, "Of pushes.", 0.0, 0.999999)
_SECONDS = flags.DEFINE_float("seconds", 15.0, "Of each run.")
_TIMEOUT = flags.DEFINE_float("timeout", 300.0, "Seconds for an answer of a worker.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")


def main(_):
    """Measure all, and report."""
    signals.end_orderly()
    numbers, speeds = map(int, _WORKERS.value), map(float, _SPEEDS.value)
    rows = []
    try:
        todo = itertools.product(_RATE.value, numbers, speeds, _MODES.value)
        for asked in progress.track(todo, "runs", _named):
            rows.append(measure(*asked))
            print(rows[-1], file=sys.stderr, flush=True)
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"server.py: {error}")
    except KeyboardInterrupt:
        sys.exit("server.py: interrupted")
    finally:
        if rows:
            title = f"A parameter server, {_MODEL.value}, {_STEP.value:g} ms a step"
            reporting.report(rows, COLUMNS, title, _JSON.value)


def _named(run):
    rate, number, speed, mode = run
    return f"{rate}, {number} workers, speed {speed:g}, {mode}"


def measure(rate, number, speed, mode):
    """Return the row of one run: of some seconds, or as many steps where all meet."""
    settings = {
        "mode": mode,
        "model": _MODEL.value,
        "step_ms": _STEP.value,
        "batch_size": 4,
        "sparsity": _SPARSITY.value,
        "staleness": _STALENESS.value,
        "quorum": _QUORUM.value or max(1, number - 1),
        "pull": _PULL.value,
        "speeds": server_runs.speeds(number, speed),
    }
    asked = settings, rate, "server_worker.py", _TIMEOUT.value
    with server_runs.started(*asked) as run:
        length = {"seconds": _SECONDS.value, "count": 10**9}
        if mode == "mirrored":
            count = max(2, int(_SECONDS.value / run.step))
            length = {"seconds": 10**9, "count": count}
        found = run.take(**length)
    about = {"rate": rate, "workers": number, "speed": speed, **settings}
    return {**about, **run.about, **found}


if __name__ == "__main__":
    app.run(main)
