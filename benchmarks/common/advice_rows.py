"""Rows of `advice.py`: predictions, measurements and how well they agree."""

import os
import statistics
from typing import NamedTuple

from common import distance, network, progress
from common.cluster import Cluster
from tf_dgc.advice import advise, prediction, timing
from tf_dgc.advice.timing import StepTiming
from tf_dgc.collectives import RequestSize

KEYS = ["model", "workers", "link", "method"]
_LOCAL_ROUND_TRIP = 1e-4  # seconds, between namespaces without a delay
_EQUALLY_FAST = 1.05  # largest ratio of two steps that count as equally fast
_MIN_PERIODS = 3


class Link(NamedTuple):
    """A link between workers.

    Attributes:
        rate: rate in the notation of `tc`.
        round_trip_ms: round trip in milliseconds; 0 without a delay.
    """

    rate: str
    round_trip_ms: float

    @classmethod
    def of(cls, text):
        """Parse a link such as "100mbit" or "100mbit+20ms"."""
        rate, _, trip = text.partition("+")
        return cls(rate, 1000 * advise.parse_seconds(trip) if trip else 0.0)


def predict(settings, num_workers, methods, seconds, timeout, links):
    """Return a row per link and method.

    Args:
        settings: settings of `advice_worker.py`.
        num_workers: number of workers.
        methods: names of methods; None for those that the advice compares by default.
        seconds: seconds to spend on timed steps.
        timeout: seconds until a worker must have answered.
        links: links as text; see `Link.of`.
    """
    candidates = timing.find_candidates(methods or timing.DEFAULT)
    with network.connect("loopback", num_workers, 1) as net:
        addresses = net.addresses(0)
        with Cluster(settings, addresses, net, timeout, "advice_worker.py") as cluster:
            cluster.wait()
            names = [candidate.name for candidate in candidates]
            answers = cluster.ask(do="time", methods=names, seconds=seconds)
    timings = [_combine_timings(candidate, answers) for candidate in candidates]
    speeds_by_kind = zip(*(answer["speeds"] for answer in answers), strict=True)
    speeds = list(map(max, speeds_by_kind))
    setting = {"model": settings["model"], "threads": settings["threads"]}
    return [
        {**setting, **row}
        for link in links
        for row in _predicted_rows(timings, num_workers, link, speeds)
    ]


def _combine_timings(candidate, answers):
    """Return the timing of a step of workers that wait for each other.

    The slowest worker's dense step counts. The ratio of a method to the dense step does
    not depend on the worker, so its differences are noise and the median is used.
    """
    name = candidate.name
    requests = [RequestSize(*size) for size in answers[0]["timed"][name]["requests"]]
    slowest = max(answer["timed"][timing.DENSE]["seconds"] for answer in answers)
    ratio = statistics.median(
        answer["timed"][name]["seconds"] / answer["timed"][timing.DENSE]["seconds"]
        for answer in answers
    )
    merges = answers[0]["timed"][name]["merges"]
    return StepTiming(candidate, ratio * slowest, lambda _: requests, merges)


def _predicted_rows(timings, num_workers, link_text, speeds):
    link = Link.of(link_text)
    latency = link.round_trip_ms / 1000 or _LOCAL_ROUND_TRIP
    # All workers share this machine; `PER_BYTE` was measured with a core per worker.
    sharing = max(1.0, num_workers / (os.cpu_count() or 1))
    rate = advise.parse_bits_per_second(link.rate)
    links = prediction.links_of(rate, latency, speeds, sharing)
    predictions = [prediction.predict_step(t, num_workers, links) for t in timings]
    best = prediction.best_prediction(predictions)
    return [
        {
            "workers": num_workers,
            "link": link_text,
            "method": p.name,
            "exchange": p.collective,
            "predicted_ms": 1000 * p.seconds,
            "alone_ms": 1000 * p.timing.seconds,
            "advised": "*" if p is best else "",
        }
        for p in predictions
    ]


class _LimitedNetwork(network.Namespaces):
    """Namespaces whose rate changes from link to link, without a delay.

    Has the interface of `distance.Distance`.
    """

    def place(self, rate, round_trip_ms):
        del round_trip_ms
        self._rate = rate
        self.limit(measure=False)

    def gather(self):
        self.unlimit()


def measure(settings, num_workers, predicted, resumable_rows, seconds, timeout):
    """Measure the steps that were predicted, and return their rows.

    Args:
        settings: settings of `advice_worker.py`.
        num_workers: number of workers.
        predicted: rows of one model and this number of workers.
        resumable_rows: a `ResumableRows`, whose rows are not measured again.
        seconds: seconds to spend on the steps of a method on a link.
        timeout: seconds until a worker must have answered.
    """
    rows = []
    for has_delay in (False, True):
        measured_keys = {_key(row) for row in resumable_rows.rows}
        group = [
            row
            for row in predicted
            if bool(Link.of(row["link"]).round_trip_ms) == has_delay
        ]
        missing = [row for row in group if _key(row) not in measured_keys]
        if missing:
            with _connect(num_workers, has_delay) as net:
                addresses = net.addresses(0)
                with Cluster(
                    settings, addresses, net, timeout, "advice_worker.py"
                ) as cluster:
                    cluster.wait()
                    _measure_rows(cluster, net, missing, resumable_rows, seconds)
        group_keys = {_key(row) for row in group}
        rows += [row for row in resumable_rows.rows if _key(row) in group_keys]
    return rows


