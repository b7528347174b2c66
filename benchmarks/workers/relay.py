"""A switch between TAP devices that delays every frame.

    ip netns exec HUB python relay.py DEVICE DEVICE ...

Every line of standard input sets the delay in seconds, at first 0; the relay ends with
its input. It prints "ready" when it has opened the devices. It passes on frames without
segmentation, with their virtio header, so Python is fast enough.
"""

import collections
import contextlib
import fcntl
import os
import select
import struct
import sys
import time

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFORMATION, _VIRTIO_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS_OF_IPV4, _SEGMENTS_OF_IPV6 = 1, 2, 4
_HEADER = 10  # bytes of the virtio header, before the frame
_LARGEST_FRAME = 2**17
_MAX_READS = 32  # frames read from one device before the next
_PRIORITY = -10  # keeps the relay on time while workers compute


class Switch:
    """Decides where frames go, and when.

    Args:
        ports: file descriptors of the devices.

    Attributes:
        delay: seconds to hold a frame from now on.
    """

    def __init__(self, ports):
        self._ports = ports
        self._port_by_address = {}
        self._queue = collections.deque()
        self.delay = 0.0

    def take(self, port, frame, now):
        """Queue a frame, with its virtio header, that arrived at a time."""
        target, source = (frame[_HEADER + i : _HEADER + i + 6] for i in (0, 6))
        self._port_by_address[source] = port
        ports = self._ports
        if target in self._port_by_address:
            ports = [self._port_by_address[target]]
        ports = [p for p in ports if p != port]
        self._queue.append((now + self.delay, ports, frame))

    def due(self, now):
        """Yield (port, frame) of all frames whose delay is over, in order."""
        while self._queue and self._queue[0][0] <= now:
            _, ports, frame = self._queue.popleft()
            for port in ports:
                yield port, frame

    def wait(self, now):
        """Return the seconds until the next frame is due; None without frames."""
        return max(0.0, self._queue[0][0] - now) if self._queue else None


def attach(name):
    """Return the file descriptor of an existing TAP device."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_PACKET_INFORMATION | _VIRTIO_HEADER
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    offloads = _CHECKSUMS | _SEGMENTS_OF_IPV4 | _SEGMENTS_OF_IPV6
    fcntl.ioctl(device, _TUNSETOFFLOAD, offloads)
    return device


def run(devices):
    """Pass frames on until standard input ends."""
    switch = Switch(devices)
    while True:
        wait = switch.wait(time.monotonic())
        ready, _, _ = select.select([0, *devices], [], [], wait)
        if 0 in ready:
            line = os.read(0, 100).split()
            if not line:
                return
            switch.delay = float(line[-1])
        for device in ready:
            if device:
                _read_frames(switch, device)
        for device, frame in switch.due(time.monotonic()):
            os.write(device, frame)


def _read_frames(switch, device):
    with contextlib.suppress(BlockingIOError):
        for _ in range(_MAX_READS):
            switch.take(device, os.read(device, _LARGEST_FRAME), time.monotonic())


if __name__ == "__main__":
    os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    devices = [attach(name) for name in sys.argv[1:]]
    print("ready", flush=True)
    run(devices)
