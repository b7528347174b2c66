"""Runs of `step.py`: modes take turns of some steps each."""

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
    """Settings of the benchmark at one rate.

    Attributes:
        worker: settings of every worker except its mode and rank.
        modes: modes to compare.
        num_workers: number of workers of every mode.
        rate: one of `network.RATES`.
        steps: largest number of steps of a turn.
        rounds: number of turns of every mode.
        seconds: seconds for the steps of a mode in all its turns.
        fresh: whether to start new processes for every turn, which needs memory for
            one mode only.
        timeout: seconds until a worker must have answered.
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
    """Measurements of one mode.

    Attributes:
        model: the workers' description of their model.
        parts: breakdown of worker 0's time; see `breakdown.py`.
        turns: times of steps in ms, a list per turn, of all workers: in every step they
            wait for each other.
        cpu: processor time of a worker's step in ms, per turn. Other programs affect it
            less than the step's time.
        sent: bytes per step and worker, per turn.
        packets: packets per step and worker, per turn.
    """

    def __init__(self):
        self.model: dict[str, Any] = {}
        self.parts: dict[str, float] = {}
        self.turns: list[list[float]] = []
        self.cpu: list[float] = []
        self.sent: list[float] = []
        self.packets: list[float] = []

    def add(self, times, cpu, sent, packets):
        """Add the measurements of a turn."""
        self.turns.append(times)
        self.cpu.append(cpu)
        self.sent.append(sent)
        self.packets.append(packets)

    def summary(self):
        """Return the figures of a row."""
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


def measure(plan, log):
    """Measure all modes.

    Args:
        plan: a `Plan`.
        log: function called with messages on progress.

    Returns:
        A `Result` per mode, and the measured Mbit/s of the slowest link (None if links
        are not limited).
    """
    results = {mode: Result() for mode in plan.modes}
    with network.connect(plan.rate, plan.num_workers, len(plan.modes)) as net:
        if plan.fresh:
            sessions = itertools.product(range(plan.rounds), plan.modes)
            for round_, mode in progress.track(sessions, "sessions"):
                last = round_ == plan.rounds - 1
                _run_session(plan, net, {mode: results[mode]}, 1, last, log)
        else:
            _run_session(plan, net, results, plan.rounds, True, log)
        return results, net.measured_mbit


def memory_is_short(gigabytes_per_worker, num_workers, num_modes):
    """Whether the workers of all modes together exceed the available memory."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    kilobytes = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    return gigabytes_per_worker * num_workers * num_modes > kilobytes / 1e6


def _run_session(plan, net, results, rounds, last, log):
    """Start the workers of some modes, let the modes take turns, and end them."""
    with contextlib.ExitStack() as stack:
        log(f"{plan.rate}: starting the workers of {', '.join(results)}")
        clusters = {
            mode: stack.enter_context(_cluster(plan, net, mode)) for mode in results
        }
        for mode, cluster in clusters.items():
            results[mode].model = cluster.wait()[0]
        # Not earlier: workers that start send each other whole models.
        net.limit()
        if net.measured_mbit:
            log(f"{plan.rate}: the links carry {net.measured_mbit:,.0f} Mbit/s")
        counts = {}
        for mode, cluster in clusters.items():
            times, *_ = _take_turn(plan, net, cluster, 1)
            counts[mode] = _num_steps(plan, times)
        turns = itertools.product(range(rounds), clusters)
        for _, mode in progress.track(turns, "turns"):
            times, cpu, sent, packets = _take_turn(
                plan, net, clusters[mode], counts[mode]
            )
            results[mode].add(times, cpu, sent, packets)
            median = statistics.median(times)
            log(f"{plan.rate}: {mode}: {counts[mode]} steps of {median:.1f} ms")
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


def _take_turn(plan, net, cluster, count):
    """Run steps; return their times, and processor time, bytes and packets.

    The last three are per step and worker. Times exclude the first step, whose
    processor caches another mode has filled.
    """
    sent_before, packets_before = net.sent(), net.sent("packets")
    answers = cluster.ask(do="steps", count=count + 1)
    sent = net.sent() - sent_before
    packets = net.sent("packets") - packets_before
    times = [t for answer in answers for t in answer["times"][1:]]
    cpu = sum(answer["cpu"] for answer in answers)
    total = (count + 1) * plan.num_workers
    return times, cpu / total, sent / total, packets / total


def _num_steps(plan, times):
    """Return the number of steps that fit into a turn, at least one."""
    milliseconds = 1000 * plan.seconds / plan.rounds
    return max(1, min(plan.steps, int(milliseconds / statistics.median(times))))
