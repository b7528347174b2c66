"""Start-up: all workers meet before TensorFlow waits for them without a limit."""

import atexit
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import tensorflow as tf

from tf_dgc._internals import service
from tf_dgc.cluster import coordination, failures, tf_config, workers
from tf_dgc.distribute.preparation import prepare

Options: TypeAlias = tf.distribute.experimental.CommunicationOptions

_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 2.0


def multi_worker_strategy(
    communication_options: Options | None = None,
) -> tf.distribute.Strategy:
    """Return a prepared `MultiWorkerMirroredStrategy`, or say which worker is missing.

    TensorFlow's own constructor waits very long for a worker that died while it
    started, and cannot be interrupted. This function first waits for all workers that
    `TF_CONFIG` names, on the ports they have there, for `TF_DGC_START_TIMEOUT` seconds
    at most (environment variable, default 45). It also passes
    `TF_DGC_HEARTBEAT_TIMEOUT` (default 10) to TensorFlow: the seconds without a
    heartbeat after which a worker counts as gone.

    All workers must call it alike:

    >>> strategy = tf_dgc.multi_worker_strategy()

    Called again it returns the same strategy: TensorFlow joins a cluster only once.

    Args:
        communication_options: options of the strategy; see
            `tf.distribute.MultiWorkerMirroredStrategy`.

    Returns:
        The strategy, as `tf_dgc.prepare` leaves it. For a task of type `evaluator`,
        which stands beside the workers, the default strategy: it evaluates by itself.

    Raises:
        ValueError: for a `TF_CONFIG` that cannot be right, or a task of type `ps`.
            Or for options other than those of the first call.
        RuntimeError: naming the workers that did not come in time; and if TensorFlow
            was used before, or has joined the cluster by a strategy made otherwise.
    """
    tf_config.check_tf_config()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type == "evaluator":
        return prepare(tf.distribute.get_strategy())
    addresses = workers.addresses(resolver.cluster_spec())
    me = f"{resolver.task_type} {resolver.task_id}"
    if len(addresses) > 1 and service.is_in_a_cluster():
        return _made_before(communication_options)
    limit = workers.start_timeout_seconds()
    if resolver.cluster_spec() and me not in addresses:
        raise ValueError(_NO_WORKER + repr(resolver.task_type))
    if addresses and service.is_too_late_for_a_cluster():
        raise RuntimeError(_TOO_LATE)
    if len(addresses) > 1 and me in addresses:
        meet(addresses, me, limit)
        service.configure_coordination(
            resolver.cluster_spec(), workers.heartbeat_timeout_seconds(), limit
        )
    with (
        _named(addresses, me, limit),
        service.enabling_collectives_by(
            lambda context, server: coordination.enable_collectives(
                context, server, limit
            )
        ),
    ):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=resolver, communication_options=communication_options
        )
    _made.append((strategy, communication_options))
    return prepare(strategy)


_made: list[tuple[tf.distribute.Strategy, Options | None]] = []


def _made_before(options: Options | None) -> tf.distribute.Strategy:
    """Return this process's strategy.

    Another one would begin the collectives of the cluster anew, while other workers may
    be in those of the first: TensorFlow's constructor ends them now and then.
    """
    if not _made:
        raise RuntimeError(_JOINED)
    strategy, before = _made[-1]
    if options is not None and (before is None or vars(options) != vars(before)):
        raise ValueError(
            "`multi_worker_strategy` was called before, and TensorFlow joins a cluster "
            "only once. Call it once, or with the same options. Received: "
            f"communication_options={options}, before: {before}"
        )
    return strategy


_NO_WORKER = (
    "`multi_worker_strategy` is for tasks of type `chief` or `worker` (an `evaluator` "
    "gets the default strategy). A parameter server, of type `ps`, is run by `tf-dgc "
    "serve`, and its workers train with `tf_dgc.ServerOptimizer`, without a strategy. "
    "Received, by the environment variable TF_CONFIG: a task of type "
)
_JOINED = (
    "TensorFlow has joined the workers' cluster by another strategy of this process, "
    "and joins it only once. Use that one, by `tf_dgc.prepare(strategy)`, or make it "
    "by `tf_dgc.multi_worker_strategy()`, which returns it to whoever calls it again."
)
_TOO_LATE = (
    "TensorFlow was used before it was to join the workers' cluster, which it can only "
    "do at the start. Move `strategy = tf_dgc.multi_worker_strategy()` to the top of "
    "the program, right behind the imports: before everything that makes a tensor, a "
    "variable, a layer or model, an optimizer or a `tf.data.Dataset`, that calls a "
    "`tf.function` or `keras.ops`, or asks for logical devices. What stands at the top "
    "level of imported modules counts, too."
)


def meet(addresses: dict[str, str], me: str, seconds: float) -> None:
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
        raise _in_vain(addresses, me, missing, seconds)


def _without(addresses: dict[str, str], me: str) -> dict[str, str]:
    return {name: address for name, address in addresses.items() if name != me}


def _in_vain(
    addresses: dict[str, str], me: str, missing: list[str], seconds: float
) -> RuntimeError:
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
            connection.settimeout(_ANSWER_SECONDS)
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


@contextlib.contextmanager
def _named(addresses: dict[str, str], me: str, seconds: float) -> Iterator[None]:
    """Name the workers that die or are stopped after all have met.

    TensorFlow only says that it waited.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if me not in addresses:  # it connects to nobody
            raise
        peers = _without(addresses, me)
        with ThreadPoolExecutor(len(addresses)) as threads:
            speak = list(threads.map(_speaks, peers.values()))
        silent = [n for n, speaks in zip(peers, speak, strict=True) if not speaks]
        if not silent:
            raise
        time.sleep(_ANSWER_SECONDS)  # so that the others, who ask now, get an answer
        failures.told.set()
        atexit.register(failures.limit_teardown)
        raise _in_vain(addresses, me, silent, seconds) from error


def _speaks(address: str) -> bool:
    """Whether a gRPC server greets there, as HTTP/2 wants (RFC 9113, section 3.4)."""
    with contextlib.suppress(OSError), _connect(address, _ANSWER_SECONDS) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _EMPTY_SETTINGS)
        return bool(peer.recv(1))
    return False


def _connect(address: str, seconds: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), seconds)


_EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
