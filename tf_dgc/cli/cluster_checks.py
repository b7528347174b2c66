"""Checks of `TF_CONFIG`, and of machines that `tf-dgc run --hosts` would use."""

import dataclasses
import errno
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import tensorflow as tf

from tf_dgc.multiworker import tf_config
from tf_dgc.multiworker.launch import launcher

_CONNECT_SECONDS = 2.0  # to a task of TF_CONFIG, which may not have started
_COMMAND_SECONDS = 30.0  # of ssh, with the start of Python there
_MAX_THREADS = 32

# What must be the same on all machines. The distribution may be tensorflow-cpu.
_VERSIONS = """
import json, os, platform, sys
from importlib import metadata
distributions = metadata.packages_distributions()
versions = {"Python": platform.python_version()}
for module in ("tf_dgc", "tensorflow", "keras"):
    names = distributions.get(module)
    versions[module] = metadata.version(names[0]) if names else "not installed"
print(json.dumps([versions, os.path.isdir(sys.argv[1])]))
"""


class Check(NamedTuple):
    """A line of the report."""

    name: str
    text: str
    is_problem: bool = False


@dataclasses.dataclass(frozen=True)
class _Task:
    """A process of the cluster."""

    job: str
    index: int
    host: str
    port: int

    @property
    def name(self) -> str:
        """The task's name, such as "worker 0"."""
        return f"{self.job} {self.index}"

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"


def check_tf_config() -> list[Check]:
    """Check `TF_CONFIG`, this task's port, and the names of the others' hosts."""
    if not os.environ.get("TF_CONFIG", "").strip():
        return [Check("TF_CONFIG", "not set")]
    try:
        tf_config.check_tf_config()
    except ValueError as error:
        return [Check("TF_CONFIG", str(error), is_problem=True)]
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tasks = _tasks(resolver.cluster_spec())
    own = f"{resolver.task_type} {resolver.task_id}"
    if len(tasks) < 2:
        return [Check("TF_CONFIG", "one process, which trains alone")]
    checks = [Check("TF_CONFIG", f"{len(tasks)} tasks; this is {own}")]
    with ThreadPoolExecutor(_MAX_THREADS) as executor:
        results = [
            executor.submit(_check_own if task.name == own else _check_other, task)
            for task in tasks
        ]
        return checks + [result.result() for result in results]


def _tasks(cluster: tf.train.ClusterSpec) -> list[_Task]:
    tasks = []
    for job in cluster.jobs:
        for index in cluster.task_indices(job):
            host, _, port = cluster.task_address(job, index).rpartition(":")
            if port.isdecimal():
                tasks.append(_Task(job, index, host, int(port)))
    return tasks


def _check_own(task: _Task) -> Check:
    """Check that this process could listen on its port."""
    name = f"  {task.name}"
    try:
        _listen(task.port)
    except OSError as error:
        return Check(
            name,
            f"port {task.port} cannot be used here: {error.strerror}. End the process "
            "that uses it, or choose another port for this task",
            is_problem=True,
        )
    return Check(name, f"{task.address}, this task: its port is free")


def _listen(port: int) -> None:
    """Listen on all addresses for a moment, as TensorFlow's server does."""
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            with socket.socket(family) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind((host, port))
                server.listen()
            return
        except OSError as error:  # a machine without IPv6
            unsupported = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
            if family == socket.AF_INET or error.errno not in unsupported:
                raise


def _check_other(task: _Task) -> Check:
    """Check that a host has an address; say whether the task answers."""
    name, host = f"  {task.name}", task.host.strip("[]")
    try:
        socket.getaddrinfo(host, task.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Check(
            name,
            f"{task.address}: the host has no address here ({error.strerror}). Correct "
            "its name in TF_CONFIG, or add it to DNS or /etc/hosts",
            is_problem=True,
        )
    try:
        socket.create_connection((host, task.port), _CONNECT_SECONDS).close()
    except OSError:
        return Check(name, f"{task.address} does not answer, or has not started yet")
    return Check(name, f"{task.address} answers")


def check_hosts(names: Sequence[str], ssh: str) -> list[Check]:
    """Check that ssh reaches hosts without a password, and versions there."""
    command = [sys.executable, "-c", _VERSIONS, os.getcwd()]
    here, _ = json.loads(subprocess.check_output(command))
    with ThreadPoolExecutor(_MAX_THREADS) as executor:
        unique = list(dict.fromkeys(names))
        return list(executor.map(lambda name: _check_host(name, ssh, here), unique))


def _check_host(name: str, ssh: str, here: dict[str, str]) -> Check:
    problem = ""
    try:
        finished = subprocess.run(
            [
                *shlex.split(ssh),
                launcher.ssh_name(name),
                launcher.remote_python(["-c", _VERSIONS, os.getcwd()]),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            start_new_session=True,  # no terminal to ask for a password
            check=True,
        )
        there, has_directory = json.loads(finished.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        problem = f"no answer within {_COMMAND_SECONDS:.0f} s"
    except subprocess.CalledProcessError as error:
        problem = _ssh_problem(name, error)
    except (OSError, ValueError, IndexError) as error:
        problem = f"the command failed: {error}"
    else:
        problem = "; ".join(_differences(here, there, has_directory))
    return Check(
        name, problem or "ok: reachable, with the same versions", bool(problem)
    )


def _ssh_problem(name: str, error: subprocess.CalledProcessError) -> str:
    reason = (error.stderr.strip() or f"exit code {error.returncode}").splitlines()[-1]
    if error.returncode != 255:  # of the command there
        return f"{sys.executable} fails there: {reason}"
    advice = ""
    if "denied" in reason:
        advice = f". Allow it without a password: `ssh-copy-id {name}`"
    return f"ssh fails: {reason.rstrip('.')}{advice}"


def _differences(
    here: dict[str, str], there: dict[str, str], has_directory: bool
) -> list[str]:
    problems = [
        f"{package} is {there.get(package)} there, and {version} here"
        for package, version in here.items()
        if there.get(package) != version
    ]
    if not has_directory:
        problems.append(f"there is no directory {os.getcwd()}, where scripts would run")
    return problems
