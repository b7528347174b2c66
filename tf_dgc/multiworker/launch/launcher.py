"""Start one process per worker, here or by ssh, and end all of them."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TextIO

from tf_dgc.multiworker.launch import onednn, remote, worker_processes
from tf_dgc.multiworker.launch.output import (
    Display,
    OutputReader,
    WorkerOutput,
    open_channel,
    open_log,
)
from tf_dgc.multiworker.launch.worker_processes import (
    CHILDREN_SECONDS,
    POLL_SECONDS,
    exit_code,
    wait_until,
)

PORT = 22360
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"
ATTEMPT_VARIABLE = "TF_DGC_ATTEMPT"
SECRET_VARIABLE = "TF_DGC_SECRET"

ALLOCATOR_SETTINGS = {
    "MALLOC_TOP_PAD_": str(128 * 2**20),  # more than a heap has: none is returned
    "MALLOC_TRIM_THRESHOLD_": str(2**40),  # nor is the end of one
}
"""Environment variables of glibc's allocator: keep memory that a step frees.

By default glibc returns whole heaps of a thread to the system as soon as they are free,
and TensorFlow's threads free nearly all of theirs in every step. The page faults of the
next step can then take a third of its time. Read when a process starts; ignored by
other allocators.
"""

_SERVE = (sys.executable, "-m", "tf_dgc", "serve")
_FORWARDED = ("TF_", "KERAS_", "PYTHON")  # variables that remote workers get
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SECONDS = 0.5  # a terminal and our parent may each forward one Ctrl-C
_INTERRUPT_SECONDS = 10.0  # for `except KeyboardInterrupt` in the program
_OWN_ERROR_SECONDS = 1.0  # for a worker to end with an error that names the failed one
_SURVIVOR_SECONDS = 2.0
_SERVER_SECONDS = 60.0  # for what a server writes when the workers have ended
_READ_SECONDS = 2.0  # for output that is left to read when all have ended
_SSH_BROKEN = 255  # ssh's exit code when its connection breaks
_SSH_KILLED = (-signal.SIGTERM, -signal.SIGKILL)  # of ssh itself, not of the worker
_MAX_ERROR_LENGTH = 300  # characters of an error in the last line
# An error of this package: an exception, or what a failed assertion of a step prints.
_OWN_ERROR = re.compile(r"tf_dgc: (.*)|\[tf_dgc:\] \[(.*?)\](?= \[Op:|$)")
_SENTENCE_END = re.compile(r"\.\s+(?=[A-Z`])")
# In the error of a worker, written by `tf_dgc.multiworker.failures`.
_ENDED_BY = re.compile(r"cannot go on: worker (\d+) \(\S+\) ended with ")


class Hosts(NamedTuple):
    """Machines that workers are started on."""

    names: Sequence[str]  # one per worker; "user@host" is for ssh alone
    port: int = PORT  # first port that the workers of a host listen on
    ssh: str = SSH  # command that is followed by a host and what to run there


def launch(
    command: Sequence[str],
    num_workers: int,
    output: TextIO | None = None,
    max_restarts: int = 0,
    show_all: bool = False,
    log_dir: str | None = None,
    num_servers: int = 0,
    hosts: Hosts | None = None,
) -> int:
    """Run `command` once per worker with `TF_CONFIG` set; return the exit code."""
    # When a worker fails, or on an interrupt, the others get SIGINT; those alive 2 s
    # later (10 s after an interrupt) are ended with all their children. A second
    # interrupt kills all, those on other machines 10 s after the first. After a failure
    # all start again, up to `max_restarts` times, on other ports, with `TF_DGC_ATTEMPT`
    # set to the number of the attempt. The code is that of the first worker that failed
    # in the last attempt; 128 + n if signal n ended it; 130 after an interrupt. A
    # temporary `log_dir` is kept on failure.
    stream = output or sys.stdout
    if log_dir is not None:
        os.makedirs(log_dir, exist_ok=True)
    logs = pathlib.Path(log_dir or tempfile.mkdtemp(prefix="tf-dgc-"))
    with Interrupts() as interrupts:
        display = Display(stream)
        if advice := onednn.advice():
            display.say(advice)
        run = _Run(
            command=command,
            num_workers=num_workers,
            num_servers=num_servers,
            hosts=hosts,
            stream=stream,
            display=display,
            show_all=show_all,
            logs=logs,
            interrupts=interrupts,
        )
        result = _run_attempts(run, max_restarts + 1)
    if result.code:
        display.say(f"{result.reason}; all that the workers printed is in {logs}")
    elif log_dir is None:
        shutil.rmtree(logs, ignore_errors=True)
    return result.code


class Start(NamedTuple):
    """How a process is started."""

    command: Sequence[str]
    environment: Mapping[str, str]
    message: bytes | None = None  # standard input, then left open; None for no input


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP that are not ignored (main thread only)."""

    def __init__(self) -> None:
        self.count = 0
        self._last = 0.0
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._count_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last > _SAME_SECONDS:
            self.count += 1
            self._last = now  # only of those counted, so that a long burst counts too


