"""Start worker processes, read their exit codes, and end them.

Each worker leads a process group, which contains its children. It is waited for only
after the last signal to its group, because until then its PID cannot be reused.
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
_REMOTE_SECONDS = CHILDREN_SECONDS + 3.0  # for `tf-dgc remote` to kill, and ssh to end


def start_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    message: bytes | None = None,
) -> subprocess.Popen[bytes]:
    """Start a worker, which is killed if this process ends before it."""
    # `message` is its standard input, which then stays open; None for no input.
    wrapper = pathlib.Path(__file__).with_name("worker_start.py")
    # A session of its own: Ctrl-C reaches only the launcher, which forwards it.
    worker = subprocess.Popen(
        [sys.executable, "-I", "-S", str(wrapper), str(os.getpid()), *command],
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


def exit_code(worker: subprocess.Popen[bytes]) -> int | None:
    """Return a worker's exit code, 128 + n after signal n, or None while it runs."""
    if worker.returncode is not None:
        code = worker.returncode
        return code if code >= 0 else 128 - code
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    state = os.waitid(os.P_PID, worker.pid, options)
    if state is None:
        return None
    return state.si_status + 128 * (state.si_code != os.CLD_EXITED)


def end_processes(
    workers: Sequence[subprocess.Popen[bytes]],
    seconds: float = 0.0,
    hurry: Callable[[], bool] = lambda: False,
) -> None:
    """End workers and their children, and wait for them; `hurry` kills all at once."""
    # Running workers get SIGINT, which TensorFlow does not hide from the program as it
    # does SIGTERM; after `seconds` (0: no SIGINT) every group gets SIGTERM, finally
    # SIGKILL. A worker with an input is remote: it reads there how many seconds it has;
    # `tf-dgc remote` then ends the program and its children before it ends itself.
    running = [worker for worker in workers if worker.returncode is None]
    if seconds:
        for worker in running:
            if exit_code(worker) is None:
                _interrupt(worker, seconds)
        extra = _REMOTE_SECONDS if any(worker.stdin for worker in running) else 0.0
        wait_until(
            lambda: hurry() or all(exit_code(w) is not None for w in running),
            seconds + extra,
        )
    if not hurry():
        _signal(running, signal.SIGTERM)
        wait_until(
            lambda: hurry() or not any(map(_is_alive, running)), CHILDREN_SECONDS
        )
    _signal(running, signal.SIGKILL)
    for worker in running:
        # A process that the kernel cannot end yet is left to the system.
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(_REAP_SECONDS)
    for worker in workers:
        if worker.stdin:
            worker.stdin.close()


def _interrupt(worker: subprocess.Popen[bytes], seconds: float) -> None:
    if worker.stdin:
        with contextlib.suppress(BrokenPipeError):  # it is about to end
            worker.stdin.write(f"{seconds:g}\n".encode())
        worker.stdin.close()
    else:
        os.kill(worker.pid, signal.SIGINT)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds, at most so many seconds; return it."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return holds


def _signal(workers: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, number)


def _is_alive(worker: subprocess.Popen[bytes]) -> bool:
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            in_group = os.getpgid(process.pid) == worker.pid
            if in_group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
