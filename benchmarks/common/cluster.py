"""Starts the worker processes of one mode, sends them requests, and ends them."""

import contextlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time

from tf_dgc.multiworker.launch import launcher, worker_processes

_BENCHMARKS = pathlib.Path(__file__).resolve().parents[1]
_LOG_LINES = 30


class WorkerError(RuntimeError):
    """A worker ended or did not answer in time; the message has the end of its log."""


class Cluster:
    """All workers of one mode; a context manager that ends them.

    Args:
        settings: settings of the workers without their rank; see their script.
        addresses: one address and port per worker.
        network: network that they run in; see `network.py`.
        timeout: seconds until a worker must have answered.
        script: name of the worker's script in `benchmarks/workers/`, or its path.
        num_servers: number of servers, which are the last processes.
    """

    def __init__(
        self,
        settings,
        addresses,
        network,
        timeout,
        script="step_worker.py",
        num_servers=0,
    ):
        self._num_servers = num_servers
        self._settings = settings
        self._addresses = addresses
        self._network = network
        self._timeout = timeout
        self._script = _BENCHMARKS / "workers" / script
        self._workers = []
        self._lines = queue.SimpleQueue()  # (rank, line), or (rank, "") at the end
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self._directory = pathlib.Path(
                stack.enter_context(tempfile.TemporaryDirectory())
            )
            stack.callback(self._end)
            for rank in range(len(self._addresses)):
                self._start(rank)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def ask(self, **request):
        """Send a request to all workers; return their answers by rank.

        Raises:
            WorkerError: if a worker ends or does not answer in time.
        """
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):  # `wait` raises the reason
                worker.stdin.write(json.dumps(request) + "\n")
                worker.stdin.flush()
        return self.wait()

    def wait(self):
        """Return one answer of every worker, by rank.

        Raises:
            WorkerError: if a worker ends or does not answer in time.
        """
        answers = {}
        deadline = time.monotonic() + self._timeout
        while len(answers) < len(self._workers):
            try:
                remaining = max(0, deadline - time.monotonic())
                rank, line = self._lines.get(timeout=remaining)
            except queue.Empty:
                silent = min(set(range(len(self._workers))) - set(answers))
                raise self._error(
                    silent, f"did not answer within {self._timeout:.0f} seconds"
                ) from None
            if not line:
                raise self._error(rank, "ended")
            answers[rank] = json.loads(line)
        return [answers[rank] for rank in range(len(self._workers))]

    def _error(self, rank, failure):
        log = self._log(rank).read_text(errors="replace").splitlines()
        return WorkerError(
            f"Worker {rank} of mode {self._settings['mode']} {failure}. "
            "Its last messages:\n" + "\n".join(log[-_LOG_LINES:])
        )

    def _start(self, rank):
        settings = json.dumps({**self._settings, "rank": rank})
        command = [sys.executable, str(self._script), settings]
        with open(self._log(rank), "wb") as log:
            worker = subprocess.Popen(
                self._network.command(rank, command),
                env=self._environment(rank),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C reaches only the benchmark, which ends the workers.
                start_new_session=True,
            )
        self._workers.append(worker)
        reader = threading.Thread(target=self._read, args=(rank, worker), daemon=True)
        reader.start()

    def _read(self, rank, worker):
        with worker.stdout as lines:
            for line in lines:
                self._lines.put((rank, line))
        self._lines.put((rank, ""))

    def _environment(self, rank):
        environment = {
            **launcher.ALLOCATOR_SETTINGS,
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        # Workers import `common`, and packages next to the folder of their script.
        folders = dict.fromkeys([str(self._script.parents[1]), str(_BENCHMARKS)])
        paths = [*folders, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        # gRPC would contact other workers by the proxy.
        for name in ("grpc_proxy", "http_proxy", "https_proxy"):
            environment.pop(name, None)
        environment.pop("TF_CONFIG", None)
        environment.pop("TF_DGC_NATIVE", None)
        if self._settings["mode"] == "dgc-tf":
            environment["TF_DGC_NATIVE"] = "0"
        if self._settings["mode"] != "none":
            num_workers = len(self._addresses) - self._num_servers
            cluster = {"worker": self._addresses[:num_workers]}
            task = {"type": "worker", "index": rank}
            if self._num_servers:
                cluster["ps"] = self._addresses[num_workers:]
            if rank >= num_workers:
                task = {"type": "ps", "index": rank - num_workers}
            environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        return environment

    def _end(self):
        worker_processes.end_processes(self._workers)
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()

    def _log(self, rank):
        return self._directory / f"{rank}.log"
