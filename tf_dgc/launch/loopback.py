"""A cluster on this machine: ports, and what every worker finds in its environment."""

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence

from tf_dgc.launch import allocator

ATTEMPT_VARIABLE = "TF_DGC_ATTEMPT"
SECRET_VARIABLE = "TF_DGC_SECRET"


@contextlib.contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
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
    with held_ports(count) as ports:
        return ports


def environments(
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
            **allocator.SETTINGS,
            **shared,
            **os.environ,  # what the user has set is left as it is
            ATTEMPT_VARIABLE: str(attempt),
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
        }
        for task in tasks
    ]
