"""What `advice.py` predicts and measures, and what the two say of each other."""

import os
import statistics
from typing import NamedTuple

from common import distance, network, progress
from common.cluster import Cluster
from tf_dgc.advice import advise, prediction, timing
from tf_dgc.advice.timing import StepTiming
from tf_dgc.collectives import RequestSize

KEYS = ["model", "workers", "link", "method"]
_NEAR = 1e-4  # seconds of a round trip between namespaces without a delay
_SAME = 1.05
_LEAST = 3  # steps that are measured at least


class Link(NamedTuple):
    """A link of workers.

    Attributes:
        rate: as `tc` has it.
        round_trip_ms: milliseconds of a round trip; 0 without a delay.
    """

    rate: str
    round_trip_ms: float

    @classmethod
    def of(cls, text):
        """Return the link of "100mbit" or "100mbit+20ms"."""
        rate, _, trip = text.partition("+")
        return cls(rate, 1000 * advise.parse_seconds(trip) if trip else 0.0)


def predict(settings, number, methods, seconds, timeout, links):
    """Return a row per link and method.

    Args:
        settings: of `advice_worker.py`.
        number: of workers.
        methods: names, or None for those that are compared by themselves.
        seconds: to spend on timed steps.
        timeout: seconds that a worker has to answer.
        links: texts, as `Link.of` takes them.
    """
    some = timing.find_candidates(methods or timing.DEFAULT)
    with network.connect("loopback", number, 1) as net:
        addresses = net.addresses(0)
        with Cluster(settings, addresses, net, timeout, "advice_worker.py") as cluster:
            cluster.wait()
            names = [candidate.name for candidate in some]
            answers = cluster.ask(do="time", methods=names, seconds=seconds)
    timed = [_together(candidate, answers) for candidate in some]
    of_each = zip(*(answer["speeds"] for answer in answers), strict=True)
    speeds = list(map(max, of_each))
    found = {"model": settings["model"], "threads": settings["threads"]}
    return [
        {**found, **row} for link in links for row in _rows(timed, number, link, speeds)
    ]


def _together(candidate, answers):
    """Return what a step takes workers that wait for each other.

    The slowest counts; but what one way takes of another is the same on all, and what
    differs there is noise.
    """
    name = candidate.name
    asked = [RequestSize(*each) for each in answers[0]["timed"][name]["asked"]]
    slowest = max(answer["timed"][timing.DENSE]["seconds"] for answer in answers)
    ratio = statistics.median(
        answer["timed"][name]["seconds"] / answer["timed"][timing.DENSE]["seconds"]
        for answer in answers
    )
    merges = answers[0]["timed"][name]["merges"]
    return StepTiming(candidate, ratio * slowest, lambda _: asked, merges)


def _rows(timed, number, text, speeds):
    link = Link.of(text)
    latency = link.round_trip_ms / 1000 or _NEAR
    # Here all workers are on one machine, of which the two of `PER_BYTE` had two cores.
    sharing = max(1.0, number / (os.cpu_count() or 1))
    rate = advise.parse_bits_per_second(link.rate)
    links = prediction.links_of(rate, latency, speeds, sharing)
    some = [prediction.predict_step(t, number, links) for t in timed]
    best = prediction.best_prediction(some)
    return [
        {
            "workers": number,
            "link": text,
            "method": p.name,
            "exchange": p.collective,
            "predicted_ms": 1000 * p.seconds,
            "alone_ms": 1000 * p.timing.seconds,
            "advised": "*" if p is best else "",
        }
        for p in some
    ]


class _Near(network.Namespaces):
    """Namespaces that are given one rate after the other, and no delay."""

    def place(self, rate, round_trip_ms):
        del round_trip_ms
        self._rate = rate
        self.limit(measure=False)

    def gather(self):
        self.unlimit()


def measure(settings, number, predicted, done, seconds, timeout):
    """Return the rows that were predicted, with what steps take.

    Args:
        settings: of `advice_worker.py`.
        number: of workers.
        predicted: rows of one model and this number of workers.
        done: a `ResumableRows`, whose rows are not measured again.
        seconds: to spend on the steps of a method on a link.
        timeout: seconds that a worker has to answer.
    """
    rows = []
    for far in (False, True):
        there = {_key(row) for row in done.rows}
        some = [r for r in predicted if bool(Link.of(r["link"]).round_trip_ms) == far]
        missing = [row for row in some if _key(row) not in there]
        if missing:
            with distance.connect(number) if far else _near(number) as net:
                addresses = net.addresses(0)
                asks = settings, addresses, net, timeout, "advice_worker.py"
                with Cluster(*asks) as cluster:
                    cluster.wait()
                    _fill(cluster, net, missing, done, seconds)
        wanted = {_key(row) for row in some}
        rows += [row for row in done.rows if _key(row) in wanted]
    return rows


