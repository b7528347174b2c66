"""Start-up: all workers meet before TensorFlow waits for them without a limit."""

import contextlib
import faulthandler
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

from tf_dgc import _internals, cluster, workers
from tf_dgc.distribute import prepare

_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 2.0


def multi_worker_strategy(
    communication_options: tf.distribute.experimental.CommunicationOptions
    | None = None,
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Return a prepared `MultiWorkerMirroredStrategy`, or say which worker is missing.

    TensorFlow's own constructor waits very long for a worker that died while it
    started, and cannot be interrupted. This function first waits for all workers that
    `TF_CONFIG` names, on the ports they have there, for `TF_DGC_START_TIMEOUT` seconds
    at most (environment variable, default 45). It also passes
    `TF_DGC_HEARTBEAT_TIMEOUT` (default 10) to TensorFlow: the seconds without a
    heartbeat after which a worker counts as gone.

    All workers must call it alike:

    >>> strategy = tf_dgc.multi_worker_strategy()

    Args:
        communication_options: see `tf.distribute.MultiWorkerMirroredStrategy`.

    Returns:
        The strategy, as `tf_dgc.prepare` leaves it.

    Raises:
        ValueError: for a `TF_CONFIG` that cannot be right.
        RuntimeError: naming the workers that did not come in time.
    """
    cluster.check_tf_config()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    addresses = workers.addresses(resolver.cluster_spec())
    me = f"{resolver.task_type} {resolver.task_id}"
    limit = workers.start_timeout_seconds()
    if len(addresses) > 1 and me in addresses:
        meet(addresses, me, limit)
        _internals.configure_coordination(
            resolver.cluster_spec(), workers.heartbeat_timeout_seconds(), limit
        )
    with _ended_after(limit):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=resolver, communication_options=communication_options
        )
    return prepare(strategy)


def meet(addresses: dict[str, str], me: str, seconds: float) -> None:
    """Wait until every worker has reached every other one.

    Each listens on the port that its TensorFlow server is going to have, calls all
    others, and waits for their calls. Who was called by all is needed no more.

    Args:
        addresses: `host:port` of every worker by its name.
        me: this worker's name.
        seconds: how long to wait.

    Raises:
        RuntimeError: naming the workers that did not come, and were not reached.
    """
    deadline = time.monotonic() + seconds
    peers = {name: address for name, address in addresses.items() if name != me}
    with (
        _listen(addresses[me]) as listener,
        ThreadPoolExecutor(len(peers) + 1) as threads,
    ):
        answered = threads.submit(_answer, listener, set(peers), deadline)
        calls = {n: threads.submit(_call, a, me, deadline) for n, a in peers.items()}
        met = {n for n in answered.result() if calls[n].result()}
    missing = [f"{name} ({peers[name]})" for name in peers if name not in met]
    if missing:
        raise RuntimeError(
            f"tf_dgc: {me} ({addresses[me]}) waited {seconds:g} s for "
            f"{' and '.join(missing)} to start, in vain. Look at the end of what that "
            "worker printed; check that it was started, with the same cluster in "
            "TF_CONFIG, and that its port can be reached. If it only starts slowly, "
            f"set {workers.START_TIMEOUT_VARIABLE} to more seconds."
        )


def _listen(address: str) -> socket.socket:
    port = int(address.rpartition(":")[2])
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


def _answer(listener: socket.socket, expected: set[str], deadline: float) -> set[str]:
    """Return the names of those who called, when all did or it is too late."""
    callers: set[str] = set()
    while callers < expected and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(_ANSWER_SECONDS)
            # A worker that has met all may be calling TensorFlow's server here already.
            with connection, connection.makefile(errors="replace") as lines:
                callers |= {lines.readline(100).strip()} & expected
                connection.sendall(b"\n")
    return callers


def _call(address: str, me: str, deadline: float) -> bool:
    """Say our name to a worker, and wait for the answer; return whether it came."""
    host, _, port = address.rpartition(":")
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), left) as peer:
                peer.sendall(f"{me}\n".encode())
                if peer.recv(1):
                    return True
        except OSError:
            pass
        time.sleep(_RETRY_SECONDS)
    return False


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End the process, saying where it is, if what is done within takes longer.

    TensorFlow's constructor keeps Python from running meanwhile; a worker that dies
    right after all have met could be waited for in no other way.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
