"""Measures how much of the exchange and of the backward pass overlapping hides.

    sudo python benchmarks/overlap.py --rate 100mbit

Workers run in network namespaces with links of the rate. For each method the benchmark
measures, in turns after a first one that traces:

exchange   a step with constant gradients: compression, exchange and update
backward   a backward pass alone, which takes `--backward` times as long
whole      the backward pass, followed by the step
overlap    the backward pass, overlapped by the step
update     the update alone, which cannot overlap, as it waits for all gradients

With `--auto` all steps have `collective="auto"`, and another step lets it choose
whether to overlap. It knows the links but not the backward pass. The table has its
choice, its time, and the ratio to the faster of `whole` and `overlap`.

The backward pass is simulated: layer by layer it sleeps as if a GPU computed, since
workers share the processors of this machine. With `--computes` it multiplies matrices
on one thread of each worker.
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
_RATE = flags.DEFINE_string("rate", "100mbit", "Rate of the links, as for `tc`.")
_METHODS = flags.DEFINE_list(
    "methods",
    ["float16", "power_sgd 32", "qsgd", "none"],
    "Methods, or `dgc`; `power_sgd R` has rank R.",
)
_LAYERS = flags.DEFINE_integer("layers", 12, "Layers of the model.", 2)
_WIDTH = flags.DEFINE_integer("width", 512, "Inputs and outputs of a layer.", 1)
_BACKWARD = flags.DEFINE_float(
    "backward", 1.0, "Ratio of the backward pass's time to the exchange's.", 0
)
_COMPUTES = flags.DEFINE_boolean(
    "computes", False, "Whether the backward pass uses the processor."
)
_AUTO = flags.DEFINE_boolean("auto", False, "Whether to measure `auto` too.")
_REPEATS = flags.DEFINE_integer("repeats", 9, "Turns of each.", 3)
_TIMEOUT = flags.DEFINE_float("timeout", 600.0, "Seconds that a turn may take.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")


def main(_):
    """Measure all methods, and report."""
    try:
        rows = measure()
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"overlap.py: {error}")
    verb = "computes" if _COMPUTES.value else "waits"
    size = f"{_LAYERS.value} layers of {_WIDTH.value} x {_WIDTH.value}"
    columns = COLUMNS + AUTO if _AUTO.value else COLUMNS
    reporting.report(rows, columns, f"{size}; the backward pass {verb}", _JSON.value)


def measure():
    """Return a row per method."""
    settings = {
        "mode": "overlap",
        "layers": _LAYERS.value,
        "width": _WIDTH.value,
        "computes": _COMPUTES.value,
        "collective": "auto" if _AUTO.value else "ring",
    }
    with network.connect(_RATE.value, _WORKERS.value, 1) as net:
        addresses = net.addresses(0)
        script = "overlap_worker.py"
        with Cluster(settings, addresses, net, _TIMEOUT.value, script) as cluster:
            cluster.wait()
            net.limit(measure=False)
            methods = progress.track(_METHODS.value, "methods", str)
            return [_measure_method(cluster, method) for method in methods]


def _measure_method(cluster, method):
    step = {"backward": 0.0, "then": "step", "overlap": False}
    _run_once(cluster, method, step)  # traces
    exchange_ms = [
        _run_once(cluster, method, step)["ms"] for _ in range(_REPEATS.value)
    ]
    backward = round(_BACKWARD.value * float(np.median(exchange_ms)) / 1000, 4)
    requests = {
        "exchange": step,
        "backward": {"backward": backward, "then": "nothing", "overlap": False},
        "update": {"backward": 0.0, "then": "update", "overlap": False},
        "whole": {"backward": backward, "then": "step", "overlap": False},
        "overlap": {"backward": backward, "then": "step", "overlap": backward or True},
    }
    if _AUTO.value:
        requests["auto"] = {"backward": backward, "then": "step", "overlap": None}
    answers = {  # of a first turn, which traces
        name: _run_once(cluster, method, request) for name, request in requests.items()
    }
    times = {name: [] for name in requests}
    for _ in progress.track(range(_REPEATS.value), "turns"):
        for name, request in requests.items():
            times[name].append(_run_once(cluster, method, request)["ms"])
    medians = {f"{name}_ms": float(np.median(ms)) for name, ms in times.items()}
    shorter, longer = sorted([medians["exchange_ms"], medians["backward_ms"]])
    row = {
        "method": method,
        "workers": _WORKERS.value,
        "rate": _RATE.value,
        "bytes": answers["overlap"]["bytes"],
        "buckets": _num_buckets(answers["overlap"]["collective"]),
        **medians,
        "p90_ms": float(np.percentile(times["overlap"], 90)),
        "hidden": (shorter + longer - medians["overlap_ms"]) / shorter,
        "of_longer": (medians["overlap_ms"] - medians["update_ms"]) / longer,
        "computes": _COMPUTES.value,
        "times_measured": _REPEATS.value,
    }
    if _AUTO.value:
        faster_ms = min(medians["whole_ms"], medians["overlap_ms"])
        row |= {
            "chosen": answers["auto"]["collective"],
            "chosen_whole": answers["whole"]["collective"],
            "chosen_overlap": answers["overlap"]["collective"],
            "auto_p90_ms": float(np.percentile(times["auto"], 90)),
            "of_faster": medians["auto_ms"] / faster_ms,
        }
    return row


def _run_once(cluster, method, request):
    """Return worker 0's answer, with the milliseconds of the slowest worker."""
    answers = cluster.ask(method=method, **request)
    return {**answers[0], "ms": max(answer["ms"] for answer in answers)}


def _num_buckets(collective):
    *_, last = collective.split(", ")
    return int(last.split()[0]) if last.endswith(" buckets") else 1


if __name__ == "__main__":
    app.run(main)