@dataclasses.dataclass(frozen=True)
class _Run:
    """The processes to start, workers before servers, and where output goes."""

    command: Sequence[str]
    num_workers: int
    num_servers: int
    hosts: Hosts | None
    stream: TextIO  # written by `display`
    display: Display
    show_all: bool
    logs: pathlib.Path  # directory with a file per process
    interrupts: Interrupts

    def starts(self, attempt: int) -> contextlib.AbstractContextManager[list[Start]]:
        """Return a context that yields how each process of an attempt is started."""
        if self.hosts is not None:
            return remote_starts(self.command, self.hosts, attempt)
        return local_starts(self.command, self.num_workers, self.num_servers, attempt)

    def name(self, number: int) -> str:
        """Return the name of a process."""
        if number < self.num_workers:
            return f"worker {number}"
        return f"server {number - self.num_workers}"

    def rank(self, number: int) -> int | None:
        """Return the rank of a worker, None for a server."""
        return number if number < self.num_workers else None

    def create_output(self, number: int, attempt: int) -> WorkerOutput:
        """Return what takes the output of a process."""
        log = open_log(self.logs, self.name(number), attempt)
        if self.show_all:
            rank = self.rank(number)
            return WorkerOutput(log, lambda line: self.display.ranked(rank, line))
        if number > 0:
            return WorkerOutput(log)
        if self.display.terminal:
            return WorkerOutput(log, pass_on=self.display.write)
        return WorkerOutput(log, show=self.display.line)


class AttemptResult(NamedTuple):
    """The exit code of an attempt, and if it is not 0, the reason and what to do."""

    code: int
    reason: str = ""


def _run_attempts(run: _Run, num_attempts: int) -> AttemptResult:
    result = AttemptResult(0)
    for attempt in range(1, num_attempts + 1):
        if attempt > 1:
            run.display.say(
                f"attempt {attempt} of {num_attempts}: starting all "
                f"{run.num_workers} workers again"
            )
        result = _run_attempt(run, attempt, is_last=attempt == num_attempts)
        if result.code == 0 or run.interrupts.count:
            break
    return result


def _run_attempt(run: _Run, attempt: int, is_last: bool) -> AttemptResult:
    interrupts = run.interrupts
    outputs = [
        run.create_output(number, attempt)
        for number in range(run.num_workers + run.num_servers)
    ]
    processes: list[subprocess.Popen[bytes]] = []
    reader = OutputReader()
    failed = None
    try:
        with run.starts(attempt) as starts:
            for number, start in enumerate(starts):
                processes.append(_start(run, number, start, reader, outputs[number]))
            reader.start()
            failed = _wait(run, processes)
    finally:
        if failed is not None or interrupts.count:
            for output in outputs:
                output.leave_out_interrupts(run.display.line)
        seconds = _INTERRUPT_SECONDS if interrupts.count else _SURVIVOR_SECONDS
        worker_processes.end_processes(processes, seconds, lambda: interrupts.count > 1)
        reader.stop(_READ_SECONDS)
    if failed is not None:
        _show_last_output(run, failed, outputs)
        if not is_last:
            wait_for_remote_workers(
                {run.name(number): process for number, process in enumerate(processes)},
                run.display.say,
                lambda: interrupts.count > 0,
            )
    if interrupts.count:
        return AttemptResult(128 + signal.SIGINT, "interrupted")
    if failed is None:
        return AttemptResult(0)
    code = processes[failed].returncode
    reason = _reason(run.name(failed), code, outputs[failed].last_error(code))
    return AttemptResult(exit_code(processes[failed]) or 0, reason)


def _start(
    run: _Run, number: int, start: Start, reader: OutputReader, output: WorkerOutput
) -> subprocess.Popen[bytes]:
    as_terminal = number == 0 and run.display.terminal and not run.show_all
    read, write = open_channel(run.stream if as_terminal else None)
    reader.add(output, read)
    try:
        return worker_processes.start_process(
            start.command, start.environment, write, start.message
        )
    finally:
        os.close(write)


