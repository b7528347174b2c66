"""The fault matrix between network namespaces: `sudo pytest -m faults`.

Every worker has its own namespace, so that its link can be cut, slowed down or made to
lose packets.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest
from processes import Cluster, local_environments
from test_faults import MARGIN, QUICK, expect_all_to_name

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))
from common.network import Namespaces

pytestmark = [pytest.mark.faults, pytest.mark.workers]
SLOW_LINK = ["rate", "500kbit", "burst", "16kb", "latency", "400ms"]


def missing():
    if os.geteuid() != 0:
        return "network namespaces need root: sudo pytest -m faults"
    tools = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    return f"not installed (iproute2): {', '.join(tools)}" if tools else None


@pytest.fixture
def namespaces():
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Namespaces("1gbit", 2) as network:
        yield network


def environments(namespaces):
    """Return the environments of workers that communicate over the links."""
    worker_environments = local_environments(2)
    for rank, environment in enumerate(worker_environments):
        environment["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": namespaces.addresses(0)},
                "task": {"type": "worker", "index": rank},
            }
        )
    return worker_environments


def start(namespaces, fault, directory, **settings):
    return Cluster(
        fault,
        directory,
        environments(namespaces),
        namespaces.command,
        **{**QUICK, **settings},
    )


def limit(namespaces, token_bucket):
    """Limit both ends of the last worker's link by a token bucket; return the time."""
    for namespace, device in list(namespaces._ends())[-2:]:
        command = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root"]
        subprocess.run([*command, "tbf", *token_bucket], check=True)
    return time.monotonic()


def expect_both_to_name_each_other(cluster, since, seconds, record, fault):
    for victim in (0, 1):  # each side sees the other one cut off
        description = fault if victim else f"{fault}, the other side"
        expect_all_to_name(cluster, victim, since, seconds, record, description)


def test_cut(namespaces, tmp_path, record):
    with start(namespaces, "none", tmp_path) as cluster:
        cluster.wait_for_steps()
        hub, port = list(namespaces._ends())[-1]
        subprocess.run(["ip", "-n", hub, "link", "set", port, "down"], check=True)
        since = time.monotonic()
        expect_both_to_name_each_other(
            cluster, since, 8 + MARGIN, record, "the link of worker 1 is cut"
        )


def test_nearly_all_packets_are_lost(namespaces, tmp_path, record):
    with start(namespaces, "none", tmp_path) as cluster:
        cluster.wait_for_steps()
        # A bucket that lets 2 kbit/s pass and queues nothing: the rest is dropped.
        bucket = ["rate", "2kbit", "burst", "1600", "limit", "1600"]
        since = limit(namespaces, bucket)
        expect_both_to_name_each_other(
            cluster, since, 16 + MARGIN, record, "the link of worker 1 loses packets"
        )


def test_some_packets_are_lost(namespaces, tmp_path, record):
    """TCP sends them again: training is slower, but no worker fails."""
    with start(namespaces, "none", tmp_path, FAULT_UNITS="2000") as cluster:
        cluster.wait_for_steps()
        limit(namespaces, ["rate", "2mbit", "burst", "4000", "limit", "6000"])
        cluster.wait_for_steps(60, 120)
        assert dropped(namespaces) > 0
        rows = [(rank, "no error, goes on", None, None) for rank in (0, 1)]
        record(f"the link loses packets ({dropped(namespaces)} of them)", rows)


def dropped(namespaces):
    """Return the number of packets that the last worker's link has dropped."""
    return sum(
        discipline["drops"]
        for namespace, device in list(namespaces._ends())[-2:]
        for discipline in json.loads(
            subprocess.run(
                ["tc", "-s", "-j", "-n", namespace, "qdisc", "show", "dev", device],
                check=True,
                capture_output=True,
            ).stdout
        )
    )


def test_slow_link(namespaces, tmp_path, record):
    """A collective that would take minutes, while heartbeats arrive.

    The limit is 8 s for the worker and 8 s more for the network. Each chunk of 1 MiB,
    which takes 17 s, restarts both.
    """
    settings = {"FAULT_UNITS": "100000", "TF_DGC_HEARTBEAT_TIMEOUT": "40"}
    with start(namespaces, "dense", tmp_path, **settings) as cluster:
        cluster.wait_for_steps(2)
        since = limit(namespaces, SLOW_LINK)
        soon = 17 + 2 * 8 + MARGIN
        expect_both_to_name_each_other(
            cluster, since, soon, record, "a link of 500 kbit/s, dense step"
        )


def test_a_step_that_takes_longer_than_the_limit(namespaces, tmp_path, record):
    """All workers wait for the network, none for a worker: the limit is longer."""
    settings = {"FAULT_UNITS": "2200", "TF_DGC_HEARTBEAT_TIMEOUT": "40"}
    with start(namespaces, "dense", tmp_path, **settings) as cluster:
        cluster.wait_for_steps(2)
        limit(namespaces, SLOW_LINK)
        start_step = 1 + max(map(last_step, cluster.workers))
        cluster.wait_for_steps(start_step + 2)
        rows = []
        for rank, worker in enumerate(cluster.workers):
            first, second = (worker.time_of(f"step {start_step + i}") for i in (1, 2))
            assert second - first > float(QUICK["TF_DGC_TIMEOUT"])
            rows.append((rank, "no error, goes on", None, None))
        record("a link of 500 kbit/s, dense steps of some 11 s", rows)


def last_step(worker):
    steps = [line for _, line in worker.lines if line.startswith("step ")]
    return int(steps[-1].split()[1])


def test_a_slow_link_is_not_a_dead_worker(record):
    """All large transfers at 10 Mbit/s, with TensorFlow's usual heartbeats.

    `SLOW_LINK_PARAMETERS=25_000_000` takes a quarter of an hour.
    """
    if reason := missing():
        pytest.skip(reason)
    import slow_link  # it defines flags, as other benchmarks do

    parameters = int(os.environ.get("SLOW_LINK_PARAMETERS", "2_500_000"))
    phases = {
        row["phase"]: row
        for row in slow_link.measure("10mbit", parameters, "different", 1800)
    }
    # One megabyte for what does not grow with the model, as heartbeats.
    assert phases["build"]["megabytes"] < 1.05 * 4e-6 * parameters + 1
    # Velocity and residual of both workers; the file is read from the disk.
    assert phases["save"]["of_weights"] > 4
    rows = [(rank, "no error, goes on", None, None) for rank in (0, 1)]
    record(f"links of 10 Mbit/s, {parameters:,d} parameters", rows)
