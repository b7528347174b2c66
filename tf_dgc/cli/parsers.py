"""Argument parsers of the commands."""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from tf_dgc import arguments
from tf_dgc.cli import listing
from tf_dgc.multiworker.launch import launcher

_DOCTOR_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5"
_HOST = re.compile(r"(?:\w[\w.-]*@)?(?:\w[\w.-]*|\[[0-9A-Fa-f:.]+\])")


def positive_count(text: str, least: int = 1) -> int:
    """Return a whole number, `least` or more."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"must be a whole number, {least} or more; received: {text}"
        )
    return int(text)


def nonnegative_count(text: str) -> int:
    """Return a whole number, 0 or more."""
    return positive_count(text, least=0)


def port_number(text: str) -> int:
    """Return a port."""
    if not arguments.is_port(text):
        raise argparse.ArgumentTypeError(
            f"must be a port, from 1 to {arguments.LAST_PORT}; received: {text}"
        )
    return int(text)


def positive_counts(text: str) -> list[int]:
    """Return comma-separated whole numbers, 1 or more."""
    return [positive_count(part) for part in text.split(",")]


def positive_number(text: str) -> float:
    """Return a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0; received: {text}")
    return number


def host_names(text: str) -> list[str]:
    """Return comma-separated names of hosts."""
    names = text.split(",")
    if not all(_HOST.fullmatch(name) for name in names):
        raise argparse.ArgumentTypeError(
            "must be comma-separated names of hosts, such as a, me@a or [::1], twice "
            "for two workers, without ports or numbers of workers; "
            f"received: {text}"
        )
    return names


Command: TypeAlias = Callable[[argparse.Namespace], int]


def add_run(commands: Any, command: Command) -> None:
    """Add `tf-dgc run`."""
    run = commands.add_parser(
        "run",
        help="run a training script on several workers, here or on other machines",
        description="Start one process per worker with TF_CONFIG set, on this machine "
        "or by ssh on those of --hosts, show the output of the first worker, and end "
        "all of them as soon as one fails. With --max-restarts all are then restarted, "
        "up to K times, with the number of the attempt in TF_DGC_ATTEMPT; the script "
        "resumes from its own backup. Any other program may start the workers instead, "
        "if it sets TF_CONFIG for each: see help(tf_dgc.multi_worker_strategy), and "
        "help(tf_dgc.cluster.from_slurm) for Slurm.",
    )
    run.set_defaults(run=command, error=run.error)
    run.add_argument(
        "--workers",
        type=positive_count,
        metavar="N",
        help="number of workers on this machine",
    )
    run.add_argument(
        "--hosts",
        type=host_names,
        metavar="A,B,...",
        help="machines, with one worker each; name one twice for two workers. The "
        "directory and Python must have the same paths as here, and ssh must need no "
        "password",
    )
    run.add_argument(
        "--port",
        type=port_number,
        default=launcher.PORT,
        metavar="P",
        help=f"first port on which workers on --hosts listen ({launcher.PORT})",
    )
    run.add_argument(
        "--ssh",
        default=launcher.SSH,
        metavar="COMMAND",
        help="command to which a host and a command to run there are appended "
        f"({launcher.SSH})",
    )
    run.add_argument(
        "--servers",
        type=nonnegative_count,
        default=0,
        metavar="S",
        help="number of parameter servers for tf_dgc.ServerOptimizer (0)",
    )
    run.add_argument(
        "--max-restarts",
        type=nonnegative_count,
        default=0,
        metavar="K",
        help="how often to restart all workers after one failed (0)",
    )
    run.add_argument(
        "--output",
        choices=("first", "all"),
        default="first",
        help="whose output to show: the first worker's, or that of all workers with "
        "their ranks (first)",
    )
    run.add_argument(
        "--log-dir",
        metavar="DIR",
        help="directory of the workers' output, including TensorFlow's log, in "
        "worker-RANK.log (a temporary directory, kept if a worker fails)",
    )
    run.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="run a module by its name, as with `python -m`",
    )
    run.add_argument("script", help="a Python script that creates its strategy")
    run.add_argument(
        "args", nargs=argparse.REMAINDER, help="arguments passed to the script"
    )


def add_remote(commands: Any, command: Command) -> None:
    """Add `tf-dgc remote`, which only `tf-dgc run --hosts` starts."""
    commands.add_parser("remote").set_defaults(run=command)


def add_serve(commands: Any, command: Command) -> None:
    """Add `tf-dgc serve`."""
    serve = commands.add_parser(
        "serve",
        help="run the parameter server that TF_CONFIG configures",
        description="Serve workers that train with tf_dgc.ServerOptimizer, at the "
        "address of this process's task of type ps in TF_CONFIG, until they have left. "
        "`tf-dgc run --servers S` does so by itself. Set the same secret in "
        "TF_DGC_SECRET for all processes, or anyone who can reach the address can "
        "train the model. Messages are not encrypted, so use a trusted network.",
    )
    serve.set_defaults(run=command)


