"""What several workers on each machine gain by two levels.

    sudo python benchmarks/machines.py --machines 2x2,2x3 --rate 100mbit

Real workers, those of a machine in one network namespace: what they send each other
goes through its loopback, and all else over the machine's link, which has the rate.
Bytes are counted there, protocols included, beside those of the formula.

A sum is of a vector; entries are those of a step of DGC, around TensorFlow's ring, or
after gradients were added up inside the machine. The pass over memory between the two
is left out.
"""

import sys

import numpy as np
from absl import app, flags
from common import network, progress, reporting
from common.cluster import Cluster, WorkerError

from tf_dgc.collectives import Ring

COLUMNS = [
    ("machines", "machines x workers", ""),
    ("rate", "rate", ""),
    ("kind", "kind", ""),
    ("payload", "bytes of each", ",d"),
    ("exchange", "exchange", ""),
    ("median_ms", "median (ms)", ",.1f"),
    ("p90_ms", "p90 (ms)", ",.1f"),
    ("of_ring", "of the ring", ".2f"),
    ("left", "left a machine", ",d"),
    ("formula", "by formula", ",d"),
]
EXCHANGES = ["ring", "hierarchical"]

_MACHINES = flags.DEFINE_list("machines", ["2x2"], "Machines, and workers on each.")
_RATE = flags.DEFINE_string("rate", "1gbit", "Of each machine's link.")
_SUMS = flags.DEFINE_list("sums", ["1e6"], "Entries of the float32 vectors to sum.")
_ENTRIES = flags.DEFINE_list(
    "entries", ["25e6:0.999"], "Entries of a model, and the share that is not sent."
)
_REPEATS = flags.DEFINE_integer("repeats", 9, "Times of each, by turns.", 3)
_TIMEOUT = flags.DEFINE_float("timeout", 600.0, "Seconds that a turn may take.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")


def main(_):
    """Measure all numbers of machines, and report."""
    rows = []
    try:
        for asked in progress.track(_MACHINES.value, "machines", str):
            rows += measure(*map(int, asked.split("x")))
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"machines.py: {error}")
    reporting.report(rows, COLUMNS, "Two levels", _JSON.value)


def measure(machines, inside):
    """Return the rows of so many machines, and workers on each."""
    rows = []
    with network.connect(_RATE.value, machines * inside, 1, inside) as links:
        addresses = links.addresses(0)
        script = "exchange_worker.py"
        settings = {"mode": "exchange"}
        with Cluster(settings, addresses, links, _TIMEOUT.value, script) as cluster:
            cluster.wait()
            links.limit(measure=False)
            for kind, payload in progress.track(all_work(), "payloads", ", ".join):
                rows += _take_turns(cluster, links, (machines, inside), kind, payload)
    return rows


def all_work():
    """Return (kind, payload) of all that is to be measured."""
    sums = [("sum", str(4 * int(float(n)))) for n in _SUMS.value]
    return sums + [("entries", what) for what in _ENTRIES.value]


def _take_turns(cluster, links, machines, kind, payload):
    """Return a row per exchange, which take turns."""

    def ask(name):
        asked = "shards" if (kind, name) == ("entries", "hierarchical") else kind
        return cluster.ask(exchange=name, kind=asked, payload=payload)

    size = {name: ask(name)[0]["bytes"] for name in EXCHANGES}
    times = {name: [] for name in EXCHANGES}
    left = dict.fromkeys(EXCHANGES, 0)
    for _ in progress.track(range(_REPEATS.value), "turns"):
        for name, found in times.items():
            before = links.sent_by_each()
            found.append(max(answer["ms"] for answer in ask(name)))
            after = links.sent_by_each()
            left[name] += max(b - a for a, b in zip(before, after, strict=True))
    ring = float(np.median(times["ring"]))
    return [
        {
            "machines": "x".join(map(str, machines)),
            "rate": _RATE.value,
            "kind": kind,
            "payload": size[name],
            "exchange": name,
            "median_ms": float(np.median(found)),
            "p90_ms": float(np.percentile(found, 90)),
            "of_ring": float(np.median(found)) / ring,
            "left": round(left[name] / len(found)) or None,
            "formula": round(_leaves(name, kind, size[name], *machines)),
            "times_measured": len(found),
        }
        for name, found in times.items()
    ]


def _leaves(name, kind, size, machines, inside):
    """Return the bytes that leave a machine: of one worker, or of all counterparts."""
    if name == "ring":
        number, share = machines * inside, 1
    else:
        number, share = machines, inside
    part = size / share if kind == "sum" else size
    cost = Ring().cost_of_sum if kind == "sum" else Ring().cost_of_gather
    return share * cost(part, number).sent


if __name__ == "__main__":
    app.run(main)
