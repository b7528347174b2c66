"""Measures what a link carries: one plain TCP connection, for a moment; or its delay.

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
_LEFT_OUT = 0.5  # of the bytes: slow start, and the burst of a shaper
_PINGS = 7
_CHUNK = 2**20
_PATIENCE = 10.0


def send(address, seconds):
    """Send for some seconds; wait for a receiver that is not there yet."""
    with _connect(address) as connection:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(bytes(_CHUNK))


def receive(address):
    """Return the rate at which one connection's bytes arrived, in bits per second."""
    buffer, arrived, received = bytearray(_CHUNK), [], 0
    with socket.create_server((address, _PORT)) as server:
        server.settimeout(_PATIENCE)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_PATIENCE)
        while more := connection.recv_into(buffer):
            received += more
            arrived.append((time.monotonic(), received))
    if not arrived:
        raise ConnectionError("The connection ended too early to measure its rate")
    start, first = next(a for a in arrived if a[1] >= _LEFT_OUT * received)
    end, last = arrived[-1]
    return 8 * (last - first) / (end - start)


def ping(address):
    """Return how long it takes to hear that nobody listens there, in seconds."""
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
    what, address, *seconds = sys.argv[1:]
    if what == "send":
        send(address, float(seconds[0]))
    else:
        print(receive(address) if what == "receive" else ping(address))
