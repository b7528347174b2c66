"""The order of the step benchmark: modes take turns, some steps each."""

import contextlib
import dataclasses
import itertools
import pathlib
import statistics
from typing import Any

import numpy as np

from common import network, peers, progress
from common.cluster import Cluster

_MOST_TRACED = 30


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure at one rate.

    Attributes:
        worker: settings of every worker but for its mode and rank.
        modes: to compare.
        num_workers: of every mode.
        rate: one of `network.RATES`.
        steps: of a turn, at most.
        rounds: turns of every mode.
        seconds: for the steps of a mode, in all its turns.
        fresh: whether to start new processes for every turn, which needs memory for
            one mode only.
        timeout: seconds until a worker has to have answered.
    """

    worker: dict[str, Any]
    modes: list[str]
    num_workers: int
    rate: str
    steps: int
    rounds: int
    seconds: float
    fresh: bool
    timeout: float


class Result:
    """What was measured of one mode.

    Attributes:
        model: what the workers said of their model.
        parts: where the time of worker 0 went; see `breakdown.py`.
        turns: the steps' times of every turn, in ms, of all workers together: in every
            step they wait for each other.
        cpu: processor time of a step of one worker, in ms, one figure per turn. Other
            programs that share the processors change it less than the step's time.
        sent: bytes per step and worker, one figure per turn.
        packets: likewise.
    """

    def __init__(self):
        self.model: dict[str, Any] = {}
        self.parts: dict[str, float] = {}
        self.turns: list[list[float]] = []
        self.cpu: list[float] = []
        self.sent: list[float] = []
        self.packets: list[float] = []

    def add(self, times, cpu, sent, packets):
        """Add what was measured in a turn."""
        self.turns.append(times)
        self.cpu.append(cpu)
        self.sent.append(sent)
        self.packets.append(packets)

    def summary(self):
        """Return all of it in figures."""
        times = [t for turn in self.turns for t in turn]
        return {
            "median_ms": statistics.median(times),
            "p90_ms": float(np.percentile(times, 90)),
            "cpu_ms": statistics.mean(self.cpu),
            "bytes_per_step": round(statistics.mean(self.sent)),
            "packets_per_step": statistics.mean(self.packets),
            **self.parts,
            "times_measured": len(times),
            "turn_medians_ms": [statistics.median(turn) for turn in self.turns],
            **self.model,
        }


def measure(plan, say):
    """Measure all modes.

    Args:
        plan: a `Plan`.
        say: called with a line on what goes on.

    Returns:
        A `Result` per mode, and what the slowest link carried in a test, in Mbit/s
        (None if links are not limited).
    """
    results = {mode: Result() for mode in plan.modes}
    with network.connect(plan.rate, plan.num_workers, len(plan.modes)) as net:
        if plan.fresh:
            sessions = itertools.product(reversed(range(plan.rounds)), plan.modes)
            for left, mode in progress.track(sessions, "sessions"):
                _session(plan, net, {mode: results[mode]}, 1, left == 0, say)
        else:
            _session(plan, net, results, plan.rounds, True, say)
        return results, net.measured_mbit


def memory_is_short(gigabytes_per_worker, num_workers, num_modes):
    """Whether the workers of all modes together would not fit into what is free."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    kilobytes = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    return gigabytes_per_worker * num_workers * num_modes > kilobytes / 1e6


def _session(plan, net, results, rounds, last, say):
    """Start the workers of some modes, let these take turns, and end them."""
    with contextlib.ExitStack() as stack:
        say(f"{plan.rate}: starting the workers of {', '.join(results)}")
        clusters = {
            mode: stack.enter_context(_cluster(plan, net, mode)) for mode in results
        }
        for mode, cluster in clusters.items():
            results[mode].model = cluster.wait()[0]
        # Only now: workers that start send each other whole models.
        net.limit()
        if net.measured_mbit:
            say(f"{plan.rate}: the links carry {net.measured_mbit:,.0f} Mbit/s")
        counts = {}
        for mode, cluster in clusters.items():
            times, *_ = _turn(plan, net, cluster, 1)
            counts[mode] = _count(plan, times)
        turns = itertools.product(range(rounds), clusters)
        for _, mode in progress.track(turns, "turns"):
            found = _turn(plan, net, clusters[mode], counts[mode])
            results[mode].add(*found)
            median = statistics.median(found[0])
            say(f"{plan.rate}: {mode}: {counts[mode]} steps of {median:.1f} ms")
        if last:
            for mode, cluster in clusters.items():
                count = min(_MOST_TRACED, counts[mode])
                results[mode].parts = cluster.ask(do="breakdown", count=count)[0]
        net.unlimit()


def _cluster(plan, net, mode):
    addresses = net.addresses(plan.modes.index(mode))
    settings = {**plan.worker, "mode": mode}
    script = "peer_worker.py" if mode in peers.MODES else "step_worker.py"
    return Cluster(settings, addresses, net, plan.timeout, script)


def _turn(plan, net, cluster, count):
    """Run steps; return the times of all but the first, and three figures more.

    These are processor time, bytes and packets, per step and worker. The first
    step finds processor caches that another mode has filled.
    """
    before = net.sent(), net.sent("packets")
    answers = cluster.ask(do="steps", count=count + 1)
    sent, packets = net.sent() - before[0], net.sent("packets") - before[1]
    times = [t for answer in answers for t in answer["times"][1:]]
    cpu = sum(answer["cpu"] for answer in answers)
    total = (count + 1) * plan.num_workers
    return times, cpu / total, sent / total, packets / total


def _count(plan, times):
    """Return how many steps fit into a turn: one at least."""
    milliseconds = 1000 * plan.seconds / plan.rounds
    return max(1, min(plan.steps, int(milliseconds / statistics.median(times))))
