"""Networks of distant workers: links with a rate, and a delay between them.

A kernel without netem cannot delay packets. So each machine's link ends at its own
bridge with a TAP device, and `workers/relay.py` passes frames from device to device
after holding them for half of the round trip. The ends of the links are unchanged:
addresses, TCP with its slow start, rates and byte counts.
"""

import contextlib
import os
import subprocess
import sys

from common import network

RATES = ("10mbit", "100mbit")
_TEST_SECONDS = 4.0  # slow start over a long round trip takes a second
_PATIENCE = 10.0  # seconds for the relay to end


def connect(num_workers):
    """Return a network with a namespace per worker, as a context manager.

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
    """Namespaces whose links have a rate and a delay, which may change.

    At first links have neither.

    Args:
        num_workers: number of workers of a cluster.

    Attributes:
        relay: process that holds the frames.
    """

    def __init__(self, num_workers):
        super().__init__(None, num_workers)
        self.relay = None
        self._link = None  # rate and round trip, if limited
        self._measurements = {}

    def place(self, rate, round_trip_ms):
        """Set the rate of all links and the delay between workers.

        Args:
            rate: rate of both directions of every link, in the notation of `tc`.
            round_trip_ms: milliseconds from a worker to another one and back.
        """
        self._rate = rate
        self._link = rate, round_trip_ms
        self.limit(measure=False)
        self._set_delay(round_trip_ms / 2000)

    def gather(self):
        """Remove rate and delay."""
        if self._link:
            self.unlimit()
        self._link = None
        self._set_delay(0.0)

    def measure(self):
        """Return `mbit` of one connection and `ping_ms`; measures a link once."""
        if self._link not in self._measurements:
            mbit, ping_ms = self._transfer(0, _TEST_SECONDS), 1000 * self.ping()
            self._measurements[self._link] = {"mbit": mbit, "ping_ms": ping_ms}
        return self._measurements[self._link]

    def ping(self):
        """Return the seconds of a round trip between the first two workers."""
        command = [sys.executable, str(network.TRANSFER), "ping", network.address(1)]
        return float(network.run(*self.command(0, command)))

    def _set_delay(self, seconds):
        try:
            self.relay.stdin.write(f"{seconds}\n")
            self.relay.stdin.flush()
        except BrokenPipeError as error:
            raise network.NetworkError(
                f"The relay between the links ended, with code {self.relay.wait()}"
            ) from error

    def _create(self):
        super()._create()
        ip_hub = ["ip", "-n", self._hub]
        exec_hub = ["ip", "netns", "exec", self._hub]
        taps = [f"far{i}" for i in range(len(self._machines))]
        for i, tap in enumerate(taps):
            add = [*exec_hub, "ip", "tuntap", "add", "dev", tap]
            network.run(*add, "mode", "tap", "vnet_hdr")
            network.run(*ip_hub, "link", "add", f"bridge{i}", "type", "bridge")
            network.run(*ip_hub, "link", "set", f"bridge{i}", "up")
            for port in (tap, f"port{i}"):
                network.run(*ip_hub, "link", "set", port, "master", f"bridge{i}", "up")
        self.relay = subprocess.Popen(
            [*exec_hub, sys.executable, str(network.RELAY), *taps],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the benchmark
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
        with contextlib.suppress(BrokenPipeError):  # the relay may have ended
            self.relay.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.relay.wait(_PATIENCE)
        finally:
            self.relay.kill()
            self.relay.wait()
            self.relay.stdout.close()
