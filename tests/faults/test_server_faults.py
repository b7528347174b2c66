"""Faults of parameter servers and their workers: `pytest -m faults`."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import tensorflow as tf
from processes import Survivors, Worker

from tf_dgc._internals import rpc
from tf_dgc.multiworker.launch import worker_processes
from tf_dgc.multiworker.launch.launcher import free_ports, worker_environments

pytestmark = [pytest.mark.workers]
SCRIPT = Path(__file__).with_name("server_fault_worker.py")
QUICK = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_DGC_TIMEOUT": "20",  # a server builds the model while other processes import
    "TF_DGC_HEARTBEAT_TIMEOUT": "6",
    "TF_DGC_START_TIMEOUT": "90",  # four processes import TensorFlow on two cores
}
MARGIN = 25  # s, for processes to end on a busy machine
FOREVER = 10**6
TOLERANT_MODES = ["async", "ssp", "backup"]


class ServerGroup:
    """One or several servers, and workers; leaving the context ends them all."""

    def __init__(
        self, mode, fault="none", number=3, steps=FOREVER, num_servers=1, **settings
    ):
        ports = free_ports(number + num_servers)
        environments = worker_environments(ports, num_servers=num_servers)
        self.environments = [{**e, **QUICK, **settings} for e in environments]
        self.command = [sys.executable, str(SCRIPT), mode, fault, str(steps)]
        self.address = f"127.0.0.1:{ports[-1]}"  # of the last server
        self._started = []
        try:
            serve = [sys.executable, "-m", "tf_dgc", "serve"]
            servers = [self._start(serve, e) for e in self.environments[number:]]
            *self.other_servers, self.server = servers
            self.workers = [self.start_worker(worker) for worker in range(number)]
        except BaseException:
            self.__exit__()
            raise

    def start_worker(self, worker):
        return self._start(self.command, self.environments[worker])

    def _start(self, command, environment):
        self._started.append(Worker(command, environment))
        return self._started[-1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        worker_processes.end_processes([w.process for w in self._started])

    def wait_for_steps(self, number=5, seconds=150):
        for worker in self.workers:
            worker.wait_for(f"step {number} ", seconds)


def count(worker):
    """Return the last step and clock that a worker printed."""
    with worker.changed:
        lines = [line for _, line in worker.lines if line.startswith("step")]
    return tuple(map(int, re.findall(r"\d+", lines[-1])))


def expect_progress(workers, steps=30, seconds=60):
    for worker in workers:
        worker.wait_for(f"step {count(worker)[0] + steps} ", seconds)


def expect_to_end(served, ranks, expected, since, limit, record, fault):
    """Wait for workers to end with an error."""
    survivors = Survivors(served, ranks, since, limit + 60, expected)
    record(fault, survivors.rows)
    assert survivors.seconds < limit


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_synchronous_run_ends_with_the_name_of_the_lost_worker(record, number):
    with ServerGroup("sync") as served:
        served.wait_for_steps()
        since = time.monotonic()
        served.workers[2].process.send_signal(number)
        fault = f"{number.name} to worker 2 of a server, sync"
        expected = "worker 2 has not responded for 6 s"
        expect_to_end(served, [0, 1], expected, since, 6 + MARGIN, record, fault)
        assert served.server.wait(MARGIN) == 0


@pytest.mark.faults
@pytest.mark.parametrize("mode", TOLERANT_MODES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_others_continue_and_another_process_joins(record, mode, number):
    with ServerGroup(mode) as served:
        served.wait_for_steps()
        served.workers[2].process.send_signal(number)
        served.server.wait_for("worker 2 has not responded", 6 + MARGIN)
        expect_progress(served.workers[:2])
        joined = served.start_worker(2)
        joined.wait_for("step 5 ", 90)
        _, clock = count(joined)
        assert clock > 30
        assert served.server.time_of("worker 2 joins (3 of 3, at update ") is not None
        expect_progress(served.workers[:2])
        if number == signal.SIGSTOP:  # the old process continues, and only it ends
            served.workers[2].process.send_signal(signal.SIGCONT)
            assert served.workers[2].wait(MARGIN) != 0
            # An earlier request of it may have timed out by then.
            texts = ["does not know this process", "does not reach the server"]
            error_texts = [text for text in texts if served.workers[2].time_of(text)]
            assert error_texts, served.workers[2].output()
            expect_progress([*served.workers[:2], joined])
        rows = [(rank, "goes on", None, None) for rank in range(2)]
        record(f"{number.name} to worker 2 of a server, {mode}", rows)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "expected"), [("error", "ended with ValueError: the disk")]
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_ends_with_an_error(record, mode, fault, expected):
    with ServerGroup(mode, fault) as served:
        since = served.workers[2].wait_for("FAULT", 150)
        text = f"worker 2 {expected}"
        if mode == "sync":
            description = f"worker 2 of a server ends: {fault}"
            expect_to_end(served, [0, 1], text, since, MARGIN, record, description)
        else:
            served.server.wait_for(text, MARGIN)
            expect_progress(served.workers[:2])


@pytest.mark.faults
def test_others_wait_for_a_worker_that_computes_something_else():
    with ServerGroup("sync", "evaluates", FAULT_SECONDS="25") as served:
        served.workers[2].wait_for("FAULT", 150)
        served.wait_for_steps(20)


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["sync", *TOLERANT_MODES])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_server_is_gone(record, mode, number):
    with ServerGroup(mode, number=2) as served:
        served.wait_for_steps()
        since = time.monotonic()
        served.server.process.send_signal(number)
        fault = f"{number.name} to the server, {mode}"
        expected = f"does not reach the server ({served.address})"
        expect_to_end(served, [0, 1], expected, since, 20 + MARGIN, record, fault)


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_of_two_servers_is_gone(record, mode):
    with ServerGroup(mode, number=2, num_servers=2) as served:
        served.wait_for_steps()
        since = time.monotonic()
        served.server.process.send_signal(signal.SIGKILL)
        fault = f"SIGKILL to one of two servers, {mode}"
        expected = f"does not reach the server ({served.address})"
        expect_to_end(served, [0, 1], expected, since, 20 + MARGIN, record, fault)
        (other,) = served.other_servers
        if mode == "sync":  # all have ended
            assert other.wait(MARGIN) == 0, other.output()
            return
        assert other.process.poll() is None  # waits for workers to join
        # None does: it ends after the start timeout.
        assert other.wait(90 + MARGIN) == 0, other.output()


@pytest.mark.faults
def test_a_worker_of_two_servers_is_killed_and_another_process_joins():
    with ServerGroup("async", num_servers=2) as served:
        served.wait_for_steps()
        served.workers[2].process.send_signal(signal.SIGKILL)
        for server in [*served.other_servers, served.server]:
            server.wait_for("worker 2 has not responded", 6 + MARGIN)
        expect_progress(served.workers[:2])
        joined = served.start_worker(2)
        joined.wait_for("step 5 ", 90)
        expect_progress([*served.workers[:2], joined])


@pytest.mark.faults
def test_the_last_worker_is_killed_and_another_process_continues():
    with ServerGroup("async", number=1, steps=40) as served:
        served.wait_for_steps()
        served.workers[0].process.send_signal(signal.SIGKILL)
        _, clock = count(served.workers[0])
        served.server.wait_for("worker 0 has not responded", 6 + MARGIN)
        joined = served.start_worker(0)
        assert joined.wait(120) == 0, joined.output()
        assert count(joined)[1] >= clock + 40
        assert served.server.wait(MARGIN) == 0


@pytest.mark.faults
def test_strangers_do_no_harm():
    """They send messages in the slots of workers that wait for each other."""
    with ServerGroup("sync", number=2, steps=300) as served:
        served.wait_for_steps()
        client = rpc.Client(served.address, "stranger", 5.0)
        for i in range(60):
            client.call(i % 4, tf.zeros([i], tf.int32))
        for worker in served.workers:
            assert worker.wait(120) == 0, worker.output()
        assert served.server.wait(MARGIN) == 0
        assert served.server.time_of("300 updates") is not None
        rejections = [t for _, t in served.server.lines if "in the name of worker" in t]
        assert len(rejections) == 60


@pytest.mark.faults
def test_the_server_resumes_its_checkpoint_after_a_restart(tmp_path):
    command = [sys.executable, "-m", "tf_dgc", "run", "--servers", "1", "--workers"]
    command += ["2", "--output", "all", "--max-restarts", "1"]
    command += [str(SCRIPT), "async", "none", "300"]
    settings = {"TF_DGC_SERVER_DIR": str(tmp_path), "TF_DGC_SERVER_SECONDS": "0.5"}
    launcher = Worker(command, {**os.environ, **QUICK, **settings})
    try:
        launcher.wait_for("step 100 ", 150)
        (server,) = [
            process
            for process in psutil.Process(launcher.process.pid).children(True)
            if "serve" in process.cmdline()
        ]
        server.kill()
        launcher.wait_for("resumes from", 90)
        assert launcher.wait(180) == 0, launcher.output()
    finally:
        worker_processes.end_processes([launcher.process])
    text = launcher.output(10_000)
    resume_update = int(re.findall(r"server.npz, at update (\d+)", text)[0])
    updates = int(re.findall(r"(\d+) updates; ", text)[-1])
    assert resume_update > 0
    assert updates == resume_update + 2 * 300
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_worker_ends_no_other():
    """The one of these tests that `.ci/run` runs."""
    with ServerGroup("backup") as served:
        served.wait_for_steps()
        served.workers[2].process.send_signal(signal.SIGKILL)
        served.server.wait_for("worker 2 has not responded", 6 + MARGIN)
        expect_progress(served.workers[:2])