def _wait(run: _Run, processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all processes end, or an interrupt; return the first that failed."""
    # Servers end when the workers have left them. They may notice late, for example
    # while they write, and are ended if the workers never came.
    running = dict(enumerate(processes))
    while min(running, default=run.num_workers) < run.num_workers:
        if run.interrupts.count:
            break
        for number, process in list(running.items()):
            code = exit_code(process)
            if code is None:
                continue
            del running[number]
            if code:
                run.display.say(
                    f"{run.name(number)} failed with exit code {code}; ending the "
                    f"other {len(running)} running"
                )
                wait_until(
                    lambda: run.interrupts.count > 0 or _have_ended(running.values()),
                    _OWN_ERROR_SECONDS,
                )
                return number
        time.sleep(POLL_SECONDS)
    if running and not run.interrupts.count:
        _wait_for_servers(run, running)
    if run.interrupts.count and running:
        run.display.say(
            "interrupted: every worker gets KeyboardInterrupt, and has "
            f"{_INTERRUPT_SECONDS:g} s to end; interrupt again to kill them at once"
        )
    return None


def _wait_for_servers(run: _Run, servers: dict[int, subprocess.Popen[bytes]]) -> None:
    def done() -> bool:
        return run.interrupts.count > 0 or _have_ended(servers.values())

    if not wait_until(done, _SURVIVOR_SECONDS):
        run.display.say(
            "all workers have ended; the server has "
            f"{_SERVER_SECONDS:g} s to end, too; interrupt to end it now"
        )
        wait_until(done, _SERVER_SECONDS)
    for number, server in servers.items():
        if code := exit_code(server):
            run.display.say(f"{run.name(number)} ended with exit code {code}")


def _have_ended(processes: Iterable[subprocess.Popen[bytes]]) -> bool:
    return all(exit_code(process) is not None for process in processes)


def wait_for_remote_workers(
    workers: Mapping[str, subprocess.Popen[bytes]],
    say: Callable[[str], None],
    hurry: Callable[[], bool],
) -> None:
    """Wait for remote workers whose ssh ended before them; `hurry` ends the wait."""
    # Their input has ended too, after which they have a limited time. If an ssh did not
    # end in time and was killed, its worker's state is unknown.
    codes = {name: w.returncode for name, w in workers.items() if w.stdin}
    for name in [name for name, code in codes.items() if code in _SSH_KILLED]:
        say(f"{name} may still run: its machine did not report that it ended")
    broken = [name for name, code in codes.items() if code == _SSH_BROKEN]
    if broken:
        seconds = remote.INTERRUPT_SECONDS + CHILDREN_SECONDS
        names = " and ".join(broken)
        say(f"waiting {seconds:g} s for {names} to end, if only the connection broke")
        wait_until(hurry, seconds)


def _show_last_output(run: _Run, failed: int, outputs: Sequence[WorkerOutput]) -> None:
    """Show what a worker that failed printed last, unless it was shown already."""
    # If another worker's error ended this one, show that worker's output first: it
    # reports to the others before it ends, and so may end after them.
    numbers = [failed]
    if match := _ENDED_BY.search(outputs[failed].last_error(1)):
        numbers.insert(0, int(match.group(1)))
    for number in numbers:
        if lines := outputs[number].unseen():
            run.display.say(f"{run.name(number)} printed last:")
            for line in lines:
                run.display.ranked(run.rank(number), line)


def _reason(name: str, code: int, last_error: str) -> str:
    """Return how a process ended, and what to do; `code` is -n after signal n."""
    if code == -signal.SIGKILL:
        return (
            f"{name} was killed (SIGKILL) by a user, or by the system because memory "
            "ran out (`dmesg` shows whether it did). Start all workers again, from the "
            "last backup if there is one (`--max-restarts` does both)"
        )
    if code < 0:
        return (
            f"{name} was ended by signal {-code} ({signal.strsignal(-code)}). Look at "
            "the end of its log, and start all workers again"
        )
    text = f"{name} ended with exit code {code}"
    if not last_error:
        return f"{text}. Look at the end of its log, and start all workers again"
    return f"{text}: {_shorten(last_error)} Fix that and start all workers again"


def _shorten(error: str) -> str:
    """Return the first sentence of an error of tf_dgc, or what fits of another one."""
    if match := _OWN_ERROR.search(error):
        text = match.group(1) or match.group(2).replace("] [", " ")
        error = f"tf_dgc: {_SENTENCE_END.split(text, maxsplit=1)[0]}"
    error = error.rstrip(".:")
    if len(error) <= _MAX_ERROR_LENGTH:
        return f"{error}."
    return f"{error[:_MAX_ERROR_LENGTH].rsplit(maxsplit=1)[0]} ..."


# How each process is started


@contextlib.contextmanager
def local_starts(
    command: Sequence[str], num_workers: int, num_servers: int, attempt: int
) -> Iterator[list[Start]]:
    """Yield the starts of workers on this machine, followed by those of servers."""
    with reserved_ports(num_workers + num_servers) as ports:
        environments = worker_environments(ports, attempt, num_servers)
        commands = [command] * num_workers + [_SERVE] * num_servers
        yield list(map(Start, commands, environments))


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Yield ports that no other process is given within the context."""
    # Workers can listen on them: TensorFlow's servers set `SO_REUSEADDR`, with which a
    # port may be bound again while nobody listens on it.
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", 0))
        yield [s.getsockname()[1] for s in sockets]


def free_ports(count: int) -> list[int]:
    """Return ports that are free now; other processes may take them later."""
    with reserved_ports(count) as ports:
        return ports


def worker_environments(
    ports: Sequence[int], attempt: int = 1, num_servers: int = 0
) -> list[dict[str, str]]:
    """Return the environment of every worker, then of servers, which share a secret."""
    addresses = [f"127.0.0.1:{port}" for port in ports]
    num_workers = len(ports) - num_servers
    cluster = {"worker": addresses[:num_workers]}
    tasks = [{"type": "worker", "index": rank} for rank in range(num_workers)]
    secret = {}
    if num_servers:
        cluster["ps"] = addresses[num_workers:]
        tasks += [{"type": "ps", "index": index} for index in range(num_servers)]
        secret[SECRET_VARIABLE] = secrets.token_hex(16)
    return [
        {
            "PYTHONIOENCODING": "utf-8",
            "PYTHONUNBUFFERED": "1",
            **ALLOCATOR_SETTINGS,
            **secret,
            **os.environ,  # variables that the user has set stay as they are
            ATTEMPT_VARIABLE: str(attempt),
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
        }
        for task in tasks
    ]


@contextlib.contextmanager
def remote_starts(
    command: Sequence[str], hosts: Hosts, attempt: int
) -> Iterator[list[Start]]:
    """Yield the starts of workers on other machines, each by an ssh that stays."""
    # ssh runs `tf-dgc remote` there, which reads from its standard input what to run,
    # and ends that when its input is closed. Directory and Python have the same paths
    # there.
    addresses = _remote_addresses(hosts, attempt)
    command_there = remote_python(["-m", "tf_dgc", "remote"])
    yield [
        Start(
            [*shlex.split(hosts.ssh), ssh_name(name), command_there],
            os.environ,
            _remote_message(command, addresses, rank, attempt),
        )
        for rank, name in enumerate(hosts.names)
    ]


def last_port(hosts: Hosts, num_attempts: int) -> int:
    """Return the last port that workers on hosts may listen on."""
    return hosts.port + num_attempts * _max_workers_per_host(hosts) - 1


def _remote_addresses(hosts: Hosts, attempt: int) -> list[str]:
    first_port = hosts.port + (attempt - 1) * _max_workers_per_host(hosts)
    num_workers: Counter[str] = Counter()
    addresses = []
    for host in map(_host, hosts.names):
        addresses.append(f"{host}:{first_port + num_workers[host]}")
        num_workers[host] += 1
    return addresses


def _max_workers_per_host(hosts: Hosts) -> int:
    return max(Counter(map(_host, hosts.names)).values())


def _host(name: str) -> str:
    return name.rpartition("@")[2]


def ssh_name(name: str) -> str:
    """Return what ssh takes as the name of a host: without brackets."""
    user, at, host = name.rpartition("@")
    return user + at + host.removeprefix("[").removesuffix("]")


def remote_python(arguments: Sequence[str]) -> str:
    """Return what the shell on another machine runs, in its initial directory."""
    path = _python_path()
    variables = ["env", f"PYTHONPATH={path}"] if path else []
    return "exec " + shlex.join([*variables, sys.executable, *arguments])


def _python_path() -> str:
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(os.path.abspath(path) for path in paths if path)


def _remote_message(
    command: Sequence[str], addresses: Sequence[str], rank: int, attempt: int
) -> bytes:
    forwarded = {k: v for k, v in os.environ.items() if k.startswith(_FORWARDED)}
    if path := _python_path():
        forwarded["PYTHONPATH"] = path
    task = {"type": "worker", "index": rank}
    environment = {
        "PYTHONIOENCODING": "utf-8",
        "PYTHONUNBUFFERED": "1",
        **forwarded,
        ATTEMPT_VARIABLE: str(attempt),
        "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}),
    }
    message = {
        "command": list(command),
        "directory": os.getcwd(),
        "environment": environment,
        "defaults": ALLOCATOR_SETTINGS,
    }
    return json.dumps(message).encode() + b"\n"
