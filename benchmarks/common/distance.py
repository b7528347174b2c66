"""Workers that are far from each other: links of a rate, and a delay between them.

A kernel without netem has no delay to offer. So each machine's link ends at a bridge of
its own, with a TAP device, and `workers/relay.py` passes frames from device to device
when they have been held for half of the round trip. Ends of the links are as without:
addresses, TCP with its slow start, rates, and where bytes are counted.
"""

import contextlib
import os
import subprocess
import sys

from common import network

RATES = ("10mbit", "100mbit")
_SECONDS = 4.0  # of a test of the rate: slow start over a long way takes a second
_PATIENCE = 10.0


def connect(num_workers):
    """Return the context manager of a network with a namespace for each worker.

    Raises:
        PermissionError: without root.
    """
    if os.geteuid() != 0:
        raise PermissionError(
            "Links with a delay are between network namespaces, which needs root. Run "
            "this with sudo."
        )
    return Distance(num_workers)


class Distance(network.Namespaces):
    """Namespaces whose links are given a rate and a delay, again and again.

    At first there is neither.

    Args:
        num_workers: number of workers of a cluster.

    Attributes:
        relay: process that holds the frames.
    """

    def __init__(self, num_workers):
        super().__init__(None, num_workers)
        self.relay = self._placed = None
        self._measured = {}

    def place(self, rate, round_trip_ms):
        """Give all links a rate, and the way between two workers a delay.

        Args:
            rate: of both directions of every link, as `tc` writes it.
            round_trip_ms: milliseconds from a worker to another one and back.
        """
        self._rate, self._placed = rate, (rate, round_trip_ms)
        self.limit(measure=False)
        self._hold(round_trip_ms / 2000)

    def gather(self):
        """Take rate and delay away."""
        if self._placed:
            self.unlimit()
        self._placed = None
        self._hold(0.0)

    def measure(self):
        """Return what the links are, measured once: `mbit`, and `ping_ms`.

        That is what one connection carries, and the time of a round trip.
        """
        if self._placed not in self._measured:
            mbit, ping_ms = self._transfer(0, _SECONDS), 1000 * self.ping()
            self._measured[self._placed] = {"mbit": mbit, "ping_ms": ping_ms}
        return self._measured[self._placed]

    def ping(self):
        """Return the seconds of a round trip between the first two."""
        command = [sys.executable, str(network.TRANSFER), "ping", network.address(1)]
        return float(network.run(*self.command(0, command)))

    def _hold(self, seconds):
        try:
            self.relay.stdin.write(f"{seconds}\n")
            self.relay.stdin.flush()
        except BrokenPipeError as error:
            raise network.NetworkError(
                f"The relay between the links ended, with code {self.relay.wait()}"
            ) from error

    def _create(self):
        super()._create()
        hub, inside = ["ip", "-n", self._hub], ["ip", "netns", "exec", self._hub]
        taps = [f"far{i}" for i in range(len(self._machines))]
        for i, tap in enumerate(taps):
            add = [*inside, "ip", "tuntap", "add", "dev", tap]
            network.run(*add, "mode", "tap", "vnet_hdr")
            network.run(*hub, "link", "add", f"bridge{i}", "type", "bridge")
            network.run(*hub, "link", "set", f"bridge{i}", "up")
            for port in (tap, f"port{i}"):
                network.run(*hub, "link", "set", port, "master", f"bridge{i}", "up")
        self.relay = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                self._hub,
                sys.executable,
                str(network.RELAY),
                *taps,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the benchmark alone
        )
        if self.relay.stdout.readline() != "ready\n":
            raise network.NetworkError("The relay between the links did not start")

    def _delete(self):
        try:
            if self.relay:
                self._end_relay()
        finally:
            super()._delete()

    def _end_relay(self):
        with contextlib.suppress(BrokenPipeError):  # it may have ended by itself
            self.relay.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.relay.wait(_PATIENCE)
        finally:
            self.relay.kill()
            self.relay.wait()
            self.relay.stdout.close()
