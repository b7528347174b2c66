"""A switch between TAP devices that holds every frame for a while: a long way.

    ip netns exec HUB python relay.py DEVICE DEVICE ...

Every line of standard input is how long frames are held from then on, in seconds, at
first 0; at its end the relay ends. It says "ready" when it has the devices. Frames come
and go as the kernel has them, large ones in one piece, with the header that says so: so
Python is fast enough.
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
_LARGEST = 2**17
_AT_ONCE = 32  # frames of a device, before the others are looked at
_PRIORITY = -10  # it is to be on time also while workers compute


class Switch:
    """Where frames go, and when.

    Args:
        ports: numbers of the devices.

    Attributes:
        delay: seconds that a frame is held from now on.
    """

    def __init__(self, ports):
        self._ports = ports
        self._behind = {}  # a port by the address of who is behind it
        self._held = collections.deque()
        self.delay = 0.0

    def take(self, port, frame, now):
        """Hold a frame, a virtio header before it, that came at a time."""
        to, source = (frame[_HEADER + i : _HEADER + i + 6] for i in (0, 6))
        self._behind[source] = port
        ports = [self._behind[to]] if to in self._behind else self._ports
        ports = [p for p in ports if p != port]
        self._held.append((now + self.delay, ports, frame))

    def due(self, now):
        """Yield (port, frame) of all that have been held for long enough, in order."""
        while self._held and self._held[0][0] <= now:
            _, ports, frame = self._held.popleft()
            for port in ports:
                yield port, frame

    def wait(self, now):
        """Return the seconds until the next frame is due; None if none is held."""
        return max(0.0, self._held[0][0] - now) if self._held else None


def attach(name):
    """Return the file descriptor of a TAP device that is there."""
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
                _take_all(switch, device)
        for device, frame in switch.due(time.monotonic()):
            os.write(device, frame)


def _take_all(switch, device):
    with contextlib.suppress(BlockingIOError):
        for _ in range(_AT_ONCE):
            switch.take(device, os.read(device, _LARGEST), time.monotonic())


if __name__ == "__main__":
    os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    attached = [attach(name) for name in sys.argv[1:]]
    print("ready", flush=True)
    run(attached)
