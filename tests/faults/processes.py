"""Worker processes whose output is read line by line, and how they end."""

import os
import pathlib
import re
import sys
import threading
import time

from tf_dgc.multiworker.launch import launcher, worker_processes

SCRIPT = pathlib.Path(__file__).with_name("fault_worker.py")
_ERROR_LINE = re.compile(r"^(?:RuntimeError: )?tf_dgc: (worker .*)")


class Worker:
    """One process, with the lines of its output and their times."""

    def __init__(self, command, environment):
        self.lines = []  # (seconds of the monotonic clock, text)
        self.changed = threading.Condition()
        read, write = os.pipe()
        self._output = open(read, errors="replace")  # noqa: SIM115
        self.process = worker_processes.start_process(command, environment, write)
        os.close(write)
        self.ended = None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self._output as lines:
            for line in lines:
                self._add(line.rstrip())
        self.process.wait()
        with self.changed:
            self.ended = time.monotonic()
            self.changed.notify_all()

    def _add(self, line):
        with self.changed:
            self.lines.append((time.monotonic(), line))
            self.changed.notify_all()

    def time_of(self, text):
        """Return the time of the first line with a text, or None."""
        return next((t for t, line in self.lines if text in line), None)

    def wait_for(self, text, seconds):
        """Wait for a line with a text; return its time."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.time_of(text) is not None or self.ended, seconds
            )
        when = self.time_of(text)
        assert when is not None, f"no {text!r} within {seconds} s in:\n{self.output()}"
        return when

    def wait(self, seconds):
        """Wait until the process ends; return its exit code."""
        with self.changed:
            ended = self.changed.wait_for(lambda: self.ended is not None, seconds)
        assert ended, f"did not end within {seconds} s:\n{self.output()}"
        return self.process.returncode

    def output(self, lines=60):
        return "\n".join(line for _, line in self.lines[-lines:])

    def error(self):
        """Return time and text of the first error of tf_dgc."""
        for when, line in self.lines:
            if match := _ERROR_LINE.search(line):
                return when, match.group(1)
        raise AssertionError(f"no error of tf_dgc in:\n{self.output()}")


class Cluster:
    """Workers of `fault_worker.py`; leaving the context ends them all."""

    def __init__(self, fault, directory, environments, wrap=None, **settings):
        command = [sys.executable, str(SCRIPT), fault, str(directory)]
        self.workers = []
        try:
            for rank, environment in enumerate(environments):
                self.workers.append(
                    Worker(
                        wrap(rank, command) if wrap else command,
                        {**environment, "CUDA_VISIBLE_DEVICES": "-1", **settings},
                    )
                )
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        worker_processes.end_processes([w.process for w in self.workers])

    def wait_for_steps(self, number=5, seconds=120):
        for worker in self.workers:
            worker.wait_for(f"step {number}", seconds)

    def signal(self, rank, number):
        """Send a signal to a worker; return the time."""
        os.kill(self.workers[rank].process.pid, number)
        return time.monotonic()


def local_environments(num_workers):
    """Return the environments of workers on this machine's loopback interface."""
    return launcher.worker_environments(launcher.free_ports(num_workers))


class Survivors:
    """How the survivors of a fault ended.

    Args:
        cluster: workers, in order.
        ranks: ranks of the workers that must end with an error.
        since: time of the fault.
        seconds: limit for their ends, from the fault.
        expected: text that they must print; None for an error of tf_dgc.
    """

    def __init__(self, cluster, ranks, since, seconds, expected=None):
        self.rows = []
        self.texts = []
        self.seconds = 0.0  # from the fault until the last process was gone
        for rank in ranks:
            worker = cluster.workers[rank]
            code = worker.wait(max(1, seconds + since - time.monotonic()))
            assert code not in (0, None), worker.output()
            if expected:
                when, text = worker.time_of(expected), expected
            else:
                when, text = worker.error()
            assert when is not None, worker.output()
            self.texts.append(text)
            self.rows.append((rank, _short(text), when - since, worker.ended - since))
            self.seconds = max(self.seconds, worker.ended - since)


def _short(text):
    """Return the reason in a message, without addresses, paths and advice."""
    text = text.partition("cannot go on: ")[2] or text
    for end in (
        " (TensorFlow says",
        ". If it is",
        ". Meanwhile",
        ". Training cannot",
        ". Look at",
    ):
        text = text.partition(end)[0]
    text = re.sub(r" \([\w.]+:\d+\)", "", text)
    return re.sub(r"at \S*/([\w.]+:\d+)", r"at \1", text)
