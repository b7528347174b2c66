"""Wait until all workers have started, on the ports that TensorFlow will use."""

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


def wait_for_all_workers(
    addresses: dict[str, str], this_worker: str, seconds: float
) -> None:
    """Wait until every worker has reached every other one."""
    # Each listens on the port of its future TensorFlow server, connects to all others,
    # and waits for their connections. A worker that all others have reached may
    # continue.
    deadline = time.monotonic() + seconds
    cancelled = threading.Event()

    def remaining() -> float:
        return 0.0 if cancelled.is_set() else deadline - time.monotonic()

    peers = _without(addresses, this_worker)
    with (
        _listen(addresses, this_worker, seconds) as listener,
        ThreadPoolExecutor(len(peers) + 1) as threads,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(cancelled.set)  # on an interrupt, too
        callers = threads.submit(_answer, listener, set(peers), remaining)
        calls = {
            name: threads.submit(_call, address, this_worker, remaining)
            for name, address in peers.items()
        }
        met = {name for name in callers.result() if calls[name].result()}
    missing = [name for name in peers if name not in met]
    if missing:
        raise missing_workers_error(addresses, this_worker, missing, seconds)


def _without(addresses: dict[str, str], worker: str) -> dict[str, str]:
    return {name: address for name, address in addresses.items() if name != worker}


def missing_workers_error(
    addresses: dict[str, str], this_worker: str, missing: list[str], seconds: float
) -> RuntimeError:
    """Return the error of a worker that waited for others to start."""
    names = [f"{name} ({addresses[name]})" for name in missing]
    return RuntimeError(
        f"tf_dgc: {this_worker} ({addresses[this_worker]}) waited {seconds:g} s for "
        f"{' and '.join(names)} to start, in vain. Look at the end of what that "
        "worker printed; check that it was started, with the same cluster in "
        "TF_CONFIG, and that its port can be reached. If it only starts slowly, "
        f"set {workers.START_TIMEOUT_VARIABLE} to more seconds."
    )


def _listen(
    addresses: dict[str, str], this_worker: str, seconds: float
) -> socket.socket:
    """Listen on this worker's port; wait for it if another program has it."""
    deadline = time.monotonic() + seconds
    address = addresses[this_worker]
    port = int(address.rpartition(":")[2])
    while True:
        try:
            return _server(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"tf_dgc: {this_worker} ({address}) waited {seconds:g} s for port "
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
    listener: socket.socket, expected: set[str], remaining: Callable[[], float]
) -> set[str]:
    """Answer calls; return the callers' names when all called or time is over."""
    callers: set[str] = set()
    while callers < expected and (seconds := remaining()) > 0:
        listener.settimeout(min(seconds, _RETRY_SECONDS))
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(ANSWER_SECONDS)
            # A worker that has met all may be calling TensorFlow's server here already.
            with connection, connection.makefile(errors="replace") as lines:
                callers |= {lines.readline(100).strip()} & expected
                connection.sendall(b"\n")
    return callers


def _call(address: str, this_worker: str, remaining: Callable[[], float]) -> bool:
    """Send our name to a worker; return whether it answered."""
    while (seconds := remaining()) > 0:
        try:
            with _connect(address, seconds) as peer:
                peer.sendall(f"{this_worker}\n".encode())
                if peer.recv(1):
                    return True
        except OSError:
            pass
        time.sleep(_RETRY_SECONDS)
    return False


def silent_workers(addresses: dict[str, str], this_worker: str) -> list[str]:
    """Return the other workers whose TensorFlow server does not respond."""
    peers = _without(addresses, this_worker)
    with ThreadPoolExecutor(len(addresses)) as threads:
        responses = list(threads.map(_speaks, peers.values()))
    return [name for name, speaks in zip(peers, responses, strict=True) if not speaks]


def _speaks(address: str) -> bool:
    """Whether a gRPC server sends HTTP/2's preface (RFC 9113, section 3.4)."""
    with contextlib.suppress(OSError), _connect(address, ANSWER_SECONDS) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _EMPTY_SETTINGS)
        return bool(peer.recv(1))
    return False


def _connect(address: str, seconds: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), seconds)


_EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
