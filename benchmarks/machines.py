"""Measures hierarchical collectives of machines with several workers each.

    sudo python benchmarks/machines.py --machines 2x2,2x3 --rate 100mbit

The workers of a machine share a network namespace: they reach each other by loopback,
and other machines over the machine's link of the rate. Bytes are counted on the links
and include protocols; the table also has the bytes of the formula.

`sum` is the sum of a vector. `entries` are those of a DGC step, sent around
TensorFlow's ring, or after an intra-node reduce. The pass over memory between
the reduce and the exchange is not measured.
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
_RATE = flags.DEFINE_string("rate", "1gbit", "Rate of a machine's link.")
_SUMS = flags.DEFINE_list("sums", ["1e6"], "Entries of the float32 vectors to sum.")
_ENTRIES = flags.DEFINE_list(
    "entries", ["25e6:0.999"], "Entries of a model, and the share not sent."
)
_REPEATS = flags.DEFINE_integer("repeats", 9, "Turns of each algorithm.", 3)
_TIMEOUT = flags.DEFINE_float("timeout", 600.0, "Seconds that a turn may take.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")


def main(_):
    """Measure all numbers of machines, and report."""
    rows = []
    try:
        for layout in progress.track(_MACHINES.value, "machines", str):
            machines, node_size = map(int, layout.split("x"))
            rows += measure(machines, node_size)
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"machines.py: {error}")
    reporting.report(rows, COLUMNS, "Two levels", _JSON.value)


def measure(machines, node_size):
    """Return the rows of machines with `node_size` workers each."""
    rows = []
    with network.connect(_RATE.value, machines * node_size, 1, node_size) as net:
        addresses = net.addresses(0)
        script = "exchange_worker.py"
        settings = {"mode": "exchange"}
        with Cluster(settings, addresses, net, _TIMEOUT.value, script) as cluster:
            cluster.wait()
            net.limit(measure=False)
            payloads = create_payloads()
            for kind, payload in progress.track(payloads, "payloads", ", ".join):
                rows += _measure_requests(
                    cluster, net, machines, node_size, kind, payload
                )
    return rows


def create_payloads():
    """Return (kind, payload) pairs to measure."""
    sums = [("sum", str(4 * int(float(n)))) for n in _SUMS.value]
    return sums + [("entries", payload) for payload in _ENTRIES.value]


def _measure_requests(cluster, net, machines, node_size, kind, payload):
    """Return a row per algorithm for one request; algorithms take turns."""

    def ask(name):
        shards = (kind, name) == ("entries", "hierarchical")
        return cluster.ask(
            exchange=name, kind="shards" if shards else kind, payload=payload
        )

    sizes = {name: ask(name)[0]["bytes"] for name in EXCHANGES}
    times = {name: [] for name in EXCHANGES}
    sent = dict.fromkeys(EXCHANGES, 0)
    for _ in progress.track(range(_REPEATS.value), "turns"):
        for name in EXCHANGES:
            before = net.sent_by_each()
            times[name].append(max(answer["ms"] for answer in ask(name)))
            after = net.sent_by_each()
            sent[name] += max(b - a for a, b in zip(before, after, strict=True))
    ring_ms = float(np.median(times["ring"]))
    return [
        {
            "machines": f"{machines}x{node_size}",
            "rate": _RATE.value,
            "kind": kind,
            "payload": sizes[name],
            "exchange": name,
            "median_ms": float(np.median(times[name])),
            "p90_ms": float(np.percentile(times[name], 90)),
            "of_ring": float(np.median(times[name])) / ring_ms,
            "left": round(sent[name] / _REPEATS.value) or None,
            "formula": round(_bytes_sent(name, kind, sizes[name], machines, node_size)),
            "times_measured": _REPEATS.value,
        }
        for name in EXCHANGES
    ]


def _bytes_sent(name, kind, size, machines, node_size):
    """Return the bytes that leave a machine, by formula.

    In a ring of all workers one worker of a machine sends to another machine; in the
    hierarchical algorithm each sends its shard to its counterparts.
    """
    if name == "ring":
        ring_size, num_senders = machines * node_size, 1
    else:
        ring_size, num_senders = machines, node_size
    if kind == "sum":
        cost = Ring().cost_of_sum(size / num_senders, ring_size)
    else:
        cost = Ring().cost_of_gather(size, ring_size)
    return num_senders * cost.sent


if __name__ == "__main__":
    app.run(main)
