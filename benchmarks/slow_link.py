"""Measures time and bytes of each phase of training over a slow link.

    sudo python benchmarks/slow_link.py --rate 10mbit --parameters 25_000_000

Two workers run in network namespaces with links of the rate from the beginning. Bytes
are counted on the links of both workers and include protocols.
"""

import sys
import tempfile
import time

from absl import app, flags
from common import network, progress, reporting
from common.cluster import Cluster, WorkerError

PHASES = [
    *("connect", "build", "train"),
    *("backup", "resume", "save", "restore", "digest"),
]
COLUMNS = [
    ("rate", "rate", ""),
    ("seeds", "seeds", ""),
    ("phase", "phase", ""),
    ("seconds", "seconds", ",.1f"),
    ("megabytes", "MB", ",.2f"),
    ("of_weights", "of the weights", ".3f"),
]

_RATE = flags.DEFINE_string("rate", "10mbit", "Rate of the links, as for `tc`.")
_PARAMETERS = flags.DEFINE_integer(
    "parameters", 25_000_000, "Size of the model, about."
)
_SEEDS = flags.DEFINE_enum("seeds", "different", ["equal", "different"], "Seeds.")
_TIMEOUT = flags.DEFINE_float("timeout", 3600.0, "Seconds that a phase may take.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")


def main(_):
    """Run all phases, and report."""
    try:
        rows = measure(_RATE.value, _PARAMETERS.value, _SEEDS.value, _TIMEOUT.value)
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"slow_link.py: {error}")
    reporting.report(rows, COLUMNS, "Two workers on a slow link", _JSON.value)


def measure(rate, parameters, seeds, timeout):
    """Return one row per phase.

    Raises:
        WorkerError: if a worker fails, or does not answer in time.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        network.connect(rate, 2, 1) as net,
    ):
        if rate != "loopback":
            net.limit(measure=False)
        settings = {
            "mode": "dgc",
            "parameters": parameters,
            "seeds": seeds,
            "directory": directory,
        }
        cluster = Cluster(
            settings, net.addresses(0), net, timeout, "slow_link_worker.py"
        )
        with cluster:
            return [
                {
                    "rate": rate,
                    "seeds": seeds,
                    **_run_phase(cluster, net, phase, parameters),
                }
                for phase in progress.track(PHASES, "phases", str)
            ]


def _run_phase(cluster, net, name, parameters):
    before, start = net.sent(), time.monotonic()
    answers = cluster.ask(do=name)
    if len({answer["result"] for answer in answers}) > 1:
        raise WorkerError(f"After {name!r} the workers differ: {answers}")
    seconds, sent = time.monotonic() - start, net.sent() - before
    print(f"{name}: {seconds:.1f} s, {sent / 1e6:.2f} MB", file=sys.stderr, flush=True)
    return {
        "phase": name,
        "seconds": seconds,
        "megabytes": sent / 1e6,
        "of_weights": sent / (4 * parameters),
    }


if __name__ == "__main__":
    app.run(main)
