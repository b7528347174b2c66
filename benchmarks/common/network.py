"""Networks between workers: this machine's loopback, or links of limited rate."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

from tf_dgc.multiworker.launch import launcher

RATES = ("loopback", "10gbit", "1gbit", "100mbit")  # as `tc` writes them
# Bursts are small in comparison with a step. For bursts below a segment of 64 kB,
# segments are smaller too; splitting them on the way would take more processor time
# than many workers leave.
_BURSTS = {"10gbit": "512kb", "1gbit": "512kb"}
_BURST, _SEGMENT = "32kb", 16384
_LARGEST_SEGMENT = 65536

_FIRST_PORT = 20100
_WORKERS = pathlib.Path(__file__).parents[1] / "workers"
TRANSFER, RELAY = _WORKERS / "transfer.py", _WORKERS / "relay.py"
_LOOPBACK = pathlib.Path("/sys/class/net/lo/statistics")


class NetworkError(RuntimeError):
    """Setting up the namespaces or their links failed."""


def connect(rate, num_workers, num_clusters, node_size=1):
    """Return a network for clusters of workers, as a context manager.

    Args:
        rate: rate of the links; see `RATES`.
        num_workers: number of workers of a cluster.
        num_clusters: largest number of simultaneous clusters.
        node_size: number of workers of a machine, with no limit between them.

    Raises:
        PermissionError: for a limited rate without root.
    """
    if rate == "loopback":
        return Loopback(num_workers, num_clusters)
    if os.geteuid() != 0:
        raise PermissionError(
            f"--rate {rate} puts workers into network namespaces, which needs root. "
            "Run this with sudo, or choose --rate loopback."
        )
    return Namespaces(rate, num_workers, node_size)


class Loopback(contextlib.nullcontext):
    """All workers on 127.0.0.1 without limits.

    Attributes:
        measured_mbit: None; see `Namespaces`.
    """

    measured_mbit = None

    def __init__(self, num_workers, num_clusters):
        super().__init__(self)
        # One call for all: a second call may return the same free port.
        self._ports = launcher.free_ports(num_workers * num_clusters)
        self._num_workers = num_workers

    def addresses(self, cluster):
        """Return one address and port per worker of the cluster with an index."""
        first = cluster * self._num_workers
        ports = self._ports[first : first + self._num_workers]
        return [f"127.0.0.1:{port}" for port in ports]

    def command(self, rank, command):
        """Return the command that runs `command` on a worker's machine."""
        del rank
        return command

    def sent(self, unit="bytes"):
        """Return the "bytes" or "packets" that this machine has sent to itself."""
        return int((_LOOPBACK / f"tx_{unit}").read_text())

    def sent_by_each(self):
        """Return zeros: loopback does not count the bytes of each worker."""
        return [0] * self._num_workers

    def limit(self, measure=True):
        """Do nothing: there is no rate."""

    def unlimit(self):
        """Do nothing: there is no rate."""


