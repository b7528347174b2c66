"""How long sums and gathers take along each way, and what they carry.

    sudo python benchmarks/exchange.py --workers 2,4,8 --rate 100mbit

Real workers in network namespaces, whose links have the rate; nothing is computed but
the sums themselves, and those of entries by exchanges that merge: the others gather
entries, which are not decoded. Bytes are counted on each worker's link, protocols
included: the most that a worker sends, beside what the exchange's formula has, and
beside 2(N - 1)/N payloads, which a sum of one sends. Times stand beside those that the
cost model has, of the numbers that these workers measure as with `collective="auto"`;
what it has for more workers follows.

With `--steps` whole steps of `DGCOptimizer` are measured too, on a model of as many
entries, with a gradient that is there: along each way, by `auto`, and beside them those
of `float16`, which sends everything, and of `scale_com`. They do not take turns, as a
worker has memory for one optimizer of 25 M entries, and not for a dozen.
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
_HEAD_START = 0.02  # seconds, until all workers know what to do, and start together
EXCHANGES = [
    *("ring", "tree", "butterfly", "star", "star 2", "star all"),
    *("gtopk", "oktopk", "twoway"),
]

_WORKERS = flags.DEFINE_list("workers", ["2", "4"], "Numbers of workers.")
_RATE = flags.DEFINE_string("rate", "1gbit", "Of every link, as `tc` writes it.")
_SUMS = flags.DEFINE_list("sums", ["1e6"], "Entries of the float32 vectors to sum.")
_GATHERS = flags.DEFINE_list(
    "gathers", ["1e3", "9e4"], "Bytes of each worker to gather; 9e4 is DGC's of 25 M."
)
_ENTRIES = flags.DEFINE_list(
    "entries", ["25e6:0.999"], "Entries of a model, and the share that is not sent."
)
_STEPS = flags.DEFINE_list(
    "steps", [], "Likewise, of models whose whole steps are to be measured."
)
_EXCHANGES = flags.DEFINE_list(
    "collectives", EXCHANGES, "Ways; `star N` has N servers."
)
_REPEATS = flags.DEFINE_integer("repeats", 15, "Times of each, by turns.", 3)
_TIMEOUT = flags.DEFINE_float("timeout", 600.0, "Seconds that a turn may take.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")
_PICTURE = flags.DEFINE_string(
    "picture", None, "File for what more workers would take."
)
_LINKS = flags.DEFINE_list(
    "links", None, "Of more workers, as `tf_dgc.collectives.Links`; None: as measured."
)


def main(_):
    """Measure all numbers of workers, and report."""
    rows = []
    try:
        numbers = map(int, _WORKERS.value)
        for number in progress.track(numbers, "workers", str):
            rows += measure(number)
            if _JSON.value:  # of what ends early, this much is there
                reporting.write(rows, _JSON.value)
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"exchange.py: {error}")
    if rows:
        reporting.report(rows, COLUMNS, "Sums and gathers", _JSON.value)
        print(_errors(rows))
        reporting.report(
            auto_choice.compare_choices(rows),
            auto_choice.COLUMNS,
            "What `auto` would choose",
        )
    links = _LINKS.value or (rows and rows[-1]["links"])
    if links and _ENTRIES.value:
        _extrapolate(LinkSpeeds(*map(float, links)))


def _errors(rows):
    """Return a sentence that says how far the model is off."""
    off = [abs(r["model_ms"] / r["median_ms"] - 1) for r in rows if "model_ms" in r]
    if not off:
        return "Of whole steps the model has the exchange alone."
    return (
        f"The model is off by {np.median(off):.0%} in the median of {len(off)} rows, "
        f"{np.percentile(off, 90):.0%} at the 90th percentile."
    )


def _extrapolate(links):
    """Print what the last of the entries would take on more workers, and draw it."""
    size, sparsity = map(float, _ENTRIES.value[-1].split(":"))
    names = [n for n in ("ring", "gtopk", "oktopk") if n in _EXCHANGES.value]
    rows = extrapolation.extrapolate(names, int(size), sparsity, links)
    title = f"{size:,.0f} entries, {sparsity:.1%} not sent; by the model, not measured"
    print(links)
    reporting.report(rows, extrapolation.COLUMNS, title)
    if _PICTURE.value:
        extrapolation.draw(rows, _PICTURE.value, title)


def all_work():
    """Return (kind, bytes or "entries:sparsity") of all that is to be measured."""
    sums = [("sum", str(4 * int(float(n)))) for n in _SUMS.value]
    gathers = [("gather", str(int(float(n)) // 4 * 4)) for n in _GATHERS.value]
    return sums + gathers + [("entries", what) for what in _ENTRIES.value]


def measure(number):
    """Return the rows of so many workers."""
    rows = []
    with network.connect(_RATE.value, number, 1) as links:
        settings = {"mode": "exchange"}
        addresses = links.addresses(0)
        worker = "exchange_worker.py"
        with Cluster(settings, addresses, links, _TIMEOUT.value, worker) as cluster:
            cluster.wait()
            links.limit(measure=False)
            found = cluster.ask(exchange="ring", kind="probe", payload="")[0]["links"]
            for kind, payload in progress.track(all_work(), "payloads", ", ".join):
                rows += _take_turns(cluster, links, number, kind, payload)
            rows = [_predict(row, LinkSpeeds(*found)) for row in rows]
            for payload in progress.track(_STEPS.value, "models", str):
                rows += _steps(cluster, links, number, payload)
    return [{**row, "links": found} for row in rows]


def _predict(row, links):
    """Return the row with what the model has for it."""
    asked = RequestSize(row["kind"], row["payload"])
    cost = cost_model.request_cost(
        create_algorithm(row["exchange"], row["workers"]), asked, row["workers"]
    )
    seconds = links.start + cost_model.transfer_seconds(cost, links)
    return {**row, "model_ms": 1000 * seconds}


def _take_turns(cluster, links, number, kind, payload):
    """Return a row per exchange, which take turns."""
    # Of those that merge entries, all else goes around the ring.
    names = [
        n for n in _EXCHANGES.value if kind == "entries" or not drops_entries(n, number)
    ]
    found = {name: ([], []) for name in names}
    for name in names:  # trace, and meet for the first time
        size = cluster.ask(exchange=name, kind=kind, payload=payload)[0]["bytes"]
    for _ in progress.track(range(_REPEATS.value), "turns"):
        for name, turns in found.items():
            _once(cluster, links, turns, exchange=name, kind=kind, payload=payload)
    rows = []
    for name, turns in found.items():
        cost = cost_model.request_cost(
            create_algorithm(name, number), RequestSize(kind, size), number
        )
        rows.append(_row(number, kind, size, name, turns, cost))
    return _beside_the_ring(rows)


def _steps(cluster, links, number, payload):
    """Return a row per way of whole steps, one way after the other."""
    rows = []
    ways = [*_EXCHANGES.value, *METHODS, "auto"]
    for name in progress.track(ways, "ways", str):
        asked, turns = {"exchange": name, "kind": "step", "payload": payload}, ([], [])
        said = cluster.ask(**asked)[0]  # traces
        for _ in range(_REPEATS.value):
            _once(cluster, links, turns, **asked)
        cost = cost_of_step(name, said["stated"], said["bytes"], number)
        row = _row(number, "step", said["bytes"], name, turns, cost)
        rows.append({**row, "stated": said["stated"], "asked": payload})
    return _beside_the_ring(rows)


def _once(cluster, links, turns, **asked):
    """Do it once more; the slowest counts, and the one that sends most."""
    times, sent = turns
    before = links.sent_by_each()
    asked["start"] = time.monotonic() + _HEAD_START
    times.append(max(answer["ms"] for answer in cluster.ask(**asked)))
    after = links.sent_by_each()
    sent.append(max(b - a for a, b in zip(before, after, strict=True)))


def _beside_the_ring(rows):
    ring = next((row["median_ms"] for row in rows if row["exchange"] == "ring"), None)
    return [{**row, "of_ring": ring and row["median_ms"] / ring} for row in rows]


def _row(number, kind, payload, name, turns, cost):
    times, sent = turns
    counted = round(sum(sent) / len(sent)) if any(sent) else None
    return {
        "workers": number,
        "rate": _RATE.value,
        "kind": kind,
        "payload": payload,
        "exchange": name,
        "median_ms": float(np.median(times)),
        "p90_ms": float(np.percentile(times, 90)),
        "rounds": cost.rounds,
        "sent": counted,
        "formula": round(cost.sent),
        "ratio": counted and counted / cost.sent,
        "of_a_sum": counted and counted / (2 * (number - 1) / number * payload),
        "times_measured": len(times),
    }


if __name__ == "__main__":
    app.run(main)
