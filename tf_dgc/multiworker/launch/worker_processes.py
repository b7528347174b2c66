"""Worker processes: how they are started, how they ended, and how all are ended.

Each worker leads a process group, which also holds what it started. It is waited for
only after the last signal to its group: until then its number belongs to nobody else.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

POLL_SECONDS = 0.05
CHILDREN_SECONDS = 2.0
_REAP_SECONDS = 10.0
_FAR_SECONDS = CHILDREN_SECONDS + 3.0  # for a far end to kill, and for ssh to say so


def start_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    message: bytes | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a worker, which is killed if this process ends before it.

    Args:
        command: program and arguments.
        environment: environment variables, all of them.
        output: file descriptor for its standard output and error.
        message: bytes of its standard input, which stays open until it is to end; None
            for no input.
    """
    first = pathlib.Path(__file__).with_name("worker_start.py")
    # A session of its own: Ctrl-C reaches the launcher alone, which passes it on.
    worker = subprocess.Popen(
        [sys.executable, "-I", "-S", str(first), str(os.getpid()), *command],
        env=environment,
        stdin=subprocess.DEVNULL if message is None else subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        bufsize=0,
    )
    if message is not None and worker.stdin:
        with contextlib.suppress(BrokenPipeError):  # its exit code says more
            worker.stdin.write(message)
    return worker


def exit_code(worker: "subprocess.Popen[bytes]") -> int | None:
    """Return a worker's exit code, 128 + n after signal n, or None while it runs."""
    if worker.returncode is not None:
        code = worker.returncode
        return code if code >= 0 else 128 - code
    what = os.WEXITED | os.WNOHANG | os.WNOWAIT
    ended = os.waitid(os.P_PID, worker.pid, what)
    if ended is None:
        return None
    signalled = ended.si_code != os.CLD_EXITED
    return ended.si_status + 128 * signalled


def end_processes(
    workers: Sequence["subprocess.Popen[bytes]"],
    seconds: float = 0.0,
    hurry: Callable[[], bool] = lambda: False,
) -> None:
    """End workers and what they started, and wait for them.

    Those that run get SIGINT, for Python a `KeyboardInterrupt`, which TensorFlow does
    not keep from the program as it does SIGTERM. Then every group gets SIGTERM, and at
    last SIGKILL. Those with an input are told there how many seconds they have, and
    that is its end: what they run far away is ended by that, with its children, before
    they end themselves.

    Args:
        workers: processes to be ended; those that were waited for already are left out.
        seconds: time from SIGINT to SIGTERM, unless all end before; 0 sends no SIGINT.
        hurry: function that is asked again and again; if it returns true, all are
            killed now.
    """
    left = [worker for worker in workers if worker.returncode is None]
    if seconds:
        for worker in left:
            if exit_code(worker) is None:
                _interrupt(worker, seconds)
        more = _FAR_SECONDS if any(worker.stdin for worker in left) else 0.0
        wait_until(
            lambda: hurry() or all(exit_code(w) is not None for w in left),
            seconds + more,
        )
    if not hurry():
        _signal(left, signal.SIGTERM)
        wait_until(lambda: hurry() or not any(map(_lives, left)), CHILDREN_SECONDS)
    _signal(left, signal.SIGKILL)
    for worker in left:
        # A process that the kernel does not let go of is left to the system.
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(_REAP_SECONDS)
    for worker in filter(lambda worker: worker.stdin, workers):
        worker.stdin.close()  # type: ignore[union-attr]


def _interrupt(worker: "subprocess.Popen[bytes]", seconds: float) -> None:
    if worker.stdin:
        with contextlib.suppress(BrokenPipeError):  # it is about to end
            worker.stdin.write(f"{seconds:g}\n".encode())
        worker.stdin.close()
    else:
        os.kill(worker.pid, signal.SIGINT)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds, for so many seconds at most; return it."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return holds


def _signal(workers: Sequence["subprocess.Popen[bytes]"], number: int) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, number)


def _lives(worker: "subprocess.Popen[bytes]") -> bool:
    """Whether a worker's group has a process that has not ended."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            in_group = os.getpgid(process.pid) == worker.pid
            if in_group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
