"""Arriving: workers wait for each other before TensorFlow does, on the same ports."""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tf_dgc.multiworker import workers

ANSWER_SECONDS = 2.0
_RETRY_SECONDS = 0.2


def wait_for_all_workers(addresses: dict[str, str], me: str, seconds: float) -> None:
    """Wait until every worker has reached every other one.

    Each listens on the port that its TensorFlow server is going to have, calls all
    others, and waits for their calls. Who was called by all is needed no more.

    Args:
        addresses: `host:port` of every worker by its name.
        me: name of this worker.
        seconds: time to wait.

    Raises:
        RuntimeError: naming the workers that did not come, and were not reached; or
            this one's port, if another program has it all the time.
    """
    deadline = time.monotonic() + seconds
    over = threading.Event()

    def left() -> float:
        return 0.0 if over.is_set() else deadline - time.monotonic()

    peers = _without(addresses, me)
    with (
        _listen(addresses, me, seconds) as listener,
        ThreadPoolExecutor(len(peers) + 1) as threads,
        contextlib.ExitStack() as ends,
    ):
        ends.callback(over.set)  # on an interrupt, too
        answered = threads.submit(_answer, listener, set(peers), left)
        calls = {n: threads.submit(_call, a, me, left) for n, a in peers.items()}
        met = {n for n in answered.result() if calls[n].result()}
    missing = [name for name in peers if name not in met]
    if missing:
        raise missing_workers_error(addresses, me, missing, seconds)


def _without(addresses: dict[str, str], me: str) -> dict[str, str]:
    return {name: address for name, address in addresses.items() if name != me}


def missing_workers_error(
    addresses: dict[str, str], me: str, missing: list[str], seconds: float
) -> RuntimeError:
    """Return the error of a worker that waited for others to start.

    Args:
        addresses: `host:port` of every worker by its name.
        me: name of this worker.
        missing: names of those that did not come.
        seconds: time that it waited.
    """
    names = [f"{name} ({addresses[name]})" for name in missing]
    return RuntimeError(
        f"tf_dgc: {me} ({addresses[me]}) waited {seconds:g} s for "
        f"{' and '.join(names)} to start, in vain. Look at the end of what that "
        "worker printed; check that it was started, with the same cluster in "
        "TF_CONFIG, and that its port can be reached. If it only starts slowly, "
        f"set {workers.START_TIMEOUT_VARIABLE} to more seconds."
    )


def _listen(addresses: dict[str, str], me: str, seconds: float) -> socket.socket:
    """Listen on this worker's port, waiting for it if another program has it."""
    deadline = time.monotonic() + seconds
    port = int(addresses[me].rpartition(":")[2])
    while True:
        try:
            return _server(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"tf_dgc: {me} ({addresses[me]}) waited {seconds:g} s for port "
                    f"{port}, in vain: another program of this machine listens on it. "
                    "End that program, perhaps a worker of an earlier run, or give "
                    "this worker another port in the TF_CONFIG of all workers."
                ) from error
        time.sleep(_RETRY_SECONDS)


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


def _answer(
    listener: socket.socket, expected: set[str], left: Callable[[], float]
) -> set[str]:
    """Return the names of those who called, when all did or it is too late."""
    callers: set[str] = set()
    while callers < expected and (seconds := left()) > 0:
        listener.settimeout(min(seconds, _RETRY_SECONDS))
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(ANSWER_SECONDS)
            # A worker that has met all may be calling TensorFlow's server here already.
            with connection, connection.makefile(errors="replace") as lines:
                callers |= {lines.readline(100).strip()} & expected
                connection.sendall(b"\n")
    return callers


def _call(address: str, me: str, left: Callable[[], float]) -> bool:
    """Say our name to a worker, and wait for the answer; return whether it came."""
    while (seconds := left()) > 0:
        try:
            with _connect(address, seconds) as peer:
                peer.sendall(f"{me}\n".encode())
                if peer.recv(1):
                    return True
        except OSError:
            pass
        time.sleep(_RETRY_SECONDS)
    return False


def silent_workers(addresses: dict[str, str], me: str) -> list[str]:
    """Return the other workers at whose addresses no server of TensorFlow's speaks.

    Args:
        addresses: `host:port` of every worker by its name.
        me: name of this worker.
    """
    peers = _without(addresses, me)
    with ThreadPoolExecutor(len(addresses)) as threads:
        speak = list(threads.map(_speaks, peers.values()))
    return [n for n, speaks in zip(peers, speak, strict=True) if not speaks]


def _speaks(address: str) -> bool:
    """Whether a gRPC server greets there, as HTTP/2 wants (RFC 9113, section 3.4)."""
    with contextlib.suppress(OSError), _connect(address, ANSWER_SECONDS) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _EMPTY_SETTINGS)
        return bool(peer.recv(1))
    return False


def _connect(address: str, seconds: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), seconds)


_EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
