"""The process of the watchdog, which `watchdog.py` starts; imports only the stdlib.

    python -I -S watchdog_process.py PID SIGNAL SECONDS NAME ADDRESS...

Reads the state of the worker with this PID from standard input. Ends the worker when it
has made no progress for so many seconds while it needed the others, and one of them has
been gone for as long.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time

FREE = b"-"  # the worker does not need the others
PROGRESS = b"+"  # it needs the others, and its main thread makes progress
NONE = b"="  # it needs the others, and its main thread makes none
_INTERVAL = 1.0
_ANSWER_SECONDS = 2.0
_DUMP_SECONDS = 2.0


class Peers:
    """Which of the other workers, by `host:port`, have gone, judging by their ports."""

    def __init__(self, addresses: list[str]):
        self._addresses = addresses
        self._answered: set[str] = set()  # those that have answered once
        self._silent: dict[str, float] = {}  # since when
        self._gone: dict[str, float] = {}  # also if another process listens there now

    def gone(self) -> tuple[str, float] | None:
        """Return the one that has been gone for the longest time, and since when."""
        return min(self._gone.items(), key=lambda item: item[1], default=None)

    def look(self) -> None:
        """Try to connect to all of them."""
        now = time.monotonic()
        answering = _answering(self._addresses)
        self._answered |= answering
        for address in self._answered:
            if address in answering:
                self._silent.pop(address, None)
            elif address in self._silent:  # twice in a row
                self._gone.setdefault(address, self._silent[address])
            else:
                self._silent[address] = now


def _answering(addresses: list[str]) -> set[str]:
    pending: dict[socket.socket, str] = {}
    for address in addresses:
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError):
            family, kind, protocol, _, target = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )[0]
            attempt = socket.socket(family, kind, protocol)
            attempt.setblocking(False)
            attempt.connect_ex(target)
            pending[attempt] = address
    answering = set()
    deadline = time.monotonic() + _ANSWER_SECONDS
    while pending and (left := deadline - time.monotonic()) > 0:
        for attempt in select.select([], list(pending), [], left)[1]:
            address = pending.pop(attempt)
            if attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                answering.add(address)
            attempt.close()
    for attempt in pending:
        attempt.close()
    return answering


def watch(
    pid: int, stack_signal: int, patience: float, name: str, peers: Peers
) -> None:
    """Watch until the worker `pid`, our parent, ends, or end it."""
    state, last_progress = FREE, time.monotonic()
    looked = False
    while os.getppid() == pid:
        if select.select([0], [], [], _INTERVAL)[0]:
            messages = os.read(0, 4096)
            if not messages:
                return
            state = messages[-1:]
            if messages.strip(NONE):
                last_progress = time.monotonic()
        if state == FREE:
            continue
        idle = time.monotonic() - last_progress
        if not looked or idle > patience / 4:
            looked = True
            peers.look()
        gone = peers.gone()
        if gone and min(idle, time.monotonic() - gone[1]) > patience:
            end(pid, stack_signal, name, gone[0], idle)
            return


def end(pid: int, stack_signal: int, name: str, gone: str, seconds: float) -> None:
    """Print the stack of the worker's main thread, and end it."""
    _print(
        f"tf_dgc: {name} has made no progress for {seconds:.0f} s, outside of all "
        f"collectives, and the worker at {gone} is gone. Ending this process; its "
        "main thread is:"
    )
    with contextlib.suppress(ProcessLookupError):
        if stack_signal:
            os.kill(pid, stack_signal)
            time.sleep(_DUMP_SECONDS)
        if os.getppid() == pid:
            os.kill(pid, signal.SIGKILL)
    _print(
        f"tf_dgc: {name} was ended, because it was stuck where its main thread is "
        "above. Fix that, end all workers and start all of them again from the "
        "last checkpoint (`tf-dgc run --max-restarts` does both)."
    )


def _print(text: str) -> None:
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
