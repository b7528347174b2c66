"""Captures the packets of a loopback and the gRPC call that each belongs to.

    python packet_capture.py FILE COMMAND...

Runs a command and writes the loopback's packets to FILE, for `read`. It needs the right
to open raw sockets, which `programs.loopback_prefix` gives.
"""

import collections
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import NamedTuple

_ALL_PROTOCOLS, _OUTGOING, _IPV4, _TCP = 3, 4, 0x0800, 6
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS = 0, 1
_STATIC_HEADERS = 61  # entries of HPACK's static table (RFC 7541)


class Packet(NamedTuple):
    """A TCP packet.

    Attributes:
        time: time of sending in seconds, as in `time.time`.
        call: gRPC method of its frames, such as "Heartbeat"; for an acknowledgement or
            a ping the last one of its connection.
        what: kind of packet: "request", "response" or "other".
    """

    time: float
    call: str
    what: str


def record(path, command):
    """Run a command; write all packets on the loopback meanwhile."""
    stopped = threading.Event()
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw,
        open(path, "wb") as file,
    ):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
        raw.bind(("lo", _ALL_PROTOCOLS))
        raw.settimeout(0.2)

        def write():
            while not stopped.is_set():
                try:
                    data, (_, _, kind, *_) = raw.recvfrom(1 << 17)
                except TimeoutError:
                    continue
                if kind == _OUTGOING:  # each is also captured as incoming
                    pickle.dump((time.time(), data), file)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            return subprocess.run(command, check=False).returncode
        finally:
            stopped.set()
            writer.join()


def read(path):
    """Return the packets of a file, as a list of `Packet`."""
    packets = []
    directions = collections.defaultdict(_Direction)
    calls = {}  # by connection and stream
    last_call = collections.defaultdict(lambda: "no call")
    with open(path, "rb") as file:
        while file.peek(1):
            moment, data = pickle.load(file)
            segment = _segment(data)
            if segment is None:
                packets.append(Packet(moment, "not TCP", "other"))
                continue
            ports, number, payload = segment
            connection = frozenset(ports)
            what = "other"
            for kind, stream, body in directions[ports].frames(number, payload):
                if kind == _HEADERS:
                    name = directions[ports].path(body)
                    what = "response" if name is None else "request"
                    if name is not None:
                        calls[connection, stream] = name.rpartition("/")[2]
                if kind in {_HEADERS, _DATA}:
                    last_call[connection] = calls.get((connection, stream), "unknown")
            packets.append(Packet(moment, last_call[connection], what))
    return packets


def _segment(data):
    """Return ports, sequence number and payload of a TCP segment, None for others."""
    (protocol,) = struct.unpack_from("!H", data, 12)
    packet = data[14:]
    if protocol != _IPV4 or packet[9] != _TCP:
        return None
    start = 4 * (packet[0] & 15)
    (length,) = struct.unpack_from("!H", packet, 2)
    segment = packet[start : length or None]
    source, target, number, _, offset = struct.unpack_from("!HHIIB", segment)
    return (source, target), number, segment[4 * (offset >> 4) :]


class _Direction:
    """One direction of an HTTP/2 connection."""

    def __init__(self):
        self._rest = b""  # of an incomplete frame
        self._next = None  # sequence number
        self._headers = []  # HPACK's dynamic table, the latest entry first

    def frames(self, number, payload):
        """Return kind, stream and body of the frames that end in a segment."""
        is_repeated = self._next is not None and (number - self._next) % 2**32 >= 2**31
        if not payload or is_repeated:
            return []
        self._next = (number + len(payload)) % 2**32
        rest = (self._rest + payload).removeprefix(_PREFACE)
        frames = []
        while len(rest) >= 9:
            end = 9 + int.from_bytes(rest[:3], "big")
            if len(rest) < end:
                break
            stream = int.from_bytes(rest[5:9], "big") & 0x7FFFFFFF
            frames.append((rest[3], stream, rest[9:end]))
            rest = rest[end:]
        self._rest = rest
        return frames

    def path(self, block):
        """Return the path in a block of headers, None for a response."""
        path = None
        while block:
            first = block[0]
            if first & 0x80:
                index, block = _integer(block, 7)
                name, value = self._header(index)
            elif first & 0xE0 == 0x20:  # a new size of the table
                _, block = _integer(block, 5)
                continue
            else:
                index, block = _integer(block, 6 if first & 0x40 else 4)
                if index:
                    name, _ = self._header(index)
                else:
                    name, block = _text(block)
                value, block = _text(block)
                if first & 0x40:
                    self._headers.insert(0, (name, value))
            if name == ":path":
                path = value
        return path

    def _header(self, index):
        if index <= _STATIC_HEADERS:
            return (":path" if index in {4, 5} else f"static {index}"), ""
        entries = self._headers[index - _STATIC_HEADERS - 1 :]
        return entries[0] if entries else ("unknown", "")


def _integer(block, bits):
    largest = (1 << bits) - 1
    value, block = block[0] & largest, block[1:]
    if value == largest:
        for place, byte in enumerate(block):
            value += (byte & 0x7F) << (7 * place)
            if not byte & 0x80:
                return value, block[place + 1 :]
    return value, block


def _text(block):
    """Return a text and the rest; gRPC does not compress texts."""
    length, block = _integer(block, 7)
    return block[:length].decode("latin1"), block[length:]


if __name__ == "__main__":
    sys.exit(record(sys.argv[1], sys.argv[2:]))
