"""Start one process per worker, here or by ssh, and end all of them."""

import contextlib
import functools
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

from tf_dgc.multiworker.launch import onednn, ssh, worker_processes
from tf_dgc.multiworker.launch.output import (
    Display,
    OutputReader,
    WorkerOutput,
    open_channel,
    open_log,
)
from tf_dgc.multiworker.launch.worker_processes import (
    POLL_SECONDS,
    exit_code,
    wait_until,
)

# --- glibc's allocator: memory that a step gives back is kept for the next step.
#
# By default glibc gives whole heaps of a thread back to the system as soon as they are
# free, and TensorFlow's threads free nearly all of theirs in every step. Where that
# happens, a step of ResNet50 has 60,000 page faults and takes 1.5 times as long.

ALLOCATOR_SETTINGS = {
    "MALLOC_TOP_PAD_": str(128 * 2**20),  # more than a heap has: none is given back
    "MALLOC_TRIM_THRESHOLD_": str(2**40),  # nor is the end of one
}
"""Environment variables, read when a process starts; other allocators ignore them."""


# --- A cluster on this machine: ports, and what every worker finds in its environment.

ATTEMPT_VARIABLE = "TF_DGC_ATTEMPT"
SECRET_VARIABLE = "TF_DGC_SECRET"


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Yield ports that nobody else is given within the context.

    Workers can listen on them nevertheless: TensorFlow's servers set `SO_REUSEADDR`,
    with which a port may be bound again while nobody listens on it.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", 0))
        yield [s.getsockname()[1] for s in sockets]


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, of which each may be taken soon."""
    with reserved_ports(count) as ports:
        return ports


def worker_environments(
    ports: Sequence[int], attempt: int = 1, num_servers: int = 0
) -> list[dict[str, str]]:
    """Return the environment variables of every worker; behind them, of the servers.

    Servers share a secret with the workers, by which they know them.

    Args:
        ports: port of each, on 127.0.0.1.
        attempt: number of times that the workers have been started, from 1.
        num_servers: number of those that are servers, the last ones.
    """
    addresses = [f"127.0.0.1:{port}" for port in ports]
    number = len(ports) - num_servers
    cluster = {"worker": addresses[:number]}
    tasks = [{"type": "worker", "index": rank} for rank in range(number)]
    shared = {}
    if num_servers:
        cluster["ps"] = addresses[number:]
        tasks += [{"type": "ps", "index": place} for place in range(num_servers)]
        shared[SECRET_VARIABLE] = secrets.token_hex(16)
    return [
        {
            "PYTHONIOENCODING": "utf-8",
            "PYTHONUNBUFFERED": "1",
            **ALLOCATOR_SETTINGS,
            **shared,
            **os.environ,  # what the user has set is left as it is
            ATTEMPT_VARIABLE: str(attempt),
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
        }
        for task in tasks
    ]


# --- Starts: what each process of a run is started with, here or on other machines.

PORT = 22360
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"
_SERVE = (sys.executable, "-m", "tf_dgc", "serve")
_PASSED_ON = ("TF_", "KERAS_", "PYTHON")


class Start(NamedTuple):
    """How a process is started.

    Attributes:
        command: program and arguments.
        environment: environment variables, all of them.
        message: bytes of its standard input, which is then left open; None for no
            input.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    message: bytes | None = None


class Hosts(NamedTuple):
    """Machines that workers are started on.

    Attributes:
        names: host of each worker, as ssh and the other workers find it; "user@host"
            is for ssh alone. One that is named twice has two workers.
        port: first port that the workers of a host listen on.
        ssh: command that is followed by a host and what to run there.
    """

    names: Sequence[str]
    port: int = PORT
    ssh: str = SSH


@contextlib.contextmanager
def local_starts(
    command: Sequence[str], num_workers: int, num_servers: int, attempt: int
) -> Iterator[list[Start]]:
    """Yield the starts of workers on this machine; behind them, of servers.

    Args:
        command: program and arguments of every worker.
        num_workers: number of workers.
        num_servers: number of servers, which are workers' commands of their own.
        attempt: number of times that the workers have been started, from 1.
    """
    number = num_workers + num_servers
    with reserved_ports(number) as ports:
        found = worker_environments(ports, attempt, num_servers)
        commands = [command] * num_workers + [_SERVE] * num_servers
        yield list(map(Start, commands, found))


