"""Measures the rate of a link with one TCP connection, or its round trip.

    python transfer.py receive ADDRESS SECONDS
    python transfer.py send ADDRESS SECONDS
    python transfer.py ping ADDRESS

The receiver prints bits per second, and `ping` the seconds of a round trip.
"""

import contextlib
import socket
import statistics
import sys
import time

_PORT = 20000
_IGNORED_SHARE = 0.5  # of the bytes: slow start, and the burst of a shaper
_PINGS = 7
_CHUNK = 2**20
_PATIENCE = 10.0


def send(address, seconds):
    """Send for some seconds, after waiting for the receiver."""
    with _connect(address) as connection:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(bytes(_CHUNK))


def receive(address):
    """Return the rate of one connection in bits per second."""
    buffer = bytearray(_CHUNK)
    arrivals = []  # (time, total bytes)
    received = 0
    with socket.create_server((address, _PORT)) as server:
        server.settimeout(_PATIENCE)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_PATIENCE)
        while more := connection.recv_into(buffer):
            received += more
            arrivals.append((time.monotonic(), received))
    if not arrivals:
        raise ConnectionError("The connection ended too early to measure its rate")
    start, first = next(a for a in arrivals if a[1] >= _IGNORED_SHARE * received)
    end, last = arrivals[-1]
    return 8 * (last - first) / (end - start)


def ping(address):
    """Return the seconds until an unused port refuses a connection."""
    times = []
    for _ in range(_PINGS):
        start = time.monotonic()
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((address, _PORT), timeout=_PATIENCE).close()
        times.append(time.monotonic() - start)
    return statistics.median(times)


def _connect(address):
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return socket.create_connection((address, _PORT), timeout=_PATIENCE)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    command, address, *seconds = sys.argv[1:]
    if command == "send":
        send(address, float(seconds[0]))
    else:
        print(receive(address) if command == "receive" else ping(address))
