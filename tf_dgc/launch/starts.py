"""Starts: what each process of a run is started with, here or on other machines."""

import contextlib
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tf_dgc.launch import allocator, loopback

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
def here(
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
    with loopback.held_ports(number) as ports:
        found = loopback.environments(ports, attempt, num_servers)
        commands = [command] * num_workers + [_SERVE] * num_servers
        yield list(map(Start, commands, found))


@contextlib.contextmanager
def on_hosts(
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
        loopback.ATTEMPT_VARIABLE: str(attempt),
        "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}),
    }
    told = {
        "command": list(command),
        "directory": os.getcwd(),
        "environment": environment,
        "defaults": allocator.SETTINGS,
    }
    return json.dumps(told).encode() + b"\n"
