"""The fault matrix on loopback: `pytest -m faults`.

After a fault of one worker, each of the others ends in time with an error that names
it, or continues if nothing is broken.
"""

import re
import signal

import pytest
from processes import Cluster, Survivors, local_environments

pytestmark = [pytest.mark.faults, pytest.mark.workers]

QUICK = {
    "TF_DGC_TIMEOUT": "8",
    "TF_DGC_HEARTBEAT_TIMEOUT": "6",
    "TF_DGC_START_TIMEOUT": "60",  # two processes import TensorFlow on a busy machine
}
MARGIN = 15  # s, for processes to end on a busy machine
LIMIT = 8 + MARGIN


def expect_all_to_name(cluster, victim, since, limit, record, fault):
    """Wait for all survivors; return their errors."""
    ranks = [r for r in range(len(cluster.workers)) if r != victim]
    survivors = Survivors(cluster, ranks, since, limit + 60)
    record(fault, survivors.rows)
    for text in survivors.texts:
        assert f"worker {victim} (" in text.partition("cannot go on: ")[2] or (
            f"worker {victim} (" in text.partition("waited")[2]
        ), text
    assert survivors.seconds < limit
    return survivors.texts


def signal_and_expect_errors(
    tmp_path, record, number, victim, num_workers, suffix="", **settings
):
    """Send a signal to one worker while all train; return the others' errors."""
    settings = {**QUICK, **settings}
    with Cluster(
        "none", tmp_path, local_environments(num_workers), **settings
    ) as cluster:
        cluster.wait_for_steps()
        since = cluster.signal(victim, number)
        fault = f"{number.name} to worker {victim}{suffix}"
        return expect_all_to_name(cluster, victim, since, LIMIT, record, fault)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_signals(tmp_path, record, number, victim):
    signal_and_expect_errors(tmp_path, record, number, victim, 3)


@pytest.mark.parametrize(
    "exchange",
    ["tree", "butterfly", "star", "gtopk", "oktopk", "twoway", "hierarchical"],
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_in_the_rounds_of_an_exchange(tmp_path, record, number, exchange):
    """Workers that wait for others, which wait for the victim, are not blamed."""
    suffix = f" of a {exchange}"
    texts = signal_and_expect_errors(
        tmp_path, record, number, 3, 4, suffix, FAULT_EXCHANGE=exchange
    )
    for text in texts:
        assert not re.search(r"waited \d+ s.*for data from", text), text


@pytest.mark.parametrize("kind", ["local", "gossip"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_between_consensus_points(tmp_path, record, number, kind):
    """Workers that wait for neighbors of the victim name the victim, too."""
    suffix = " of local steps" if kind == "local" else " of a ring that gossips"
    signal_and_expect_errors(
        tmp_path, record, number, 3, 4, suffix, FAULT_OPTIMIZER=kind
    )


# Faults that the victim causes itself: description, and text of the others' errors.
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
    description, expected = OWN_FAULTS[fault]
    settings = {**QUICK, "FAULT_UNITS": "100000" if fault == "collective" else "64"}
    if fault.endswith("start"):
        settings["TF_DGC_START_TIMEOUT"] = "8"
    with Cluster(fault, tmp_path, local_environments(2), **settings) as cluster:
        since = cluster.workers[1].wait_for("FAULT", 120)
        if fault.endswith("start"):  # the others start to wait later
            since = max(since, cluster.workers[0].lines[0][0])
        texts = expect_all_to_name(
            cluster, 1, since, LIMIT, record, f"worker 1 {description}"
        )
        assert all(expected in text for text in texts)


def test_first_worker_is_stopped_while_all_save(tmp_path, record):
    """The others wait at a barrier before they collect the state."""
    settings = {**QUICK, "FAULT_VICTIM": "0"}
    with Cluster(
        "stopped_save", tmp_path, local_environments(3), **settings
    ) as cluster:
        since = cluster.workers[0].wait_for("FAULT", 120)
        fault = "worker 0 is stopped while all save"
        expect_all_to_name(cluster, 0, since, LIMIT, record, fault)


@pytest.mark.parametrize("victim", [0, 2])
def test_stopped_between_rendezvous_and_connection(tmp_path, record, victim):
    """TensorFlow's constructor holds Python's lock."""
    settings = {**QUICK, "FAULT_VICTIM": str(victim), "TF_DGC_START_TIMEOUT": "15"}
    with Cluster("met", tmp_path, local_environments(3), **settings) as cluster:
        since = cluster.workers[victim].wait_for("FAULT", 120)
        fault = f"worker {victim} is stopped when all have met"
        expect_all_to_name(cluster, victim, since, 15 + MARGIN, record, fault)


def test_slow_above_the_limit(tmp_path, record):
    settings = {**QUICK, "FAULT_SECONDS": "40"}
    with Cluster("above", tmp_path, local_environments(3), **settings) as cluster:
        since = cluster.workers[2].wait_for("FAULT", 120)
        fault = "worker 2 sleeps 40 s; limit 8 s"
        texts = expect_all_to_name(cluster, 2, since, LIMIT, record, fault)
        assert all("fault_worker.py" in text for text in texts)  # where it sleeps


def test_slow_with_default_limits(tmp_path, record):
    with Cluster(
        "above", tmp_path, local_environments(2), FAULT_SECONDS="90"
    ) as cluster:
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
    with Cluster("below", tmp_path, local_environments(2), **settings) as cluster:
        expect_all_to_finish(cluster, record, "worker 1 sleeps 4 s; limit 8 s")


def test_slow_tracing_is_no_fault(tmp_path, record):
    settings = {**QUICK, "FAULT_SECONDS": "16"}
    with Cluster("tracing", tmp_path, local_environments(2), **settings) as cluster:
        expect_all_to_finish(cluster, record, "worker 1 traces 16 s; limit 8 s")


def test_tracing_above_its_own_limit(tmp_path, record):
    settings = {**QUICK, "FAULT_SECONDS": "40", "TF_DGC_TRACING_TIMEOUT": "10"}
    with Cluster("tracing", tmp_path, local_environments(2), **settings) as cluster:
        since = cluster.workers[1].wait_for("FAULT", 120)
        fault = "worker 1 traces 40 s; limit of tracing 10 s"
        expect_all_to_name(cluster, 1, since, 10 + MARGIN, record, fault)
