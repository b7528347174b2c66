"""The process of the watchdog; started by `watchdog.py`, it imports nothing of ours.

    python -I -S watchdog_process.py PID SIGNAL SECONDS NAME ADDRESS...

Reads what the worker with this PID says of itself from standard input. The worker is
ended when it has made no progress for so many seconds, while it needed the others, and
one of them has been gone for as long.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time

FREE = b"-"  # the worker needs nobody
PROGRESS = b"+"  # it needs the others, and its main thread makes progress
NONE = b"="  # it needs the others, and its main thread makes none
_INTERVAL = 1.0
_ANSWER_SECONDS = 2.0
_DUMP_SECONDS = 2.0


class Peers:
    """The other workers, as far as their ports tell.

    Args:
        addresses: their `host:port`.
    """

    def __init__(self, addresses: list[str]):
        self._addresses = addresses
        self._present: set[str] = set()  # those that have answered once
        self._silent: dict[str, float] = {}  # since when
        self._gone: dict[str, float] = {}  # also if another process listens there now

    def gone(self) -> tuple[str, float] | None:
        """Return who has been gone for the longest time, and since when."""
        return min(self._gone.items(), key=lambda item: item[1], default=None)

    def look(self) -> None:
        """Try to connect to all of them."""
        now = time.monotonic()
        answering = _answering(self._addresses)
        self._present |= answering
        for address in self._present:
            if address in answering:
                self._silent.pop(address, None)
            elif address in self._silent:  # twice in a row
                self._gone.setdefault(address, self._silent[address])
            else:
                self._silent[address] = now


def _answering(addresses: list[str]) -> set[str]:
    """Return the addresses where a connection is accepted."""
    pending: dict[socket.socket, str] = {}
    for address in addresses:
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError):
            target = (host.strip("[]"), int(port))
            family, kind, protocol, _, where = socket.getaddrinfo(
                *target, type=socket.SOCK_STREAM
            )[0]
            attempt = socket.socket(family, kind, protocol)
            attempt.setblocking(False)
            attempt.connect_ex(where)
            pending[attempt] = address
    found = set()
    deadline = time.monotonic() + _ANSWER_SECONDS
    while pending and (left := deadline - time.monotonic()) > 0:
        for attempt in select.select([], list(pending), [], left)[1]:
            address = pending.pop(attempt)
            if attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                found.add(address)
            attempt.close()
    for attempt in pending:
        attempt.close()
    return found


def watch(worker: int, number: int, patience: float, name: str, peers: Peers) -> None:
    """Watch until the worker ends, or end it.

    Args:
        worker: PID of the worker, whose child this process is.
        number: signal at which it prints its main thread's stack, or 0.
        patience: seconds, as above.
        name: name of the worker.
        peers: the other workers.
    """
    last, moved = FREE, time.monotonic()
    known = False
    while os.getppid() == worker:
        if select.select([0], [], [], _INTERVAL)[0]:
            words = os.read(0, 4096)
            if not words:
                return
            last = words[-1:]
            if words.strip(NONE):
                moved = time.monotonic()
        if last == FREE:
            continue
        still = time.monotonic() - moved
        if not known or still > patience / 4:
            known = True
            peers.look()
        gone = peers.gone()
        if gone and min(still, time.monotonic() - gone[1]) > patience:
            end(worker, number, name, gone[0], still)
            return


def end(worker: int, number: int, name: str, gone: str, seconds: float) -> None:
    """Print the stack of the worker's main thread, and end it."""
    _say(
        f"tf_dgc: {name} has made no progress for {seconds:.0f} s, outside of all "
        f"collectives, and the worker at {gone} is gone. Ending this process; its "
        "main thread is:"
    )
    with contextlib.suppress(ProcessLookupError):
        if number:
            os.kill(worker, number)
            time.sleep(_DUMP_SECONDS)
        if os.getppid() == worker:
            os.kill(worker, signal.SIGKILL)
    _say(
        f"tf_dgc: {name} was ended, because it was stuck where its main thread is "
        "above. Correct that, end all workers and start all of them again from the "
        "last checkpoint (`tf-dgc run --max-restarts` does both)."
    )


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    watch(
        int(sys.argv[1]),
        int(sys.argv[2]),
        float(sys.argv[3]),
        sys.argv[4],
        Peers(sys.argv[5:]),
    )
