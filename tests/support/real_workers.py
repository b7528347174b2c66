"""Real worker processes on loopback, under stock MultiWorkerMirroredStrategy."""

import contextlib
import json
import time

from fork_server import ForkServer

from tf_dgc.multiworker.launch import launcher, worker_processes

_TIMEOUT = 250.0  # s, for all workers; on an idle machine few tests take 20


class Finished:
    """Exit code, output and findings of each worker."""

    def __init__(self, codes, logs, directory):
        self.codes = codes
        self.outputs = [log.read_text(errors="replace") for log in logs]
        paths = [directory / f"{rank}.json" for rank in range(len(logs))]
        self.findings = [json.loads(p.read_text()) for p in paths if p.exists()]


class Starter:
    """Starts workers; a context manager that ends their fork servers.

    Separate programs differ in the order of sets, and forks of one process do not. So
    there are two fork servers.
    """

    def __init__(self):
        self._stack = contextlib.ExitStack()
        self._servers = [self._stack.enter_context(ForkServer()) for _ in range(2)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def run(
        self,
        command,
        num_workers,
        directory,
        last=None,
        timeout=_TIMEOUT,
        **environment,
    ):
        """Run a script on workers until they end.

        Args:
            command: path of the script, and its arguments.
            num_workers: number of workers.
            directory: directory of the logs and of the findings, `RANK.json`.
            last: environment variables of the last worker alone.
            timeout: seconds until all workers must have ended.
            **environment: environment variables of all workers.
        """
        environments = [
            {**variables, "CUDA_VISIBLE_DEVICES": "-1", **environment}
            for variables in launcher.worker_environments(
                launcher.free_ports(num_workers)
            )
        ]
        environments[-1].update(last or {})
        command = list(map(str, command))
        logs = [directory / f"{rank}.log" for rank in range(num_workers)]
        workers = self._start(command, environments, logs)
        try:
            deadline = time.monotonic() + timeout
            codes = [w.wait(max(1, deadline - time.monotonic())) for w in workers]
        finally:
            worker_processes.end_processes(workers)
            for log in logs:
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        return Finished(codes, logs, directory)

    def _start(self, command, environments, logs):
        workers = []
        try:
            for rank, log in enumerate(logs):
                log.write_text("")
                server = self._servers[rank % 2]
                workers.append(server.start(command, environments[rank], str(log)))
        except BaseException:
            worker_processes.end_processes(workers)
            raise
        return workers
