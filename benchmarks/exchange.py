"""Measures time and bytes of sums and gathers with each collective algorithm.

    sudo python benchmarks/exchange.py --workers 2,4,8 --rate 100mbit

Workers run in network namespaces with links of the rate. They compute nothing but
sums; algorithms that do not merge entries gather them without decoding. Bytes are
counted on each worker's link and include protocols. The table has the most bytes that a
worker sends, and their ratio to the algorithm's formula and to the 2(N - 1)/N payloads
that a ring sum sends. It also has the cost model's times for the link speeds that these
workers measure, as with `collective="auto"`; an extrapolation to more workers follows.

With `--steps` the benchmark also measures whole steps of `DGCOptimizer` with a constant
gradient: with each algorithm, with `auto`, with `float16`, which sends all entries, and
with `scale_com`. Steps do not take turns, since memory suffices for only one optimizer
of 25 M entries per worker.
"""

import sys
import time

import numpy as np
from absl import app, flags
from common import auto_choice, extrapolation, network, progress, reporting
from common.algorithms import METHODS, cost_of_step, create_algorithm, drops_entries
from common.cluster import Cluster, WorkerError

from tf_dgc.collectives import LinkSpeeds, RequestSize, cost_model

COLUMNS = [
    ("workers", "workers", "d"),
    ("rate", "rate", ""),
    ("kind", "kind", ""),
    ("payload", "bytes", ",d"),
    ("exchange", "exchange", ""),
    ("median_ms", "median (ms)", ",.1f"),
    ("p90_ms", "p90 (ms)", ",.1f"),
    ("model_ms", "model (ms)", ",.1f"),
    ("of_ring", "of the ring", ".2f"),
    ("rounds", "rounds", "d"),
    ("sent", "sent", ",d"),
    ("formula", "by formula", ",d"),
    ("ratio", "ratio", ".2f"),
    ("of_a_sum", "of 2(N - 1)/N of them", ".2f"),
]
_HEAD_START = 0.02  # seconds from a request to the common start of all workers
EXCHANGES = [
    *("ring", "tree", "butterfly", "star", "star 2", "star all"),
    *("gtopk", "oktopk", "twoway"),
]

_WORKERS = flags.DEFINE_list("workers", ["2", "4"], "Numbers of workers.")
_RATE = flags.DEFINE_string("rate", "1gbit", "Rate of the links, as for `tc`.")
_SUMS = flags.DEFINE_list("sums", ["1e6"], "Entries of the float32 vectors to sum.")
_GATHERS = flags.DEFINE_list(
    "gathers", ["1e3", "9e4"], "Bytes of a worker to gather; DGC has 9e4 for 25 M."
)
_ENTRIES = flags.DEFINE_list(
    "entries", ["25e6:0.999"], "Entries of a model, and the share not sent."
)
_STEPS = flags.DEFINE_list(
    "steps", [], "Models whose whole steps to measure, as in `entries`."
)
_EXCHANGES = flags.DEFINE_list(
    "collectives", EXCHANGES, "Collective algorithms; `star N` has N servers."
)
_REPEATS = flags.DEFINE_integer("repeats", 15, "Turns of each algorithm.", 3)
_TIMEOUT = flags.DEFINE_float("timeout", 600.0, "Seconds that a turn may take.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")
_PICTURE = flags.DEFINE_string(
    "picture", None, "File for the extrapolation to more workers."
)
_LINKS = flags.DEFINE_list(
    "links", None, "`LinkSpeeds` of the extrapolation; None for the measured ones."
)


def main(_):
    """Measure all numbers of workers, and report."""
    rows = []
    try:
        for num_workers in progress.track(map(int, _WORKERS.value), "workers", str):
            rows += measure(num_workers)
            if _JSON.value:  # survives an interrupt
                reporting.write(rows, _JSON.value)
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"exchange.py: {error}")
    if rows:
        reporting.report(rows, COLUMNS, "Sums and gathers", _JSON.value)
        print(_summarize_errors(rows))
        reporting.report(
            auto_choice.compare_choices(rows),
            auto_choice.COLUMNS,
            "What `auto` would choose",
        )
    links = _LINKS.value or (rows and rows[-1]["links"])
    if links and _ENTRIES.value:
        _extrapolate(LinkSpeeds(*map(float, links)))


def _summarize_errors(rows):
    """Return a sentence with the relative error of the cost model."""
    errors = [abs(r["model_ms"] / r["median_ms"] - 1) for r in rows if "model_ms" in r]
    if not errors:
        return "The model predicts only the exchange of whole steps."
    return (
        f"The model is off by {np.median(errors):.0%} in the median of {len(errors)} "
        f"rows, {np.percentile(errors, 90):.0%} at the 90th percentile."
    )


def _extrapolate(links):
    """Print and draw times for more workers, for the last of `--entries`."""
    size, sparsity = map(float, _ENTRIES.value[-1].split(":"))
    names = [n for n in ("ring", "gtopk", "oktopk") if n in _EXCHANGES.value]
    rows = extrapolation.extrapolate(names, int(size), sparsity, links)
    title = f"{size:,.0f} entries, {sparsity:.1%} not sent; by the model, not measured"
    print(links)
    reporting.report(rows, extrapolation.COLUMNS, title)
    if _PICTURE.value:
        extrapolation.draw(rows, _PICTURE.value, title)