@contextlib.contextmanager
def remote_starts(
    command: Sequence[str], hosts: Hosts, attempt: int
) -> Iterator[list[Start]]:
    """Yield the starts of workers on other machines, each by an ssh that stays.

    There `tf-dgc remote` is told by its standard input what to run, and ends it when
    that is closed. Directory and Python are to have the same paths as here.

    Args:
        command: program and arguments of every worker.
        hosts: hosts of the workers.
        attempt: number of times that the workers have been started, from 1.
    """
    addresses = _addresses(hosts, attempt)
    yield [
        Start(
            [*shlex.split(hosts.ssh), _for_ssh(name), _over_there()],
            os.environ,
            _message(command, addresses, rank, attempt),
        )
        for rank, name in enumerate(hosts.names)
    ]


def _addresses(hosts: Hosts, attempt: int) -> list[str]:
    """Return addresses of which no attempt has those of the one before."""
    before: Counter[str] = Counter()
    first = hosts.port + (attempt - 1) * _most_workers(hosts)
    found = []
    for host in map(_host, hosts.names):
        found.append(f"{host}:{first + before[host]}")
        before[host] += 1
    return found


def last_port(hosts: Hosts, num_attempts: int) -> int:
    """Return the last port that workers on hosts may be told to listen on."""
    return hosts.port + num_attempts * _most_workers(hosts) - 1


def _most_workers(hosts: Hosts) -> int:
    return max(Counter(map(_host, hosts.names)).values())


def _host(name: str) -> str:
    return name.rpartition("@")[2]


def _for_ssh(name: str) -> str:
    """Return what ssh calls a host, of which an address has no brackets."""
    user, at, host = name.rpartition("@")
    return user + at + host.removeprefix("[").removesuffix("]")


def _over_there() -> str:
    """Return what a shell on another machine runs, in another directory at first."""
    path = _python_path()
    given = ["env", f"PYTHONPATH={path}"] if path else []
    return "exec " + shlex.join([*given, sys.executable, "-m", "tf_dgc", "remote"])


def _python_path() -> str:
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(os.path.abspath(part) for part in parts if part)


def _message(
    command: Sequence[str], addresses: Sequence[str], rank: int, attempt: int
) -> bytes:
    task = {"type": "worker", "index": rank}
    passed = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
    if path := _python_path():
        passed["PYTHONPATH"] = path
    environment = {
        "PYTHONIOENCODING": "utf-8",
        "PYTHONUNBUFFERED": "1",
        **passed,
        ATTEMPT_VARIABLE: str(attempt),
        "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}),
    }
    told = {
        "command": list(command),
        "directory": os.getcwd(),
        "environment": environment,
        "defaults": ALLOCATOR_SETTINGS,
    }
    return json.dumps(told).encode() + b"\n"


# --- Interrupts of the launcher: noted, and acted upon where it suits.

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SECONDS = 0.5  # a terminal, and who started us, may pass on one Ctrl-C each


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP within its context (main thread only).

    No exception comes out of them, so that nothing is left half done. What is ignored
    already, as SIGHUP is by `nohup`, stays ignored.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last > _SAME_SECONDS:
            self.count += 1
            self._last = now  # not of one more: who goes on and on is heard


_INTERRUPT_SECONDS = 10.0  # for `except KeyboardInterrupt` in the program
_OWN_WORDS_SECONDS = 1.0  # for a worker to end with an error that names the failed one
_SURVIVOR_SECONDS = 2.0
_SERVER_SECONDS = 60.0  # for what a server writes when the workers have ended
_LONGEST_ERROR = 300  # characters of an error in the last line
# In the error of a worker, which `tf_dgc.cluster.failures` words.
_ENDED_BY = re.compile(r"cannot go on: worker (\d+) \(\S+\) ended with ")
_READ_SECONDS = 2.0  # for what is left to read when all have ended


