"""Real workers and a server, under stock `fit`: modes, and who is killed."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import programs
import pytest

from tf_dgc.launch import loopback

SCRIPT = pathlib.Path(__file__).with_name("server_worker.py")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "TF_DGC_HEARTBEAT_TIMEOUT": "3"}
STEPS = 24


@pytest.mark.workers
def test_the_launcher_starts_a_server_and_fit_trains_with_it(tmp_path):
    command = [sys.executable, "-m", "tf_dgc", "run", "--servers", "1", "--workers"]
    command += ["2", "--log-dir", tmp_path, SCRIPT, tmp_path, "sync"]
    finished = programs.run(command, merged=True, **ENVIRONMENT)
    log = (tmp_path / "server-0.log").read_text()
    assert finished.returncode == 0, log
    one, other = (json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2))
    assert one["clock"] == other["clock"] == STEPS
    assert one["weights"] == other["weights"]
    assert one["clocks"] == other["clocks"] == list(range(2, STEPS + 1, 2))
    assert one["val_loss"][-1] < one["val_loss"][0]
    assert one["ratio"] > 5
    assert re.findall(r"worker (\d) joins", log) in (["0", "1"], ["1", "0"])
    assert log.count("has left (24 pushes applied)") == 2
    assert "24 updates; at most 0 steps ahead" in log
    assert "learning rate 0.025" in log
    assert "Traceback" not in log


class Cluster:
    """A server and workers as processes; a context manager that ends them."""

    def __init__(self, directory, number, *arguments, **environment):
        self.directory = directory
        environments = loopback.environments(loopback.free_ports(number + 1), 1, 1)
        commands = [[SCRIPT, directory, *arguments]] * number
        commands.append(["-m", "tf_dgc", "serve"])
        self._processes = []
        with contextlib.ExitStack() as stack:
            stack.push(self.__exit__)
            for place, (command, of_one) in enumerate(
                zip(commands, environments, strict=True)
            ):
                log = stack.enter_context((directory / f"{place}.log").open("w"))
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, command)],
                        env={**of_one, **ENVIRONMENT, **environment},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
            (directory / "server").write_text(str(self._processes[-1].pid))
            stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._processes:
            process.kill()
            process.wait()

    def wait(self, seconds=120.0):
        """Return exit codes and logs, the server's last."""
        deadline = time.monotonic() + seconds
        codes = [p.wait(deadline - time.monotonic()) for p in self._processes]
        paths = (self.directory / f"{i}.log" for i in range(len(codes)))
        logs = [path.read_text(errors="replace") for path in paths]
        print(*(log[-2500:] for log in logs), sep="\n---\n")
        return codes, logs

    def found(self, rank):
        return json.loads((self.directory / f"{rank}.json").read_text())


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("mode", [("async",), ("ssp", 1)], ids=["async", "ssp"])
def test_others_go_on_without_a_worker_that_is_killed(tmp_path, mode):
    with Cluster(tmp_path, 2, *mode, FAIL="die") as cluster:
        codes, logs = cluster.wait()
    assert codes == [0, -signal.SIGKILL, 0]
    assert "worker 1 does not respond, for 3 s" in logs[-1]
    pushed = [int(n) for n in re.findall(r"\((\d+) pushes applied\)", logs[-1])]
    assert sorted(pushed) == [3, STEPS]
    assert cluster.found(0)["clock"] == STEPS + 3


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize(
    "how, text",
    [
        ("die", "worker 1 does not respond, for 3 s: killed, stopped or cut off"),
        ("raise", "worker 1 ended with ValueError: as it was told"),
    ],
)
def test_a_synchronous_run_ends_with_the_name_of_who_failed(tmp_path, how, text):
    with Cluster(tmp_path, 2, "sync", FAIL=how) as cluster:
        codes, logs = cluster.wait()
    assert codes[0] == 1
    assert f"The run cannot go on: {text}" in logs[0]


@pytest.mark.slow
@pytest.mark.workers
def test_all_end_if_the_server_is_killed(tmp_path):
    with Cluster(tmp_path, 2, "async", FAIL="server", TF_DGC_TIMEOUT="4") as cluster:
        codes, logs = cluster.wait()
    assert codes == [1, 1, -signal.SIGKILL]
    for rank in range(2):
        assert f"tf_dgc: worker {rank} does not reach the server" in logs[rank]


@pytest.mark.slow
@pytest.mark.workers
def test_a_script_in_the_servers_task_serves(tmp_path):
    """As `TF_CONFIG` says, without `tf-dgc serve`."""
    (server,) = loopback.environments(loopback.free_ports(2), 1, 1)[1:]
    server["TF_DGC_START_TIMEOUT"] = "1"
    script = [sys.executable, str(SCRIPT), str(tmp_path), "async"]
    process = subprocess.Popen(
        script,
        env={**os.environ, **server, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for line in process.stdout:
            if "tf_dgc server: listens on 127.0.0.1" in line:
                break
        else:
            pytest.fail("it does not listen")
    finally:
        process.kill()
        process.communicate()
    np.testing.assert_equal(process.returncode, -signal.SIGKILL)
