"""Runs of `distant.py`: modes on links of a rate and a delay, and what they say."""

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
    """What to measure.

    Attributes:
        model: one of `models.MODELS`.
        num_workers: of every mode.
        modes: of `presets.MODES`.
        period: steps from one exchange to the next, for those of local steps.
        step_seconds: that a step without an exchange takes at least.
        links: pairs of a rate and milliseconds of a round trip.
        seconds: for a mode on a link; a round is measured at least.
        threads: intra-op threads of a worker.
        timeout: seconds until a worker has to have answered.
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
        """Return from how many steps one exchange follows."""
        return self.period if mode in presets.LOCAL else 1

    def key(self, mode, link):
        """Return what tells one row from another."""
        values = (
            *(self.model, self.num_workers, mode, self.period_of(mode)),
            *(self.step_seconds, self.threads, *link),
        )
        return dict(zip(KEYS, values, strict=True))


def measure(plan, done):
    """Return a row for each link and mode, those of a link together.

    Args:
        plan: a `Plan`.
        done: a `ResumableRows`, whose rows are not measured again.
    """
    rows = {}
    with distance.connect(plan.num_workers) as net:
        for number, mode in enumerate(progress.track(plan.modes, "modes", str)):
            with _Mode(plan, net, number, mode) as workers:
                for link in progress.track(plan.links, "links", _named):
                    rows[link, mode] = done.row(
                        plan.key(mode, link),
                        lambda _, link=link, w=workers: w.row(link),
                    )
    return [rows[link, mode] for link in plan.links for mode in plan.modes]


def _named(link):
    rate, delay = link
    return f"{rate}, {delay:g} ms"


class _Mode:
    """The workers of a mode, which start when they have something to do."""

    def __init__(self, plan, net, number, mode):
        self._plan, self._net, self._mode = plan, net, mode
        self._addresses = net.addresses(number)
        self._period = plan.period_of(mode)
        self._workers = self._about = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._workers:
            self._workers.__exit__()

    def _start(self):
        plan = self._plan
        settings = {"mode": self._mode, "model": plan.model, "threads": plan.threads}
        settings["period"] = self._period
        where = self._addresses, self._net, plan.timeout
        self._net.gather()  # workers that start send each other whole models
        self._workers = Cluster(settings, *where, "distant_worker.py").__enter__()
        self._about = self._workers.wait()[0]

    def row(self, link):
        """Return what steps take and send on a link."""
        if self._workers is None:
            self._start()
        self._net.place(*link)
        turn = self._turn(1)
        left = self._plan.seconds - turn["seconds"]
        if left > 0:  # connections have met the link, and there is time for more
            turn = self._turn(1 + int(left / turn["seconds"]))
        measured = self._net.measure()
        return {**self._about, "threads": self._plan.threads, **turn, **measured}

    def _turn(self, rounds):
        """Take some rounds; return figures of all of them."""
        steps = rounds * self._period
        before, start = self._net.sent(), time.monotonic()
        answers = self._workers.ask(
            do="steps", count=steps, seconds=self._plan.step_seconds
        )
        seconds, sent = time.monotonic() - start, self._net.sent() - before
        behind = {str(answer["digest"]) for answer in answers}
        if len(behind) > 1 and self._mode != "none":
            raise WorkerError(f"{self._mode}: workers differ behind an exchange")
        mine = sum(sum(a["alone"] + a["exchanging"]) for a in answers)
        bytes_per_step = sent / steps / len(answers)
        alone = [t for answer in answers for t in answer["alone"]]
        exchanging = [t for answer in answers for t in answer["exchanging"]]
        return {
            "seconds": seconds,
            "rounds": rounds,
            "step_ms": 1000 * mine / steps / len(answers),
            "alone_ms": 1000 * statistics.median(alone) if alone else None,
            "exchanging_ms": 1000 * statistics.mean(exchanging) if exchanging else None,
            "bytes_per_step": bytes_per_step,
            "bytes_per_exchange": bytes_per_step * self._period,
            "sent": answers[0].get("sent"),
            "left_out": answers[0].get("left_out"),
        }


def add_comparisons(rows):
    """Return the rows with what follows from them together.

    Args:
        rows: of one model, number of workers and length of a step.
    """
    none = {_link(r): r["alone_ms"] for r in rows if r["mode"] == "none"}
    return [_add_comparison(row, none.get(_link(row))) for row in rows]


def _link(row):
    return row["rate"], row["delay_ms"]


def _add_comparison(row, none):
    alone, step, period = row["alone_ms"] or none, row["step_ms"], row["period"]
    exchanging = row.get("exchanging_ms")  # older rows have the mean of all steps alone
    found = {**row, "steps_per_second": 1000 / step}
    if none:
        found["of_none"] = step / none
    if alone and row["mode"] != "none":
        told = exchanging is not None and period > 1
        exchange = exchanging - alone if told else period * (step - alone)
        found |= {"computing": alone / step, "exchange_ms": exchange}
    return found
