"""Real worker processes on loopback, under stock MultiWorkerMirroredStrategy."""

import contextlib
import json
import time

from nursery import Nursery

from tf_dgc.multiworker.launch import launcher, worker_processes

_TIMEOUT = 250.0  # s, for all workers to end; on an idle machine few take 20


class Finished:
    """How each worker ended: exit code, and what it printed and found."""

    def __init__(self, codes, logs, directory):
        self.codes = codes
        self.outputs = [log.read_text(errors="replace") for log in logs]
        found = [directory / f"{rank}.json" for rank in range(len(logs))]
        self.findings = [json.loads(f.read_text()) for f in found if f.exists()]


class Starter:
    """Starts workers; a context manager that ends what they come from.

    As programs of their own, two workers differ in the order of sets. Forks of one
    nursery do not, so there are two.
    """

    def __init__(self):
        self._stack = contextlib.ExitStack()
        self._nurseries = [self._stack.enter_context(Nursery()) for _ in range(2)]

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
        """Run a script on workers, each of which has to end by itself.

        Args:
            command: path of the script, and its arguments.
            num_workers: how many.
            directory: for their logs; and for what they found, `RANK.json`.
            last: environment variables of the last worker alone.
            timeout: seconds in which all have to end.
            **environment: of all.
        """
        environments = [
            {**of_worker, "CUDA_VISIBLE_DEVICES": "-1", **environment}
            for of_worker in launcher.worker_environments(
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
                nursery = self._nurseries[rank % 2]
                workers.append(nursery.start(command, environments[rank], str(log)))
        except BaseException:
            worker_processes.end_processes(workers)
            raise
        return workers
