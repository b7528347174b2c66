"""How long sums and gathers take along each way, and what they carry.

    sudo python benchmarks/exchange.py --workers 2,4,8 --rate 100mbit

Real workers in network namespaces, whose links have the rate; nothing is computed but
the sums themselves, and those of entries by exchanges that merge: the others gather
entries, which are not decoded. Bytes are counted on each worker's link, protocols
included, and stand beside those of the exchange's formula: the most that a worker
sends. Times stand beside those that the cost model has for them, of the numbers that
these workers measure as with `exchange="auto"`; what it has for more workers follows.
"""

import sys

import numpy as np
from absl import app, flags
from common import choice, extrapolation, network, reporting
from common.cluster import Cluster, WorkerError
from common.ways import make

from tf_dgc.exchanges import Asked, Links, model

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
]
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
_EXCHANGES = flags.DEFINE_list("exchanges", EXCHANGES, "Ways; `star N` has N servers.")
_REPEATS = flags.DEFINE_integer("repeats", 15, "Times of each, by turns.", 3)
_TIMEOUT = flags.DEFINE_float("timeout", 600.0, "Seconds that a turn may take.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")
_PICTURE = flags.DEFINE_string(
    "picture", None, "File for what more workers would take."
)
_LINKS = flags.DEFINE_list(
    "links", None, "Of more workers, as `tf_dgc.exchanges.Links`; None: as measured."
)


def main(_):
    """Measure all numbers of workers, and report."""
    rows = []
    try:
        for number in map(int, _WORKERS.value):
            rows += measure(number)
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"exchange.py: {error}")
    if rows:
        reporting.report(rows, COLUMNS, "Sums and gathers", _JSON.value)
        print(_errors(rows))
        reporting.report(
            choice.choices(rows), choice.COLUMNS, "What `auto` would choose"
        )
    links = _LINKS.value or (rows and rows[-1]["links"])
    if links and _ENTRIES.value:
        _extrapolate(Links(*map(float, links)))


def _errors(rows):
    """Return a sentence that says how far the model is off."""
    off = [abs(row["model_ms"] / row["median_ms"] - 1) for row in rows]
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
            for kind, payload in all_work():
                rows += _take_turns(cluster, links, number, kind, payload)
    return [_predict(row, Links(*found)) for row in rows]


def _predict(row, links):
    """Return the row with what the model has for it."""
    asked = Asked(row["kind"], row["payload"])
    cost = model.cost_of(make(row["exchange"], row["workers"]), asked, row["workers"])
    seconds = links.start + model.on_the_way(cost, links)
    return {**row, "model_ms": 1000 * seconds, "links": list(links)}


def _take_turns(cluster, links, number, kind, payload):
    """Return a row per exchange, which take turns."""
    # Of those that merge entries, all else goes around the ring.
    names = [n for n in _EXCHANGES.value if kind == "entries" or not _merges(n, number)]
    times = {name: [] for name in names}
    sent = dict.fromkeys(times, 0)
    for name in times:  # trace, and meet for the first time
        size = cluster.ask(exchange=name, kind=kind, payload=payload)[0]["bytes"]
    for _ in range(_REPEATS.value):
        for name, found in times.items():
            before = links.sent_by_each()
            answers = cluster.ask(exchange=name, kind=kind, payload=payload)
            found.append(max(answer["ms"] for answer in answers))
            after = links.sent_by_each()
            sent[name] += max(b - a for a, b in zip(before, after, strict=True))
    found = [_row(number, kind, size, name, times[name], sent[name]) for name in times]
    ring = next((row["median_ms"] for row in found if row["exchange"] == "ring"), None)
    return [{**row, "of_ring": ring and row["median_ms"] / ring} for row in found]


def _row(number, kind, payload, name, times, sent):
    asked = "merge" if _merges(name, number) else "gather"
    asked = asked if kind == "entries" else kind
    cost = getattr(make(name, number), f"cost_of_{asked}")(payload, number)
    counted = round(sent / len(times)) if sent else None
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
        "times_measured": len(times),
    }


def _merges(name, number):
    return make(name, number).drops_entries


if __name__ == "__main__":
    app.run(main)
