"""Start one process per worker on this machine, and end all of them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

ATTEMPT_VARIABLE = "TF_DGC_ATTEMPT"
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05


def launch(
    command: Sequence[str],
    num_workers: int,
    output: TextIO | None = None,
    max_restarts: int = 0,
) -> int:
    """Run `command` once per worker with `TF_CONFIG` set; wait for all of them.

    Every line of output is passed on behind the worker's rank. As soon as one worker
    fails, or on an interrupt, the others and all their children are ended. After a
    failure all workers are started again, as often as `max_restarts` says: with the
    same ranks, on other ports, and with the number of the attempt, from 1, in the
    environment variable `TF_DGC_ATTEMPT`. Resuming is up to the command.

    Args:
        command: program and arguments, the same for every worker.
        num_workers: how many, at least 1.
        output: where the workers' lines go; default standard output.
        max_restarts: how often to start again.

    Returns:
        0, or the exit code of the first worker that failed in the last attempt; 128 + n
        if signal n ended it; 130 after an interrupt.
    """
    output = output or sys.stdout
    attempts = max_restarts + 1
    code = 0
    try:
        for attempt in range(1, attempts + 1):
            if attempt > 1:
                _say(output, f"attempt {attempt} of {attempts}: starting all "
                     f"{num_workers} workers again")  # fmt: skip
            code = _attempt(command, num_workers, output, attempt)
            if code == 0:
                break
    except KeyboardInterrupt:
        _say(output, "interrupted; ending all workers")
        return 128 + signal.SIGINT
    return code


def _attempt(
    command: Sequence[str], num_workers: int, output: TextIO, attempt: int
) -> int:
    """Run all workers once."""
    workers: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        with _interrupted_by(signal.SIGTERM, signal.SIGHUP):
            for rank, environment in enumerate(_environments(num_workers, attempt)):
                workers.append(_start(command, environment))
                readers.append(_stream(workers[-1], rank, output))
            return _wait(workers, output)
    finally:
        _end(workers)
        for reader in readers:
            reader.join(_GRACE_SECONDS)


def _environments(num_workers: int, attempt: int = 1) -> list[dict[str, str]]:
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(num_workers)]
    cluster = {"worker": addresses}
    tasks = [{"type": "worker", "index": rank} for rank in range(num_workers)]
    return [
        {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            ATTEMPT_VARIABLE: str(attempt),
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
        }
        for task in tasks
    ]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def _start(
    command: Sequence[str], environment: dict[str, str]
) -> "subprocess.Popen[str]":
    # A session of its own: Ctrl-C reaches the launcher alone, which ends the workers.
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _stream(
    worker: "subprocess.Popen[str]", rank: int, output: TextIO
) -> threading.Thread:
    def copy() -> None:
        assert worker.stdout is not None
        with worker.stdout as lines:
            for line in lines:
                output.write(f"[{rank}] {line.rstrip()}\n")
                output.flush()

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    return reader


def _wait(workers: Sequence["subprocess.Popen[str]"], output: TextIO) -> int:
    running = dict(enumerate(workers))
    while running:
        for rank, worker in list(running.items()):
            code = worker.poll()
            if code is None:
                continue
            del running[rank]
            if code:
                code = code if code > 0 else 128 - code
                _say(output, f"worker {rank} failed with exit code {code}; "
                     f"ending the other {len(running)} running")  # fmt: skip
                return code
        time.sleep(_POLL_SECONDS)
    return 0


def _end(workers: Sequence["subprocess.Popen[str]"]) -> None:
    """Terminate, then kill, the workers and everything they started.

    Every worker leads a process group, which also holds the children of a worker that
    is gone already.
    """
    groups = {worker.pid for worker in workers}
    deadline = time.monotonic() + _GRACE_SECONDS
    number: int = signal.SIGTERM
    # Bounded: an orphan that nobody reaps stays in its group although it is dead.
    while groups and time.monotonic() < deadline + _GRACE_SECONDS:
        groups = {group for group in groups if _signal_group(group, number)}
        for worker in workers:
            worker.poll()  # a child that was not waited for still counts as there
        number = signal.SIGKILL if time.monotonic() > deadline else 0
        time.sleep(_POLL_SECONDS)
    for worker in workers:
        worker.wait()


def _signal_group(group: int, number: int) -> bool:
    """Send a signal (0 sends none); return whether the group has any process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def _interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """Treat these signals like Ctrl-C within the context (main thread only)."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.signal(s, interrupt) for s in signals}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _say(output: TextIO, message: str) -> None:
    output.write(f"[tf-dgc] {message}\n")
    output.flush()