class Run(NamedTuple):
    """What is run, and where what it prints goes.

    `logs` is the directory with a file per worker; `stream` is where lines are shown,
    by `shown`, of the first worker or of all. Places are those of all processes, the
    workers' ranks first. `starts` is asked for those of an attempt, by its number.
    """

    starts: Callable[[int], contextlib.AbstractContextManager[list[Start]]]
    num_workers: int
    num_servers: int
    stream: TextIO
    shown: Display
    show_all: bool
    logs: pathlib.Path
    interrupts: Interrupts

    def name(self, place: int) -> str:
        """Return the name of a process."""
        if place < self.num_workers:
            return f"worker {place}"
        return f"server {place - self.num_workers}"

    def rank(self, place: int) -> int | None:
        """Return the rank of a worker, None of a server."""
        return place if place < self.num_workers else None


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
    """Run `command` once per worker with `TF_CONFIG` set; wait for all of them.

    What the first worker's program prints is passed on, without TensorFlow's C++ log.
    All that a worker prints is in `worker-RANK.log`, of which the end is shown when
    that worker fails. As soon as one fails, or on an interrupt, the others get SIGINT,
    which Python raises as `KeyboardInterrupt`; those that have not ended 2 s later, or
    10 s after an interrupt, are ended with all their children. On a second interrupt
    all are killed; on other machines those 10 s after the first. After a failure all
    workers are started again, as often as `max_restarts` says: with the same ranks, on
    other ports, and with the number of the attempt, from 1, in the environment variable
    `TF_DGC_ATTEMPT`. Resuming is up to the command.

    Args:
        command: program and arguments, the same for every worker.
        num_workers: number of processes, at least 1.
        output: stream for the workers' lines; default standard output. If it is a
            terminal, so is the first worker's output, progress bars and colours
            included; otherwise a line is passed on when it is finished.
        max_restarts: number of times to start again, 0 or more.
        show_all: whether to pass on the lines of all workers, each behind its rank.
        log_dir: directory for the workers' files, made if missing; default a temporary
            one, which is named and kept if the exit code is not 0.
        num_servers: number of parameter servers, 0 or more, which start and are ended
            with the workers, by `tf-dgc serve`.
        hosts: hosts that the workers are started on, one each, without servers; None
            for this machine.

    Returns:
        0, or the exit code of the first worker that failed in the last attempt; 128 + n
        if signal n ended it; 130 after an interrupt (SIGINT, SIGTERM or SIGHUP, unless
        ignored).

    Raises:
        OSError: if `log_dir` cannot be made.
    """
    stream = output or sys.stdout
    if log_dir is not None:
        os.makedirs(log_dir, exist_ok=True)
    logs = pathlib.Path(log_dir or tempfile.mkdtemp(prefix="tf-dgc-"))
    with Interrupts() as interrupts:
        shown = Display(stream)
        if advice := onednn.advice():
            shown.say(advice)
        start = functools.partial(local_starts, command, num_workers, num_servers)
        if hosts is not None:
            start = functools.partial(remote_starts, command, hosts)
        code, reason = _attempts(
            Run(
                start,
                num_workers,
                num_servers,
                stream,
                shown,
                show_all,
                logs,
                interrupts,
            ),
            max_restarts + 1,
        )
    if code:
        shown.say(f"{reason}; all that the workers printed is in {logs}")
    elif log_dir is None:
        shutil.rmtree(logs, ignore_errors=True)
    return code


class Outcome(NamedTuple):
    """The exit code of an attempt, and if it is not 0, the reason and what to do."""

    code: int
    reason: str = ""


def _attempts(run: Run, attempts: int) -> Outcome:
    """Run all workers until none fails."""
    outcome = Outcome(0)
    for attempt in range(1, attempts + 1):
        if attempt > 1:
            run.shown.say(f"attempt {attempt} of {attempts}: starting all "
                          f"{run.num_workers} workers again")  # fmt: skip
        outcome = _attempt(run, attempt, attempt == attempts)
        if outcome.code == 0 or run.interrupts.count:
            break
    return outcome


def _attempt(run: Run, attempt: int, is_last: bool) -> Outcome:
    """Run all workers once."""
    interrupts = run.interrupts
    number = run.num_workers + run.num_servers
    outputs = [_output(run, place, attempt) for place in range(number)]
    workers: list[subprocess.Popen[bytes]] = []
    reader = OutputReader()
    failed = None
    try:
        with run.starts(attempt) as found:
            for place, start in enumerate(found):
                workers.append(_start(run, place, start, reader, outputs[place]))
            reader.start()
            failed = _wait(run, workers)
    finally:
        if failed is not None or interrupts.count:
            for output in outputs:
                output.leave_out_interrupts(run.shown.line)
        seconds = _INTERRUPT_SECONDS if interrupts.count else _SURVIVOR_SECONDS
        worker_processes.end_processes(workers, seconds, lambda: interrupts.count > 1)
        reader.stop(_READ_SECONDS)
    if failed is not None:
        _show_ends(run, failed, outputs)
        if not is_last:
            named = {run.name(place): worker for place, worker in enumerate(workers)}
            ssh.wait_for_remote_workers(
                named, run.shown.say, lambda: interrupts.count > 0
            )
    if interrupts.count:
        return Outcome(128 + signal.SIGINT, "interrupted")
    if failed is None:
        return Outcome(0)
    code = workers[failed].returncode
    reason = _reason(run.name(failed), code, outputs[failed].last_error(code))
    return Outcome(exit_code(workers[failed]) or 0, reason)