def _key(row, keys=KEYS):
    return tuple(row[k] for k in keys)


def _connect(num_workers, has_delay):
    if has_delay:
        return distance.connect(num_workers)
    if os.geteuid() != 0:
        raise PermissionError("Links of limited rate need root: run this with sudo.")
    return _LimitedNetwork(None, num_workers)


def _measure_rows(cluster, net, missing, resumable_rows, seconds):
    links = dict.fromkeys(row["link"] for row in missing)
    for link in progress.track(links, "links", str):
        net.place(*Link.of(link))
        link_rows = [row for row in missing if row["link"] == link]
        for row in progress.track(link_rows, "methods", lambda row: row["method"]):
            resumable_rows.row(
                {k: row[k] for k in KEYS},
                lambda _, row=row: _measure_step(cluster, row, seconds),
            )
        net.gather()


def _measure_step(cluster, row, seconds):
    """Return a step's time: the median over periods of the mean within a period."""
    request = {
        "do": "steps",
        "link": row["link"],
        "method": row["method"],
        "auto": row["exchange"] != "ring",
    }
    answers = cluster.ask(periods=1, **request)  # traces
    step_seconds = max(statistics.mean(answer["ms"]) for answer in answers) / 1000
    period = len(answers[0]["ms"])
    periods = max(_MIN_PERIODS, min(100, int(seconds / (step_seconds * period))))
    answers = cluster.ask(periods=periods, **request)
    worker_ms = []
    for answer in answers:
        times = answer["ms"]
        starts = range(0, len(times), period)
        worker_ms.append(
            statistics.median(statistics.mean(times[i : i + period]) for i in starts)
        )
    return {
        "measured_ms": max(worker_ms),
        "went_by": answers[0]["exchange"],
        "sent_bytes": answers[0]["sent_bytes"],
        "periods": periods,
    }


def compare(predicted, measured):
    """Return the predictions that were measured, with error and ratio to the best."""
    measured_by_key = {_key(row): row for row in measured}
    rows = []
    for row in predicted:
        if _key(row) not in measured_by_key:
            continue
        measured_row = measured_by_key[_key(row)]
        measured_ms = measured_row["measured_ms"]
        rows.append(
            {
                **row,
                "measured_ms": measured_ms,
                "error": row["predicted_ms"] / measured_ms - 1,
                "went_by": measured_row.get("went_by"),
            }
        )
    best = {}
    for row in rows:
        setting, measured_ms = _key(row, KEYS[:3]), row["measured_ms"]
        best[setting] = min(measured_ms, best.get(setting, measured_ms))
    return [
        {**row, "of_best": row["measured_ms"] / best[_key(row, KEYS[:3])]}
        for row in rows
    ]


def group_by_setting(rows):
    """Return a row per setting with "predicted / measured" of each method.

    The best measured step is bold; a star marks the advised method.

    Args:
        rows: rows of `compare`.
    """
    grouped = {}
    for row in rows:
        setting = {k: row[k] for k in KEYS[:3]}
        text = f"{row['predicted_ms']:,.0f} / {row['measured_ms']:,.0f}"
        text = f"**{text}**" if row["of_best"] == 1 else text
        entry = grouped.setdefault(_key(row, KEYS[:3]), setting)
        entry[row["method"]] = text + (" *" if row["advised"] else "")
    return list(grouped.values())


def summarize(rows):
    """Return a summary of rows of `compare` as sentences."""
    errors = [abs(row["error"]) for row in rows]
    advised = [row for row in rows if row["advised"]]
    good = [row for row in advised if row["of_best"] <= _EQUALLY_FAST]
    advised_dense = [row for row in advised if row["method"] == timing.DENSE]
    fast_dense = [
        row
        for row in rows
        if row["method"] == timing.DENSE and row["of_best"] <= _EQUALLY_FAST
    ]
    other = [row for row in rows if row["went_by"] not in (None, row["exchange"])]
    return (
        f"{len(advised)} configurations, {len(rows)} steps: off by "
        f"{statistics.median(errors):.0%} in the median, {max(errors):.0%} at worst. "
        "The advised method is within 5 % of the best measured in "
        f"{len(good)} of {len(advised)}, {max(row['of_best'] for row in advised):.2f} "
        f"of it at worst; in {len(advised_dense)} it was not to compress, and dense "
        f"was within 5 % of the best in {len(fast_dense)}. {len(other)} steps went by "
        "another exchange than was predicted, or overlapped."
    )


def describe_sources(path, predicted, measured):
    """Return a sentence with the file and the commits of predictions and measurements.

    Args:
        path: file of the predictions.
        predicted: rows of the file.
        measured: rows that were measured.
    """
    return (
        f"Predictions are those of {path}, made at commit {_commits(predicted)}; "
        f"measured at {_commits(measured)}."
    )


def _commits(rows):
    return ", ".join(dict.fromkeys(str(row.get("commit"))[:12] for row in rows))
