"""Measures how much of the exchange of local steps the next round's steps hide.

    sudo python benchmarks/background.py --rate 100mbit

Workers in network namespaces with links of the rate take local steps. A step sleeps
for `--step` seconds, as if a GPU computed. Four settings take turns, after a first turn
that traces: no exchange; waiting for the mean; a mean that arrives a round later; and
the means of four fragments of the model, each a quarter of a round later.
"""

import itertools
import statistics
import sys

from absl import app, flags
from common import network, progress, reporting
from common.cluster import Cluster, WorkerError

COLUMNS = [
    ("way", "the mean comes", ""),
    ("workers", "workers", "d"),
    ("rate", "rate", ""),
    ("period", "H", "d"),
    ("bytes", "bytes", ",d"),
    ("ms", "step (ms)", ",.1f"),
    ("computing", "of the time computing", ".1%"),
]

_WORKERS = flags.DEFINE_integer("workers", 2, "Number of workers.", 2)
_RATE = flags.DEFINE_string("rate", "100mbit", "Rate of the links, as for `tc`.")
_LAYERS = flags.DEFINE_integer("layers", 16, "Layers of the model.", 4)
_WIDTH = flags.DEFINE_integer("width", 512, "Inputs and outputs of a layer.", 1)
_STEP = flags.DEFINE_float("step", 0.1, "Seconds that a step computes.", 0)
_PERIOD = flags.DEFINE_integer("period", 32, "Steps of a round, a multiple of 4.", 4)
_COMPRESSOR = flags.DEFINE_string("compressor", "none", "Method.")
_REPEATS = flags.DEFINE_integer("repeats", 2, "Turns of each setting.", 1)
_TIMEOUT = flags.DEFINE_float("timeout", 600.0, "Seconds that a turn may take.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")


def create_settings(period):
    """Return the optimizer settings to compare, by name."""
    quarter = period // 4
    return {
        "never": {"period": 10**9},
        "at once": {"period": period},
        "a round later": {"period": period, "delay": period},
        "in 4 parts": {"period": period, "delay": quarter, "fragments": 4},
    }


def main(_):
    """Measure all settings and report."""
    try:
        rows = measure()
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"background.py: {error}")
    size = f"{_LAYERS.value} layers of {_WIDTH.value} x {_WIDTH.value}"
    title = f"{size} by {_COMPRESSOR.value}; a step waits for {_STEP.value:g} s"
    reporting.report(rows, COLUMNS, title, _JSON.value)


def measure():
    """Return a row per setting."""
    worker_settings = {
        "mode": "background",
        "layers": _LAYERS.value,
        "width": _WIDTH.value,
        "compressor": _COMPRESSOR.value,
        "seconds": _STEP.value,
        "steps": _PERIOD.value,
    }
    settings = create_settings(_PERIOD.value)
    answers = {name: [] for name in settings}  # of every turn
    with network.connect(_RATE.value, _WORKERS.value, 1) as net:
        cluster = Cluster(
            worker_settings,
            net.addresses(0),
            net,
            _TIMEOUT.value,
            "background_worker.py",
        )
        with cluster:
            cluster.wait()
            net.limit(measure=False)
            turns = itertools.product(range(_REPEATS.value + 1), settings)
            for _, name in progress.track(turns, "turns", lambda turn: turn[1]):
                answers[name].append(cluster.ask(**settings[name]))
    # The first turn traces.
    return [_row(name, turns[1:]) for name, turns in answers.items()]


def _row(name, turns):
    ms = statistics.median(max(a["ms"] for a in answers) for answers in turns)
    return {
        "way": name,
        "workers": _WORKERS.value,
        "rate": _RATE.value,
        "period": _PERIOD.value,
        "bytes": turns[-1][0]["bytes"],
        "ms": ms,
        "computing": 1000 * _STEP.value / ms,
    }


if __name__ == "__main__":
    app.run(main)