def _key(row, keys=KEYS):
    return tuple(row[k] for k in keys)


def _near(number):
    """Return the network of workers without a delay."""
    if os.geteuid() != 0:
        raise PermissionError("Links of a rate need root: run this with sudo.")
    return _Near(None, number)


def _fill(cluster, net, missing, done, seconds):
    links = dict.fromkeys(row["link"] for row in missing)
    for text in progress.track(links, "links", str):
        link = Link.of(text)
        net.place(*link)
        of_link = [row for row in missing if row["link"] == text]
        for row in progress.track(of_link, "methods", lambda row: row["method"]):
            asks = {"method": row["method"], "auto": row["exchange"] != "ring"}
            done.row(
                {k: row[k] for k in KEYS},
                lambda _, asks=asks, text=text: _step(cluster, asks, text, seconds),
            )
        net.gather()


def _step(cluster, asks, link, seconds):
    """Return what a step takes: the median, over periods of local steps the mean."""
    first = cluster.ask(do="steps", link=link, periods=1, **asks)  # traced by now
    each = max(statistics.mean(answer["ms"]) for answer in first) / 1000
    period = len(first[0]["ms"])
    periods = max(_LEAST, min(100, int(seconds / (each * period))))
    answers = cluster.ask(do="steps", link=link, periods=periods, **asks)
    of_worker = []
    for answer in answers:
        times = answer["ms"]
        starts = range(0, len(times), period)
        of_worker.append(
            statistics.median(statistics.mean(times[i : i + period]) for i in starts)
        )
    return {
        "measured_ms": max(of_worker),
        "went_by": answers[0]["exchange"],
        "sent_bytes": answers[0]["sent_bytes"],
        "periods": periods,
    }


def compare(predicted, measured):
    """Return the predictions that were measured, with errors and what was the best."""
    found = {_key(row): row for row in measured}
    rows = []
    for row in predicted:
        if _key(row) in found:
            hyperparameters = found[_key(row)]["measured_ms"]
            error = row["predicted_ms"] / hyperparameters - 1
            went_by = found[_key(row)].get("went_by")
            more = {"measured_ms": hyperparameters, "error": error, "went_by": went_by}
            rows.append({**row, **more})
    best = {}
    for row in rows:
        setting, hyperparameters = _key(row, KEYS[:3]), row["measured_ms"]
        best[setting] = min(hyperparameters, best.get(setting, hyperparameters))
    return [
        {**row, "of_best": row["measured_ms"] / best[_key(row, KEYS[:3])]}
        for row in rows
    ]


def group_by_setting(rows):
    """Return a row per setting: each method's prediction beside what it took.

    Args:
        rows: rows of `compare`. The best measured is bold, a star marks the advised.
    """
    found = {}
    for row in rows:
        about = {k: row[k] for k in KEYS[:3]}
        text = f"{row['predicted_ms']:,.0f} / {row['measured_ms']:,.0f}"
        text = f"**{text}**" if row["of_best"] == 1 else text
        entry = found.setdefault(_key(row, KEYS[:3]), about)
        entry[row["method"]] = text + (" *" if row["advised"] else "")
    return list(found.values())


def summarize(rows):
    """Return sentences about rows that `compare` returned."""
    off = [abs(row["error"]) for row in rows]
    chosen = [row for row in rows if row["advised"]]
    good = [row for row in chosen if row["of_best"] <= _SAME]
    dense = [row for row in chosen if row["method"] == timing.DENSE]
    fast = [
        row for row in rows if row["method"] == timing.DENSE and row["of_best"] <= _SAME
    ]
    other = [row for row in rows if row["went_by"] not in (None, row["exchange"])]
    return (
        f"{len(chosen)} configurations, {len(rows)} steps: off by "
        f"{statistics.median(off):.0%} in the median, {max(off):.0%} at worst. What "
        "was advised is within 5 % of the best measured in "
        f"{len(good)} of {len(chosen)}, {max(row['of_best'] for row in chosen):.2f} of "
        f"it at worst; in {len(dense)} it was not to compress, and dense was within 5 "
        f"% of the best in {len(fast)}. {len(other)} steps went by another exchange "
        "than was predicted, or overlapped."
    )


def describe_sources(path, predicted, measured):
    """Return where predictions come from, and which package each was made by.

    Args:
        path: file of the predictions.
        predicted: rows of it.
        measured: rows that were measured.
    """

    def commits(rows):
        found = dict.fromkeys(str(row.get("commit"))[:12] for row in rows)
        return ", ".join(found)

    return (
        f"Predictions are those of {path}, made at commit {commits(predicted)}; "
        f"measured at {commits(measured)}."
    )
