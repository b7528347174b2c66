"""Runs of workers with or without a parameter server, and their figures."""

import contextlib
import statistics

from common import network
from common.cluster import Cluster

SERVED = ("sync", "async", "ssp", "backup")
"""Modes with a server; workers of other modes use collectives."""


def speeds(num_workers, slowest):
    """Return the speed of each worker; only the last one is slow."""
    return [1.0] * (num_workers - 1) + [slowest]


@contextlib.contextmanager
def start_run(settings, rate, script, timeout):
    """Start workers, and a server if the mode has one; yield a `Run` on limited links.

    Args:
        settings: settings of the workers; see `server_processes.Worker`.
        rate: rate of the links; see `network.RATES`.
        script: the workers' script; see `Cluster`.
        timeout: seconds until a worker must have answered.
    """
    num_servers = int(settings["mode"] in SERVED)
    num_workers = len(settings["speeds"])
    with network.connect(rate, num_workers + num_servers, 1) as net:
        addresses = net.addresses(0)
        with Cluster(settings, addresses, net, timeout, script, num_servers) as cluster:
            cluster.wait()
            warmup = cluster.ask(do="warm")[:num_workers]
            net.limit()
            yield Run(cluster, net, num_workers, warmup)
            net.unlimit()


class Run:
    """Workers that have taken their first steps.

    Args:
        cluster: workers and server.
        net: their network.
        num_workers: number of workers.
        warmup: answers of the workers about their first steps.

    Attributes:
        step: seconds of a step of the slowest worker.
        warmup_figures: figures of the first steps for the row.
    """

    def __init__(self, cluster, net, num_workers, warmup):
        self._cluster = cluster
        self._net = net
        self._num_workers = num_workers
        self._has_server = len(net.sent_by_each()) > num_workers
        self.step = max(worker["step"] for worker in warmup)
        self.warmup_figures = {
            n: warmup[0][n] for n in ("onednn", "parameters", "computing")
        }

    def measure(self, **request):
        """Let all workers take steps; return their figures.

        Args:
            **request: fields of the request to the workers.
        """
        counts_before = self._cluster.ask(do="read")[-1]
        total_before = self._net.sent()
        each_before = self._net.sent_by_each()
        answers = self._cluster.ask(do="run", **request)[: self._num_workers]
        total = self._net.sent() - total_before
        each = [
            after - before
            for after, before in zip(self._net.sent_by_each(), each_before, strict=True)
        ]
        steps = [len(worker["times"]) for worker in answers]
        figures = {
            **self._times(answers, steps),
            **self._bytes(total, each, sum(steps)),
            "measured_mbit": self._net.measured_mbit,
        }
        if self._has_server:
            counts = self._cluster.ask(do="read")[-1]
            figures |= server_figures(
                counts_before, counts, sum(steps), figures["seconds"]
            )
        else:
            updates_per_second = steps[0] / figures["seconds"]
            figures["updates_per_second"] = updates_per_second
            figures["pushes_per_second"] = self._num_workers * updates_per_second
        return figures

    def ask(self, **request):
        """Return the answers to another request; the server's is the last one."""
        return self._cluster.ask(**request)

    def _times(self, answers, steps):
        fast = answers[:-1] if self._num_workers > 1 else answers
        return {
            "steps_of_each": steps,
            "seconds": max(worker["seconds"] for worker in answers),
            "fast_per_second": statistics.median(
                len(w["times"]) / w["seconds"] for w in fast
            ),
            "median_ms": [1000 * statistics.median(w["times"]) for w in answers],
        }

    def _bytes(self, total, each, steps):
        figures = {"bytes": round(total / steps)}
        if any(each):
            figures["pushed_bytes"] = round(sum(each[: self._num_workers]) / steps)
            if self._has_server:
                figures["pulled_bytes"] = round(each[-1] / steps)
        return figures


def server_figures(before, after, steps, seconds):
    """Return the figures of a run that the server counts.

    Args:
        before: counts of the server before the run.
        after: counts of the server after the run.
        steps: number of steps of all workers.
        seconds: seconds of the run.
    """
    ages = {
        int(age): count - before["ages"].get(age, 0)
        for age, count in after["ages"].items()
    }
    ages = {age: count for age, count in sorted(ages.items()) if count}
    pushes = sum(ages.values())
    return {
        "updates_per_second": (after["updates"] - before["updates"]) / seconds,
        "pushes_per_second": pushes / seconds,
        "late": (after["late"] - before["late"]) / steps,
        "mean_age": sum(age * count for age, count in ages.items()) / max(1, pushes),
        "largest_age": max(ages, default=0),
        "ages": ages,
    }
