"""Measures what a link carries: one plain TCP connection, for a moment.

python transfer.py receive ADDRESS
python transfer.py send ADDRESS

The receiver prints bits per second.
"""

import socket
import sys
import time

_PORT = 20000
_SECONDS = 1.0
_LEFT_OUT = 2**21  # a shaper lets its burst pass at full speed
_CHUNK = 2**20
_PATIENCE = 10.0


def send(address):
    """Send for a second; wait for a receiver that is not there yet."""
    with _connect(address) as connection:
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            connection.sendall(bytes(_CHUNK))


def receive(address):
    """Return the rate at which one connection's bytes arrived, in bits per second."""
    buffer = bytearray(_CHUNK)
    with socket.create_server((address, _PORT)) as server:
        server.settimeout(_PATIENCE)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_PATIENCE)
        received = 0
        while received < _LEFT_OUT:
            received += _more(connection, buffer)
        start, received = time.monotonic(), 0
        while more := connection.recv_into(buffer):
            received += more
        return 8 * received / (time.monotonic() - start)


def _more(connection, buffer):
    count = connection.recv_into(buffer)
    if not count:
        raise ConnectionError("The connection ended too early to measure its rate")
    return count


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
    if sys.argv[1] == "receive":
        print(receive(sys.argv[2]))
    else:
        send(sys.argv[2])
