"""How much of the exchange a backward pass hides, and the other way round.

    sudo python benchmarks/overlap.py --rate 100mbit

Real workers in network namespaces, whose links have the rate. For each method the
exchange is measured alone, with gradients that are there at once (compression and
update are part of it); then a backward pass that takes as long, or `--backward` times
as long, alone, with a step behind it, and with one that overlaps; and the update, which
cannot overlap, as it waits for everything. By turns, after a first time that traces.

With `--auto` all of them have `collective="auto"`, and one more step leaves it to that
whether to overlap; it knows the links, and not the backward pass. What it chose stands
beside its time, by turns with the others, and what that is of the faster of both.

The backward pass is simulated: layer by layer it waits, without the processor, as if a
GPU computed, since workers share the processors of this machine. With `--computes` it
multiplies matrices, on one thread of each worker.
"""

import sys

import numpy as np
from absl import app, flags
from common import network, progress, reporting
from common.cluster import Cluster, WorkerError

COLUMNS = [
    ("method", "method", ""),
    ("workers", "workers", "d"),
    ("rate", "rate", ""),
    ("bytes", "bytes", ",d"),
    ("buckets", "buckets", "d"),
    ("exchange_ms", "exchange (ms)", ",.1f"),
    ("backward_ms", "backward (ms)", ",.1f"),
    ("whole_ms", "whole step (ms)", ",.1f"),
    ("overlap_ms", "overlapping (ms)", ",.1f"),
    ("p90_ms", "p90 (ms)", ",.1f"),
    ("hidden", "of the shorter hidden", ".0%"),
    ("update_ms", "update (ms)", ",.1f"),
    ("of_longer", "without it, of the longer", ".2f"),
]
AUTO = [
    ("chosen", "`auto`", ""),
    ("auto_ms", "its step (ms)", ",.1f"),
    ("auto_p90_ms", "its p90 (ms)", ",.1f"),
    ("of_faster", "of the faster", ".2f"),
]

_WORKERS = flags.DEFINE_integer("workers", 2, "Number of workers.", 2)
_RATE = flags.DEFINE_string("rate", "100mbit", "Of every link, as `tc` writes it.")
_METHODS = flags.DEFINE_list(
    "methods",
    ["float16", "power_sgd 32", "qsgd", "none"],
    "Methods; `dgc` is one too, and `power_sgd R` has rank R.",
)
_LAYERS = flags.DEFINE_integer("layers", 12, "Layers of the model.", 2)
_WIDTH = flags.DEFINE_integer("width", 512, "Inputs and outputs of each.", 1)
_BACKWARD = flags.DEFINE_float(
    "backward", 1.0, "Time of the backward pass, in times of the exchange.", 0
)
_COMPUTES = flags.DEFINE_boolean("computes", False, "Whether it uses the processor.")
_AUTO = flags.DEFINE_boolean("auto", False, "Whether to show what `auto` chooses too.")
_REPEATS = flags.DEFINE_integer("repeats", 9, "Times of each, by turns.", 3)
_TIMEOUT = flags.DEFINE_float("timeout", 600.0, "Seconds that a turn may take.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")


def main(_):
    """Measure all methods, and report."""
    try:
        rows = measure()
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"overlap.py: {error}")
    what = "computes" if _COMPUTES.value else "waits"
    size = f"{_LAYERS.value} layers of {_WIDTH.value} x {_WIDTH.value}"
    columns = COLUMNS + AUTO if _AUTO.value else COLUMNS
    reporting.report(rows, columns, f"{size}; the backward pass {what}", _JSON.value)


def measure():
    """Return a row per method."""
    with network.connect(_RATE.value, _WORKERS.value, 1) as links:
        settings = {
            "mode": "overlap",
            "layers": _LAYERS.value,
            "width": _WIDTH.value,
            "computes": _COMPUTES.value,
            "exchange": "auto" if _AUTO.value else "ring",
        }
        asked = links.addresses(0), links, _TIMEOUT.value, "overlap_worker.py"
        with Cluster(settings, *asked) as cluster:
            cluster.wait()
            links.limit(measure=False)
            methods = progress.track(_METHODS.value, "methods", str)
            return [_measure(cluster, method) for method in methods]


def _measure(cluster, method):
    """Return the row of a method."""

    def ask(backward, behind, overlap=False):
        answers = cluster.ask(
            method=method, backward=backward, behind=behind, overlap=overlap
        )
        return {**answers[0], "ms": max(answer["ms"] for answer in answers)}

    alone = [ask(0.0, "step")["ms"] for _ in range(_REPEATS.value + 1)][1:]
    exchange = float(np.median(alone))
    backward = round(_BACKWARD.value * exchange / 1000, 4)
    turns = {
        "exchange": (0.0, "step"),
        "backward": (backward, "nothing"),
        "update": (0.0, "update"),
        "whole": (backward, "step"),
        "overlap": (backward, "step", backward or True),
    }
    if _AUTO.value:
        turns["auto"] = backward, "step", None
    said = {name: ask(*turn) for name, turn in turns.items()}  # traces
    times = {name: [] for name in turns}
    for _ in progress.track(range(_REPEATS.value), "turns"):
        for name, turn in turns.items():
            times[name].append(ask(*turn)["ms"])
    found = {f"{name}_ms": float(np.median(some)) for name, some in times.items()}
    shorter, longer = sorted([found["exchange_ms"], found["backward_ms"]])
    return {
        "method": method,
        "workers": _WORKERS.value,
        "rate": _RATE.value,
        "bytes": said["overlap"]["bytes"],
        "buckets": _buckets(said["overlap"]["exchange"]),
        **found,
        "p90_ms": float(np.percentile(times["overlap"], 90)),
        "hidden": (shorter + longer - found["overlap_ms"]) / shorter,
        "of_longer": (found["overlap_ms"] - found["update_ms"]) / longer,
        **(_chosen(said, times, found) if _AUTO.value else {}),
        "computes": _COMPUTES.value,
        "times_measured": _REPEATS.value,
    }


def _chosen(said, times, found):
    """Return what `auto` chose, its time, and that beside the faster of both."""
    faster = min(found["whole_ms"], found["overlap_ms"])
    return {
        "chosen": said["auto"]["exchange"],
        "chosen_whole": said["whole"]["exchange"],
        "chosen_overlap": said["overlap"]["exchange"],
        "auto_p90_ms": float(np.percentile(times["auto"], 90)),
        "of_faster": found["auto_ms"] / faster,
    }


def _buckets(exchange):
    *_, last = exchange.split(", ")
    return int(last.split()[0]) if last.endswith(" buckets") else 1


if __name__ == "__main__":
    app.run(main)
