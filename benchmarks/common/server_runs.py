"""Runs of workers with a parameter server, or without one: started, and counted."""

import contextlib
import statistics

from common import network
from common.cluster import Cluster

SERVED = ("sync", "async", "ssp", "backup")
"""Modes with a server; in the others workers meet by collectives."""


def speeds(number, slowest):
    """Return the speed of each worker, of which the last one is slowed down."""
    return [1.0] * (number - 1) + [slowest]


@contextlib.contextmanager
def started(settings, rate, script, timeout):
    """Start workers, and a server if the mode has one; yield a `Run` behind a link.

    Args:
        settings: of the workers; see `server_processes.Worker`.
        rate: of the links; see `network.RATES`.
        script: the workers' program; see `Cluster`.
        timeout: seconds until a worker has to have answered.
    """
    servers = int(settings["mode"] in SERVED)
    number = len(settings["speeds"])
    with network.connect(rate, number + servers, 1) as net:
        asked = net.addresses(0), net, timeout, script, servers
        with Cluster(settings, *asked) as cluster:
            cluster.wait()
            warm = cluster.ask(do="warm")[:number]
            net.limit()
            yield Run(cluster, net, number, warm)
            net.unlimit()


class Run:
    """Workers that have taken their first steps.

    Args:
        cluster: workers and server.
        net: network that they are on.
        number: number of workers.
        warm: what each said of its first steps.

    Attributes:
        step: seconds that a step took the slowest.
        about: what is known before the run.
    """

    def __init__(self, cluster, net, number, warm):
        self._cluster, self._net, self._number = cluster, net, number
        self._has_server = len(net.sent_by_each()) > number
        self.step = max(worker["step"] for worker in warm)
        self.about = {n: warm[0][n] for n in ("onednn", "parameters", "computing")}

    def take(self, **request):
        """Let all take steps; return figures of them.

        Args:
            **request: what a worker is asked besides.
        """
        before = self._cluster.ask(do="read")[-1]
        sent = self._net.sent(), self._net.sent_by_each()
        told = self._cluster.ask(do="run", **request)[: self._number]
        total = self._net.sent() - sent[0]
        pairs = zip(self._net.sent_by_each(), sent[1], strict=True)
        each = [after - b for after, b in pairs]
        steps = [len(worker["times"]) for worker in told]
        found = {
            **self._times(told, steps),
            **self._bytes(total, each, sum(steps)),
            "measured_mbit": self._net.measured_mbit,
        }
        if self._has_server:
            after = self._cluster.ask(do="read")[-1]
            found |= of_server(before, after, sum(steps), found["seconds"])
        else:
            rate = steps[0] / found["seconds"]
            found["updates_per_second"] = rate
            found["pushes_per_second"] = self._number * rate
        return found

    def ask(self, **request):
        """Return what each answers to another request; the server is the last one."""
        return self._cluster.ask(**request)

    def _times(self, told, steps):
        fast = told[:-1] if self._number > 1 else told
        return {
            "steps_of_each": steps,
            "seconds": max(worker["seconds"] for worker in told),
            "fast_per_second": statistics.median(
                len(w["times"]) / w["seconds"] for w in fast
            ),
            "median_ms": [1000 * statistics.median(w["times"]) for w in told],
        }

    def _bytes(self, total, each, steps):
        found = {"bytes": round(total / steps)}
        if any(each):
            found["pushed_bytes"] = round(sum(each[: self._number]) / steps)
            if self._has_server:
                found["pulled_bytes"] = round(each[-1] / steps)
        return found


def of_server(before, after, steps, seconds):
    """Return what the server says of a run.

    Args:
        before: answer of it before.
        after: answer of it behind.
        steps: steps of all workers.
        seconds: seconds that it took.
    """
    ages = {
        int(age): number - before["ages"].get(age, 0)
        for age, number in after["ages"].items()
    }
    ages = {age: number for age, number in sorted(ages.items()) if number}
    pushes = sum(ages.values())
    return {
        "updates_per_second": (after["updates"] - before["updates"]) / seconds,
        "pushes_per_second": pushes / seconds,
        "late": (after["late"] - before["late"]) / steps,
        "mean_age": sum(age * number for age, number in ages.items()) / max(1, pushes),
        "largest_age": max(ages, default=0),
        "ages": ages,
    }
