"""The fault matrix on loopback: `pytest -m faults`.

Whatever happens to one worker, each of the others ends in time with an error that
names it, or, where nothing is broken, goes on.
"""

import re
import signal

import pytest
from processes import Cluster, Ended, on_loopback

pytestmark = [pytest.mark.faults, pytest.mark.workers]

QUICK = {
    "TF_DGC_TIMEOUT": "8",
    "TF_DGC_HEARTBEAT_TIMEOUT": "6",
    "TF_DGC_START_TIMEOUT": "60",  # two processes import TensorFlow on a busy machine
}
MARGIN = 15  # s, for processes to end on a busy machine
LIMIT = 8 + MARGIN


def expect_all_to_name(cluster, victim, since, limit, record, fault):
    """Wait for all survivors; return what they said."""
    survivors = [r for r in range(len(cluster.workers)) if r != victim]
    ended = Ended(cluster, survivors, since, limit + 60)
    record(fault, ended.rows)
    for text in ended.texts:
        assert f"worker {victim} (" in text.partition("cannot go on: ")[2] or (
            f"worker {victim} (" in text.partition("waited")[2]
        ), text
    assert ended.seconds < limit
    return ended.texts


def expect_all_to_notice(
    tmp_path, record, number, victim, num_workers, of="", **settings
):
    """Send a signal to one worker while all train; return what the others said."""
    settings = {**QUICK, **settings}
    with Cluster("none", tmp_path, on_loopback(num_workers), **settings) as cluster:
        cluster.wait_for_steps()
        since = cluster.signal(victim, number)
        fault = f"{number.name} to worker {victim}{of}"
        return expect_all_to_name(cluster, victim, since, LIMIT, record, fault)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_signals(tmp_path, record, number, victim):
    expect_all_to_notice(tmp_path, record, number, victim, 3)


@pytest.mark.parametrize(
    "exchange",
    ["tree", "butterfly", "star", "gtopk", "oktopk", "twoway", "hierarchical"],
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_in_the_rounds_of_an_exchange(tmp_path, record, number, exchange):
    """Those that wait for others, who wait for the victim, are not blamed."""
    of, settings = f" of a {exchange}", {"FAULT_EXCHANGE": exchange}
    texts = expect_all_to_notice(tmp_path, record, number, 3, 4, of, **settings)
    for text in texts:
        assert not re.search(r"waited \d+ s.*for data from", text), text


@pytest.mark.parametrize("kind", ["local", "gossip"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_between_consensus_points(tmp_path, record, number, kind):
    """Those that wait for neighbours of the victim are told of the victim as well."""
    of = " of local steps" if kind == "local" else " of a ring that gossips"
    expect_all_to_notice(tmp_path, record, number, 3, 4, of, FAULT_OPTIMIZER=kind)


# What the victim does to itself, and what the others are told about it.
OWN_FAULTS = {
    "start": ("dies before it makes a strategy", "to start, in vain"),
    "stopped_start": ("is stopped before it makes a strategy", "to start, in vain"),
    "variables": ("dies before it creates variables", ""),
    "collective": ("dies within a collective", ""),
    "save": ("dies while all save", ""),
    "leave": ("leaves early, with exit code 0", "has ended: its program was over"),
    "error": ("ends with an error of its own", "ValueError: the disk"),
}


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_victim(tmp_path, record, fault):
    what, told = OWN_FAULTS[fault]
    settings = {**QUICK, "FAULT_UNITS": "100000" if fault == "collective" else "64"}
    if fault.endswith("start"):
        settings["TF_DGC_START_TIMEOUT"] = "8"
    with Cluster(fault, tmp_path, on_loopback(2), **settings) as cluster:
        since = cluster.workers[1].wait_for("FAULT", 120)
        if fault.endswith("start"):  # from when the others wait
            since = max(since, cluster.workers[0].lines[0][0])
        texts = expect_all_to_name(cluster, 1, since, LIMIT, record, f"worker 1 {what}")
        assert all(told in text for text in texts)


def test_first_worker_is_stopped_while_all_save(tmp_path, record):
    """Nobody answers the others, who meet before they collect the state."""
    settings = {**QUICK, "FAULT_VICTIM": "0"}
    with Cluster("stopped_save", tmp_path, on_loopback(3), **settings) as cluster:
        since = cluster.workers[0].wait_for("FAULT", 120)
        fault = "worker 0 is stopped while all save"
        expect_all_to_name(cluster, 0, since, LIMIT, record, fault)


@pytest.mark.parametrize("victim", [0, 2])
def test_stopped_between_meeting_and_connecting(tmp_path, record, victim):
    """TensorFlow's constructor keeps Python's lock by itself."""
    settings = {**QUICK, "FAULT_VICTIM": str(victim), "TF_DGC_START_TIMEOUT": "15"}
    with Cluster("met", tmp_path, on_loopback(3), **settings) as cluster:
        since = cluster.workers[victim].wait_for("FAULT", 120)
        fault = f"worker {victim} is stopped when all have met"
        expect_all_to_name(cluster, victim, since, 15 + MARGIN, record, fault)


def test_slow_above_the_limit(tmp_path, record):
    settings = {**QUICK, "FAULT_SECONDS": "40"}
    with Cluster("above", tmp_path, on_loopback(3), **settings) as cluster:
        since = cluster.workers[2].wait_for("FAULT", 120)
        fault = "worker 2 sleeps 40 s; limit 8 s"
        texts = expect_all_to_name(cluster, 2, since, LIMIT, record, fault)
        assert all("fault_worker.py" in text for text in texts)  # where it sleeps


def test_slow_with_default_limits(tmp_path, record):
    with Cluster("above", tmp_path, on_loopback(2), FAULT_SECONDS="90") as cluster:
        since = cluster.workers[1].wait_for("FAULT", 120)
        fault = "worker 1 sleeps 90 s; default limits"
        expect_all_to_name(cluster, 1, since, 60, record, fault)


def expect_all_to_finish(cluster, record, fault):
    for worker in cluster.workers:
        assert worker.wait(120) == 0, worker.output()
    rows = [(r, "no error, goes on", None, None) for r in range(len(cluster.workers))]
    record(fault, rows)


def test_slow_below_the_limit(tmp_path, record):
    settings = {**QUICK, "FAULT_SECONDS": "4"}
    with Cluster("below", tmp_path, on_loopback(2), **settings) as cluster:
        expect_all_to_finish(cluster, record, "worker 1 sleeps 4 s; limit 8 s")


def test_slow_tracing_is_no_fault(tmp_path, record):
    settings = {**QUICK, "FAULT_SECONDS": "16"}
    with Cluster("tracing", tmp_path, on_loopback(2), **settings) as cluster:
        expect_all_to_finish(cluster, record, "worker 1 traces 16 s; limit 8 s")


def test_tracing_above_its_own_limit(tmp_path, record):
    settings = {**QUICK, "FAULT_SECONDS": "40", "TF_DGC_TRACING_TIMEOUT": "10"}
    with Cluster("tracing", tmp_path, on_loopback(2), **settings) as cluster:
        since = cluster.workers[1].wait_for("FAULT", 120)
        fault = "worker 1 traces 40 s; limit of tracing 10 s"
        expect_all_to_name(cluster, 1, since, 10 + MARGIN, record, fault)
