"""What a slow link carries, and how long that takes, from the start to a restore.

    sudo python benchmarks/slow_link.py --rate 10mbit --parameters 25_000_000

Two workers in network namespaces, whose links have the rate from the beginning. Bytes
are counted on the links, protocols included, all workers together.
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

_RATE = flags.DEFINE_string("rate", "10mbit", "Of every link, as `tc` writes it.")
_PARAMETERS = flags.DEFINE_integer("parameters", 25_000_000, "Of the model, about.")
_SEEDS = flags.DEFINE_enum("seeds", "different", ["equal", "different"], "Of weights.")
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
        network.connect(rate, 2, 1) as links,
    ):
        if rate != "loopback":
            links.limit(measure=False)
        settings = {
            "mode": "dgc",
            "parameters": parameters,
            "seeds": seeds,
            "directory": directory,
        }
        workers = Cluster(
            settings, links.addresses(0), links, timeout, "slow_link_worker.py"
        )
        with workers:
            return [
                {"rate": rate, "seeds": seeds, **_phase(workers, links, p, parameters)}
                for p in progress.track(PHASES, "phases", str)
            ]


def _phase(workers, links, name, parameters):
    before, start = links.sent(), time.monotonic()
    answers = workers.ask(do=name)
    if len({answer["result"] for answer in answers}) > 1:
        raise WorkerError(f"After {name!r} the workers differ: {answers}")
    seconds, sent = time.monotonic() - start, links.sent() - before
    print(f"{name}: {seconds:.1f} s, {sent / 1e6:.2f} MB", file=sys.stderr, flush=True)
    return {
        "phase": name,
        "seconds": seconds,
        "megabytes": sent / 1e6,
        "of_weights": sent / (4 * parameters),
    }


if __name__ == "__main__":
    app.run(main)
