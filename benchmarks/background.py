"""How much of the exchange of local steps is hidden behind the steps of the next round.

    sudo python benchmarks/background.py --rate 100mbit

Real workers in network namespaces, whose links have the rate, take local steps that
wait for `--step` seconds, without the processor, as if a GPU computed. Without an
exchange; with one whose mean they wait for; and with means that come a round later, or
a quarter of a round later of each of four parts of the model. By turns, after a first
one that traces.
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
_RATE = flags.DEFINE_string("rate", "100mbit", "Of every link, as `tc` writes it.")
_LAYERS = flags.DEFINE_integer("layers", 16, "Layers of the model.", 4)
_WIDTH = flags.DEFINE_integer("width", 512, "Inputs and outputs of each.", 1)
_STEP = flags.DEFINE_float("step", 0.1, "Seconds that a step computes.", 0)
_PERIOD = flags.DEFINE_integer("period", 32, "Steps of a round, by 4.", 4)
_COMPRESSOR = flags.DEFINE_string("compressor", "none", "Method.")
_REPEATS = flags.DEFINE_integer("repeats", 2, "Times of each, by turns.", 1)
_TIMEOUT = flags.DEFINE_float("timeout", 600.0, "Seconds that a turn may take.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")


def ways(period):
    """Return the settings of each way, by its name.

    Args:
        period: steps of a round.
    """
    quarter = period // 4
    return {
        "never": {"period": 10**9},
        "at once": {"period": period},
        "a round later": {"period": period, "delay": period},
        "in 4 parts": {"period": period, "delay": quarter, "fragments": 4},
    }


def main(_):
    """Measure all ways, and report."""
    try:
        rows = measure()
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"background.py: {error}")
    size = f"{_LAYERS.value} layers of {_WIDTH.value} x {_WIDTH.value}"
    title = f"{size} by {_COMPRESSOR.value}; a step waits for {_STEP.value:g} s"
    reporting.report(rows, COLUMNS, title, _JSON.value)


def measure():
    """Return a row of each way."""
    settings = {
        "mode": "background",
        "layers": _LAYERS.value,
        "width": _WIDTH.value,
        "compressor": _COMPRESSOR.value,
        "seconds": _STEP.value,
        "steps": _PERIOD.value,
    }
    turns = ways(_PERIOD.value)
    times = {way: [] for way in turns}
    with network.connect(_RATE.value, _WORKERS.value, 1) as links:
        asked = links.addresses(0), links, _TIMEOUT.value, "background_worker.py"
        with Cluster(settings, *asked) as cluster:
            cluster.wait()
            links.limit(measure=False)
            rounds = itertools.product(range(_REPEATS.value + 1), turns)
            for _, way in progress.track(rounds, "turns", lambda turn: turn[1]):
                times[way].append(cluster.ask(**turns[way]))
    return [_row(way, asked[1:]) for way, asked in times.items()]


def _row(way, rounds):
    ms = statistics.median(max(a["ms"] for a in answers) for answers in rounds)
    return {
        "way": way,
        "workers": _WORKERS.value,
        "rate": _RATE.value,
        "period": _PERIOD.value,
        "bytes": rounds[-1][0]["bytes"],
        "ms": ms,
        "computing": 1000 * _STEP.value / ms,
    }


if __name__ == "__main__":
    app.run(main)