def create_payloads():
    """Return (kind, payload) pairs to measure.

    A payload is a number of bytes, or "entries:sparsity".
    """
    sums = [("sum", str(4 * int(float(n)))) for n in _SUMS.value]
    gathers = [("gather", str(int(float(n)) // 4 * 4)) for n in _GATHERS.value]
    return sums + gathers + [("entries", payload) for payload in _ENTRIES.value]


def measure(num_workers):
    """Return the rows of a number of workers."""
    rows = []
    with network.connect(_RATE.value, num_workers, 1) as net:
        settings = {"mode": "exchange"}
        addresses = net.addresses(0)
        script = "exchange_worker.py"
        with Cluster(settings, addresses, net, _TIMEOUT.value, script) as cluster:
            cluster.wait()
            net.limit(measure=False)
            probe = cluster.ask(exchange="ring", kind="probe", payload="")
            links = probe[0]["links"]
            payloads = create_payloads()
            for kind, payload in progress.track(payloads, "payloads", ", ".join):
                rows += _measure_requests(cluster, net, num_workers, kind, payload)
            rows = [_add_prediction(row, LinkSpeeds(*links)) for row in rows]
            for payload in progress.track(_STEPS.value, "models", str):
                rows += _measure_steps(cluster, net, num_workers, payload)
    return [{**row, "links": links} for row in rows]


def _add_prediction(row, links):
    """Return the row with the cost model's time."""
    size = RequestSize(row["kind"], row["payload"])
    cost = cost_model.request_cost(
        create_algorithm(row["exchange"], row["workers"]), size, row["workers"]
    )
    seconds = links.start + cost_model.transfer_seconds(cost, links)
    return {**row, "model_ms": 1000 * seconds}


def _measure_requests(cluster, net, num_workers, kind, payload):
    """Return a row per algorithm for one request; algorithms take turns."""
    # Algorithms that merge entries use the ring for other requests.
    names = [
        name
        for name in _EXCHANGES.value
        if kind == "entries" or not drops_entries(name, num_workers)
    ]
    for name in names:  # traces and opens connections
        size = cluster.ask(exchange=name, kind=kind, payload=payload)[0]["bytes"]
    times = {name: [] for name in names}
    sent = {name: [] for name in names}
    for _ in progress.track(range(_REPEATS.value), "turns"):
        for name in names:
            request = {"exchange": name, "kind": kind, "payload": payload}
            ms, num_bytes = _run_once(cluster, net, request)
            times[name].append(ms)
            sent[name].append(num_bytes)
    rows = []
    for name in names:
        cost = cost_model.request_cost(
            create_algorithm(name, num_workers), RequestSize(kind, size), num_workers
        )
        rows.append(_row(num_workers, kind, size, name, times[name], sent[name], cost))
    return _add_ratio_to_ring(rows)


def _measure_steps(cluster, net, num_workers, payload):
    """Return a row per algorithm of whole steps, one algorithm after the other."""
    rows = []
    names = [*_EXCHANGES.value, *METHODS, "auto"]
    for name in progress.track(names, "algorithms", str):
        request = {"exchange": name, "kind": "step", "payload": payload}
        answer = cluster.ask(**request)[0]  # traces
        size, stated = answer["bytes"], answer["stated"]
        times, sent = [], []
        for _ in range(_REPEATS.value):
            ms, num_bytes = _run_once(cluster, net, request)
            times.append(ms)
            sent.append(num_bytes)
        cost = cost_of_step(name, stated, size, num_workers)
        row = _row(num_workers, "step", size, name, times, sent, cost)
        rows.append({**row, "stated": stated, "asked": payload})
    return _add_ratio_to_ring(rows)


def _run_once(cluster, net, request):
    """Return milliseconds of the slowest worker, and the most bytes of a worker."""
    before = net.sent_by_each()
    answers = cluster.ask(**request, start=time.monotonic() + _HEAD_START)
    after = net.sent_by_each()
    ms = max(answer["ms"] for answer in answers)
    return ms, max(b - a for a, b in zip(before, after, strict=True))


def _add_ratio_to_ring(rows):
    ring = next((row["median_ms"] for row in rows if row["exchange"] == "ring"), None)
    return [{**row, "of_ring": ring and row["median_ms"] / ring} for row in rows]


def _row(num_workers, kind, payload, name, times, sent, cost):
    mean_sent = round(sum(sent) / len(sent)) if any(sent) else None
    sum_bytes = 2 * (num_workers - 1) / num_workers * payload
    return {
        "workers": num_workers,
        "rate": _RATE.value,
        "kind": kind,
        "payload": payload,
        "exchange": name,
        "median_ms": float(np.median(times)),
        "p90_ms": float(np.percentile(times, 90)),
        "rounds": cost.rounds,
        "sent": mean_sent,
        "formula": round(cost.sent),
        "ratio": mean_sent and mean_sent / cost.sent,
        "of_a_sum": mean_sent and mean_sent / sum_bytes,
        "times_measured": len(times),
    }


if __name__ == "__main__":
    app.run(main)