class Namespaces:
    """One network namespace per machine, joined by a bridge in another namespace.

    A machine has one worker or several. Token bucket filters at both ends of its link
    limit both directions. The default namespace is not changed: removing the namespaces
    removes everything.

    Attributes:
        measured_mbit: Mbit/s of the slowest link, as measured by `limit`.
    """

    def __init__(self, rate, num_workers, node_size=1):
        self._rate = rate
        self._inside = node_size
        self._num_workers = num_workers
        prefix = f"dgc{os.getpid()}"
        self._hub = f"{prefix}-hub"
        num_machines = num_workers // node_size
        self._machines = [f"{prefix}-m{machine}" for machine in range(num_machines)]
        self.measured_mbit = None

    def __enter__(self):
        try:
            self._create()
        except BaseException:
            self._delete()
            raise
        return self

    def __exit__(self, *_):
        self._delete()

    def addresses(self, cluster):
        """Return one address and port per worker of the cluster with an index."""
        first = _FIRST_PORT + cluster * self._inside
        places = [divmod(rank, self._inside) for rank in range(self._num_workers)]
        return [f"{address(machine)}:{first + place}" for machine, place in places]

    def command(self, rank, command):
        """Return the command that runs `command` on a worker's machine."""
        return self._machine_command(rank // self._inside, command)

    def _machine_command(self, machine, command):
        return ["ip", "netns", "exec", self._machines[machine], *command]

    def sent(self, unit="bytes"):
        """Return the "bytes" or "packets" that all machines have sent."""
        return sum(self.sent_by_each(unit))

    def sent_by_each(self, unit="bytes"):
        """Return the "bytes" or "packets" that each machine has sent."""
        links = json.loads(run("ip", "-n", self._hub, "-s", "-j", "link"))
        counts = {link["ifname"]: link["stats64"]["rx"][unit] for link in links}
        return [counts[f"port{machine}"] for machine in range(len(self._machines))]

    def limit(self, measure=True):
        """Apply the rate, and measure the rate of the links unless told not to."""
        for namespace, device in self._ends():
            run(
                *("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root"),
                *("tbf", "rate", self._rate, "burst", _BURSTS.get(self._rate, _BURST)),
                *("latency", "100ms"),
            )
        if self._rate not in _BURSTS:
            self._set_segment_size(_SEGMENT)
        if measure:
            self.measured_mbit = min(
                self._transfer(machine) for machine in range(len(self._machines))
            )

    def unlimit(self):
        """Remove the limit."""
        for namespace, device in self._ends():
            run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
        self._set_segment_size(_LARGEST_SEGMENT)

    def _set_segment_size(self, size):
        """Set the largest number of bytes of a segment that a worker sends."""
        for machine in self._machines:
            run("ip", "-n", machine, "link", "set", "eth0", "gso_max_size", str(size))

    def _create(self):
        for namespace in (self._hub, *self._machines):
            run("ip", "netns", "add", namespace)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self._hub, "link", "set", "bridge", "up")
        for i, machine in enumerate(self._machines):
            run(
                *("ip", "link", "add", f"port{i}", "netns", self._hub),
                *("type", "veth", "peer", "name", "eth0", "netns", machine),
            )
            ip_hub, ip_machine = ["ip", "-n", self._hub], ["ip", "-n", machine]
            run(*ip_hub, "link", "set", f"port{i}", "master", "bridge", "up")
            run(*ip_machine, "address", "add", f"{address(i)}/24", "dev", "eth0")
            run(*ip_machine, "link", "set", "eth0", "up")

    def _delete(self):
        for namespace in (*self._machines, self._hub):
            subprocess.run(
                ["ip", "netns", "delete", namespace],
                stderr=subprocess.DEVNULL,  # after an interrupt some may be missing
                check=False,
            )

    def _ends(self):
        """Return both ends of every link: namespace and device."""
        for i, machine in enumerate(self._machines):
            yield machine, "eth0"
            yield self._hub, f"port{i}"

    def _transfer(self, machine, seconds=1.0):
        """Return the measured rate from one machine to the next, in Mbit/s."""
        target = (machine + 1) % len(self._machines)
        roles = [(target, "receive"), (machine, "send")]
        command = [sys.executable, str(TRANSFER)]
        receiver, sender = (
            subprocess.Popen(
                self._machine_command(
                    i, [*command, role, address(target), str(seconds)]
                ),
                stdout=subprocess.PIPE,
                text=True,
            )
            for i, role in roles
        )
        try:
            output, _ = receiver.communicate(timeout=60)
            sender.wait(60)
        finally:
            for process in (receiver, sender):
                process.kill()
                process.wait()
                process.stdout.close()
        if receiver.returncode or sender.returncode:
            raise NetworkError("The link between two workers does not work")
        return float(output) / 1e6


def address(machine):
    """Return the address of a machine."""
    return f"10.77.0.{machine + 1}"


def run(*command):
    """Run a command and return its output.

    Raises:
        NetworkError: if it fails, with its error output.
    """
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise NetworkError(f"{' '.join(command)} failed: {finished.stderr.strip()}")
    return finished.stdout
