"""Runs of `distant.py`: modes on links with a rate and a delay, and their rows."""

import dataclasses
import statistics
import time

from common import distance, presets, progress
from common.cluster import Cluster, WorkerError

KEYS = [
    *("model", "workers", "mode", "period", "step_seconds", "threads", "rate"),
    "delay_ms",
]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings of the benchmark.

    Attributes:
        model: one of `models.MODELS`.
        num_workers: number of workers of every mode.
        modes: names of `presets.MODES`.
        period: steps from one exchange to the next, for modes with local steps.
        step_seconds: least duration of a step without an exchange.
        links: pairs of a rate and a round trip in milliseconds.
        seconds: seconds for a mode on a link, which takes at least one round.
        threads: intra-op threads of a worker.
        timeout: seconds until a worker must have answered.
    """

    model: str
    num_workers: int
    modes: list[str]
    period: int
    step_seconds: float
    links: list[tuple[str, float]]
    seconds: float
    threads: int
    timeout: float

    def period_of(self, mode):
        """Return the number of steps from one exchange of a mode to the next."""
        return self.period if mode in presets.LOCAL else 1

    def key(self, mode, link):
        """Return the key of a row; see `ResumableRows`."""
        values = (
            *(self.model, self.num_workers, mode, self.period_of(mode)),
            *(self.step_seconds, self.threads, *link),
        )
        return dict(zip(KEYS, values, strict=True))


def measure(plan, resumable_rows):
    """Return a row per mode of each link, ordered by link.

    Args:
        plan: a `Plan`.
        resumable_rows: a `ResumableRows`, whose rows are not measured again.
    """
    rows = {}
    with distance.connect(plan.num_workers) as net:
        for index, mode in enumerate(progress.track(plan.modes, "modes", str)):
            with _ModeRun(plan, net, index, mode) as run:
                for link in progress.track(plan.links, "links", _label):
                    rows[link, mode] = resumable_rows.row(
                        plan.key(mode, link),
                        lambda _, link=link, run=run: run.measure(link),
                    )
    return [rows[link, mode] for link in plan.links for mode in plan.modes]


def _label(link):
    rate, delay = link
    return f"{rate}, {delay:g} ms"


class _ModeRun:
    """Workers of a mode, started with the first measurement."""

    def __init__(self, plan, net, index, mode):
        self._plan = plan
        self._net = net
        self._mode = mode
        self._addresses = net.addresses(index)
        self._period = plan.period_of(mode)
        self._workers = None
        self._model_info = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._workers:
            self._workers.__exit__()

    def _start(self):
        settings = {
            "mode": self._mode,
            "model": self._plan.model,
            "threads": self._plan.threads,
            "period": self._period,
        }
        # No limit yet: workers that start send each other whole models.
        self._net.gather()
        self._workers = Cluster(
            settings,
            self._addresses,
            self._net,
            self._plan.timeout,
            "distant_worker.py",
        ).__enter__()
        self._model_info = self._workers.wait()[0]

    def measure(self, link):
        """Return the times and bytes of steps on a link."""
        if self._workers is None:
            self._start()
        self._net.place(*link)
        figures = self._take_rounds(1)  # adapts connections to the link
        remaining = self._plan.seconds - figures["seconds"]
        if remaining > 0:
            figures = self._take_rounds(1 + int(remaining / figures["seconds"]))
        return {
            **self._model_info,
            "threads": self._plan.threads,
            **figures,
            **self._net.measure(),
        }

    def _take_rounds(self, rounds):
        steps = rounds * self._period
        sent_before, start = self._net.sent(), time.monotonic()
        answers = self._workers.ask(
            do="steps", count=steps, seconds=self._plan.step_seconds
        )
        seconds = time.monotonic() - start
        sent = self._net.sent() - sent_before
        digests = {str(answer["digest"]) for answer in answers}
        if len(digests) > 1 and self._mode != "none":
            raise WorkerError(f"{self._mode}: workers differ after an exchange")
        worker_seconds = sum(sum(a["alone"] + a["exchanging"]) for a in answers)
        bytes_per_step = sent / steps / len(answers)
        alone = [t for answer in answers for t in answer["alone"]]
        exchanging = [t for answer in answers for t in answer["exchanging"]]
        return {
            "seconds": seconds,
            "rounds": rounds,
            "step_ms": 1000 * worker_seconds / steps / len(answers),
            "alone_ms": 1000 * statistics.median(alone) if alone else None,
            "exchanging_ms": 1000 * statistics.mean(exchanging) if exchanging else None,
            "bytes_per_step": bytes_per_step,
            "bytes_per_exchange": bytes_per_step * self._period,
            "sent": answers[0].get("sent"),
            "left_out": answers[0].get("left_out"),
        }


def add_comparisons(rows):
    """Return the rows with their ratios to steps without communication.

    Args:
        rows: rows of one model, number of workers and length of a step.
    """
    none_ms = {_link(r): r["alone_ms"] for r in rows if r["mode"] == "none"}
    return [_add_comparison(row, none_ms.get(_link(row))) for row in rows]


def _link(row):
    return row["rate"], row["delay_ms"]


def _add_comparison(row, none_ms):
    alone_ms = row["alone_ms"] or none_ms
    step_ms, period = row["step_ms"], row["period"]
    exchanging_ms = row.get("exchanging_ms")  # older rows only have the mean step
    compared = {**row, "steps_per_second": 1000 / step_ms}
    if none_ms:
        compared["of_none"] = step_ms / none_ms
    if alone_ms and row["mode"] != "none":
        if exchanging_ms is not None and period > 1:
            exchange_ms = exchanging_ms - alone_ms
        else:
            exchange_ms = period * (step_ms - alone_ms)
        compared |= {"computing": alone_ms / step_ms, "exchange_ms": exchange_ms}
    return compared