def add_doctor(commands: Any, command: Command) -> None:
    """Add `tf-dgc doctor`."""
    doctor = commands.add_parser(
        "doctor",
        help="check this installation, TF_CONFIG if set, and other machines",
        description="Print versions, compiler and the state of the native operations. "
        "If TF_CONFIG is set, check it, this task's port and the names of the other "
        "hosts. With --hosts, check that ssh needs no password, and that the same "
        "versions are installed there. Exits with 1 if a check fails or the native "
        "operations are missing, unless TF_DGC_NATIVE=0 forbids them; else with 0.",
    )
    doctor.set_defaults(run=command, error=doctor.error)
    doctor.add_argument(
        "--hosts",
        type=host_names,
        default=[],
        metavar="A,B,...",
        help="machines to check, as for tf-dgc run --hosts",
    )
    doctor.add_argument(
        "--ssh",
        default=_DOCTOR_SSH,
        metavar="COMMAND",
        help=f"command to which a host and a command to run there are appended "
        f"({_DOCTOR_SSH})",
    )


def add_collectives(commands: Any, command: Command) -> None:
    """Add `tf-dgc collectives`."""
    collectives = commands.add_parser(
        "collectives",
        help="list the collective algorithms",
        description="Print rounds and bytes of every algorithm for all-reduce and "
        "all-gather, with its defaults, and say which to use. Settings: "
        "help(tf_dgc.collectives.Ring), and so on.",
    )
    collectives.set_defaults(run=command)
    collectives.add_argument(
        "--workers",
        type=positive_count,
        default=listing.WORKERS,
        metavar="N",
        help=f"number of workers ({listing.WORKERS})",
    )


def add_methods(commands: Any, command: Command) -> None:
    """Add `tf-dgc methods`."""
    methods = commands.add_parser(
        "methods",
        help="list the compression methods",
        description="Say which method to start with, and print bytes per entry, error "
        "feedback, reference and state of every compression method of the package, "
        "with its defaults.",
    )
    methods.set_defaults(run=command)
    methods.add_argument(
        "--size",
        type=positive_count,
        default=listing.SIZE,
        metavar="N",
        help=f"number of entries of the tensor ({listing.SIZE:,})",
    )


def add_advise(commands: Any, command: Command) -> None:
    """Add `tf-dgc advise`."""
    advise = commands.add_parser(
        "advise",
        help="advise the fastest method for a model on given links",
        description="Time a step of a model on this machine with several methods, and "
        "print the predicted steps of several workers, each on a machine like this "
        "one; * marks the advice. It is about speed alone: help(tf_dgc.advise).",
    )
    advise.set_defaults(run=command, error=advise.error)
    advise.add_argument(
        "model",
        nargs="?",
        help="a .keras file, or the name of a function that returns a model, such as "
        "keras.applications.ResNet50, also in a module of this directory",
    )
    advise.add_argument(
        "--model", dest="named", metavar="MODEL", help="the same, as an option"
    )
    advise.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="module to import before a file is loaded, for custom layers; may be "
        "given several times",
    )
    advise.add_argument(
        "--batch-size",
        type=positive_count,
        default=32,
        metavar="B",
        help="examples of a worker's step (32)",
    )
    advise.add_argument(
        "--workers",
        type=positive_counts,
        metavar="N,...",
        help="numbers of workers (2,4,8; with --measure that of TF_CONFIG)",
    )
    advise.add_argument(
        "--length",
        type=positive_count,
        metavar="N",
        help="length of axes without a fixed length; words of a text (32)",
    )
    advise.add_argument(
        "--bandwidth",
        help="rate of a worker's link, in both directions at once (1gbit)",
    )
    advise.add_argument("--latency", help="round trip between two workers (0.2ms)")
    advise.add_argument(
        "--methods",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help="dgc, 'dgc 0.99', 'local_sgd 16', or methods of `tf-dgc methods`",
    )
    advise.add_argument(
        "--seconds",
        type=positive_number,
        default=20.0,
        help="time to spend on timed steps (20)",
    )
    advise.add_argument(
        "--measure",
        action="store_true",
        help="measure the links between the workers of TF_CONFIG, instead of "
        "--bandwidth and --latency: tf-dgc run --workers 2 -m tf_dgc advise MODEL "
        "--measure",
    )
    advise.add_argument(
        "--json",
        metavar="PATH",
        help="JSON file to write: rows, advice, links and turning points",
    )
    advise.add_argument(
        "--html", metavar="PATH", help="HTML page to write, with figures"
    )


def add_report(commands: Any, command: Command) -> None:
    """Add `tf-dgc report`."""
    report = commands.add_parser(
        "report",
        help="write a page about runs: loss against steps, bytes and time, and more",
        description="Write a self-contained HTML page that compares runs: metrics "
        "against steps, bytes and time, compression ratio, staleness, bytes of each "
        "layer. help(tf_dgc.callbacks.CompressionMonitor) describes records.",
    )
    report.set_defaults(run=command)
    report.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a file of CompressionMonitor(path=...), or a directory of Keras's "
        "TensorBoard callback",
    )
    report.add_argument(
        "--out",
        default="report.html",
        metavar="FILE",
        help="page to write (report.html)",
    )