def _reason(name: str, code: int, last_error: str) -> str:
    """Return how a process ended, and what to do now.

    Args:
        name: name of the process.
        code: exit code, or -n after signal n.
        last_error: error that it printed last, or "".
    """
    if code == -signal.SIGKILL:
        return (
            f"{name} was killed (SIGKILL): by somebody, or by the system because "
            "memory ran out, which `dmesg` tells. Start all workers again, from the "
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
    if len(last_error) > _LONGEST_ERROR:
        last_error = f"{last_error[:_LONGEST_ERROR]} ..."
    return f"{text}: {last_error.rstrip('.:')}. Fix that and start all workers again"


def _output(run: Run, place: int, attempt: int) -> WorkerOutput:
    log = open_log(run.logs, run.name(place), attempt)
    if run.show_all:
        show = functools.partial(run.shown.ranked, run.rank(place))
        return WorkerOutput(log, show=show)
    if place > 0:
        return WorkerOutput(log)
    if run.shown.terminal:
        return WorkerOutput(log, pass_on=run.shown.write)
    return WorkerOutput(log, show=run.shown.line)


def _start(
    run: Run,
    place: int,
    start: Start,
    reader: OutputReader,
    output: WorkerOutput,
) -> "subprocess.Popen[bytes]":
    as_terminal = place == 0 and run.shown.terminal and not run.show_all
    read, write = open_channel(run.stream if as_terminal else None)
    reader.add(output, read)
    try:
        return worker_processes.start_process(
            start.command, start.environment, write, start.message
        )
    finally:
        os.close(write)


def _wait(run: Run, workers: Sequence["subprocess.Popen[bytes]"]) -> int | None:
    """Wait until all workers end, or one fails; return which. Or until an interrupt.

    A server ends by itself when the workers have left it, which it may hear of late, as
    while it writes; and it is ended if they never came.
    """
    running = dict(enumerate(workers))
    while min(running, default=run.num_workers) < run.num_workers:
        if run.interrupts.count:
            break
        for place, worker in list(running.items()):
            code = exit_code(worker)
            if code is None:
                continue
            del running[place]
            if code:
                run.shown.say(f"{run.name(place)} failed with exit code {code}; "
                              f"ending the other {len(running)} running")  # fmt: skip
                wait_until(
                    lambda: run.interrupts.count > 0 or _have_ended(running.values()),
                    _OWN_WORDS_SECONDS,
                )
                return place
        time.sleep(POLL_SECONDS)
    if running and not run.interrupts.count:
        _wait_for_servers(run, running)
    if run.interrupts.count and running:
        run.shown.say(
            "interrupted: every worker gets KeyboardInterrupt, and has "
            f"{_INTERRUPT_SECONDS:g} s to end; interrupt again to kill them at once"
        )
    return None


def _wait_for_servers(run: Run, servers: dict[int, "subprocess.Popen[bytes]"]) -> None:
    def done() -> bool:
        return run.interrupts.count > 0 or _have_ended(servers.values())

    if not wait_until(done, _SURVIVOR_SECONDS):
        run.shown.say(
            "all workers have ended; the server has "
            f"{_SERVER_SECONDS:g} s to end, too; interrupt to end it now"
        )
        wait_until(done, _SERVER_SECONDS)
    for place, server in servers.items():
        if code := exit_code(server):
            run.shown.say(f"{run.name(place)} ended with exit code {code}")


def _have_ended(workers: Iterable["subprocess.Popen[bytes]"]) -> bool:
    return all(exit_code(worker) is not None for worker in workers)


def _show_ends(run: Run, failed: int, outputs: Sequence[WorkerOutput]) -> None:
    """Show what a worker that failed printed last, unless it was shown already.

    Before it the same of the worker whose error ended it: that one tells the others
    first, and may end after them.
    """
    places = [failed]
    if found := _ENDED_BY.search(outputs[failed].last_error(1)):
        places.insert(0, int(found.group(1)))
    for place in places:
        if lines := outputs[place].unseen():
            run.shown.say(f"{run.name(place)} printed last:")
            for line in lines:
                run.shown.ranked(run.rank(place), line)
