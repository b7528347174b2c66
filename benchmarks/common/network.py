"""The networks between workers: this machine's loopback, or links of limited rate."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

from tf_dgc.multiworker.launch import launcher

RATES = ("loopback", "10gbit", "1gbit", "100mbit")  # as `tc` writes them
# Of what passes at once: small against a step. Where it is below a segment of 64 kB,
# segments are made smaller, or each would be cut into packets on the way, which takes
# more of the processors than many workers leave.
_BURSTS = {"10gbit": "512kb", "1gbit": "512kb"}
_BURST, _SEGMENT = "32kb", 16384
_LARGEST_SEGMENT = 65536

_FIRST_PORT = 20100
_WORKERS = pathlib.Path(__file__).parents[1] / "workers"
TRANSFER, RELAY = _WORKERS / "transfer.py", _WORKERS / "relay.py"
_LOOPBACK = pathlib.Path("/sys/class/net/lo/statistics")


class NetworkError(RuntimeError):
    """The namespaces or their links could not be set up."""


def connect(rate, num_workers, num_clusters, inside=1):
    """Return the context manager of a network on which clusters of workers can run.

    Args:
        rate: of the links; see `RATES`.
        num_workers: of a cluster.
        num_clusters: that there may be, one beside the other.
        inside: workers that have a namespace together, without a limit between them.

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
    return Namespaces(rate, num_workers, inside)


class Loopback(contextlib.nullcontext):
    """All workers on 127.0.0.1, nothing limited.

    Attributes:
        measured_mbit: what the slowest link carried in a test; None, not measured.
    """

    measured_mbit = None

    def __init__(self, num_workers, num_clusters):
        super().__init__(self)
        # All at once: a port is free again, and may be found twice, once it was found.
        self._ports = launcher.free_ports(num_workers * num_clusters)
        self._num_workers = num_workers

    def addresses(self, cluster):
        """Return one address and port per worker of a cluster, given by its number."""
        first = cluster * self._num_workers
        ports = self._ports[first : first + self._num_workers]
        return [f"127.0.0.1:{port}" for port in ports]

    def command(self, rank, command):
        """Return the command that runs `command` where that worker belongs."""
        del rank
        return command

    def sent(self, what="bytes"):
        """Return the bytes, or the "packets", sent so far, all workers together.

        On loopback that is whatever this machine sent to itself.
        """
        return int((_LOOPBACK / f"tx_{what}").read_text())

    def sent_by_each(self):
        """Return the bytes that each worker has sent: zeros, as nobody knows them."""
        return [0] * self._num_workers

    def limit(self, measure=True):
        """Apply the rate (there is none)."""

    def unlimit(self):
        """Lift the limit."""


class Namespaces:
    """One network namespace per machine, joined by a bridge in one more.

    A machine has one worker, or several. A token bucket filter at both ends of its link
    limits what it sends and what it receives. Nothing is added to the namespace that
    this machine itself uses: removing the namespaces removes everything.

    Attributes:
        measured_mbit: what the slowest link carried in a test after `limit`.
    """

    def __init__(self, rate, num_workers, inside=1):
        self._rate = rate
        self._inside = inside
        self._num_workers = num_workers
        prefix = f"dgc{os.getpid()}"
        self._hub = f"{prefix}-hub"
        number = num_workers // inside
        self._machines = [f"{prefix}-m{machine}" for machine in range(number)]
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
        """Return one address and port per worker of a cluster, given by its number."""
        first = _FIRST_PORT + cluster * self._inside
        places = [divmod(rank, self._inside) for rank in range(self._num_workers)]
        return [f"{address(machine)}:{first + place}" for machine, place in places]

    def command(self, rank, command):
        """Return the command that runs `command` where that worker belongs."""
        return self._within(rank // self._inside, command)

    def _within(self, machine, command):
        return ["ip", "netns", "exec", self._machines[machine], *command]

    def sent(self, what="bytes"):
        """Return what all workers' links carried away from them so far.

        Args:
            what: "bytes" or "packets".
        """
        return sum(self.sent_by_each(what))

    def sent_by_each(self, what="bytes"):
        """Return likewise what each machine's link carried, by machine."""
        links = json.loads(run("ip", "-n", self._hub, "-s", "-j", "link"))
        found = {link["ifname"]: link["stats64"]["rx"][what] for link in links}
        return [found[f"port{rank}"] for rank in range(len(self._machines))]

    def limit(self, measure=True):
        """Apply the rate; and measure what the links carry then."""
        for namespace, device in self._ends():
            run(
                *("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root"),
                *("tbf", "rate", self._rate, "burst", _BURSTS.get(self._rate, _BURST)),
                *("latency", "100ms"),
            )
        if self._rate not in _BURSTS:
            self._segment(_SEGMENT)
        if measure:
            self.measured_mbit = min(
                self._transfer(rank) for rank in range(len(self._machines))
            )

    def unlimit(self):
        """Lift the limit."""
        for namespace, device in self._ends():
            run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
        self._segment(_LARGEST_SEGMENT)

    def _segment(self, size):
        """Let no segment that a worker sends have more bytes."""
        for machine in self._machines:
            run("ip", "-n", machine, "link", "set", "eth0", "gso_max_size", str(size))

    def _create(self):
        for namespace in (self._hub, *self._machines):
            run("ip", "netns", "add", namespace)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self._hub, "link", "set", "bridge", "up")
        for i, worker in enumerate(self._machines):
            run(
                *("ip", "link", "add", f"port{i}", "netns", self._hub),
                *("type", "veth", "peer", "name", "eth0", "netns", worker),
            )
            hub, end = ["ip", "-n", self._hub], ["ip", "-n", worker]
            run(*hub, "link", "set", f"port{i}", "master", "bridge", "up")
            run(*end, "address", "add", f"{address(i)}/24", "dev", "eth0")
            run(*end, "link", "set", "eth0", "up")

    def _delete(self):
        for namespace in (*self._machines, self._hub):
            subprocess.run(
                ["ip", "netns", "delete", namespace],
                stderr=subprocess.DEVNULL,  # what was interrupted may lack some
                check=False,
            )

    def _ends(self):
        """Return both ends of every link: namespace and device."""
        for i, worker in enumerate(self._machines):
            yield worker, "eth0"
            yield self._hub, f"port{i}"

    def _transfer(self, rank, seconds=1.0):
        """Return what the link from one worker to the next carries, in Mbit/s."""
        to = (rank + 1) % len(self._machines)
        ends = [(to, "receive"), (rank, "send")]
        command = [sys.executable, str(TRANSFER)]
        receiver, sender = (
            subprocess.Popen(
                self._within(i, [*command, what, address(to), str(seconds)]),
                stdout=subprocess.PIPE,
                text=True,
            )
            for i, what in ends
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


def address(rank):
    """Return the address of a machine."""
    return f"10.77.0.{rank + 1}"


def run(*command):
    """Return what a command prints.

    Raises:
        NetworkError: if it fails, with what it says.
    """
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise NetworkError(f"{' '.join(command)} failed: {finished.stderr.strip()}")
    return finished.stdout
