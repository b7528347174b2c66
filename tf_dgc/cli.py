"""The command line: `tf-dgc run`, `tf-dgc doctor`, `tf-dgc methods`."""

import argparse
import os
import sys
from collections.abc import Sequence

from tf_dgc import launcher


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        from tf_dgc import doctor

        return doctor.main()
    if options.command == "methods":
        from tf_dgc import listing

        return listing.main(options.size)
    if not os.path.isfile(options.script):
        parser.error(f"no such script: {options.script}")
    command = [sys.executable, options.script, *options.args]
    return launcher.launch(command, options.workers, max_restarts=options.max_restarts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tf-dgc", description="Deep Gradient Compression for Keras."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a training script on several workers on this machine",
        description="Start one process per worker on this machine with TF_CONFIG set, "
        "pass on their output behind their rank, and end all of them as soon as one "
        "fails. With --max-restarts all are then started again, up to K times, with "
        "the number of the attempt in TF_DGC_ATTEMPT; the script resumes from its own "
        "backup. On several machines, set TF_CONFIG yourself and start the script "
        "directly.",
    )
    run.add_argument(
        "--workers", type=_count, required=True, metavar="N", help="number of workers"
    )
    run.add_argument(
        "--max-restarts",
        type=_count_or_0,
        default=0,
        metavar="K",
        help="how often to start all workers again after one failed (0)",
    )
    run.add_argument("script", help="a Python script; it makes its own strategy")
    run.add_argument(
        "args", nargs=argparse.REMAINDER, help="arguments passed to the script"
    )
    commands.add_parser(
        "doctor",
        help="tell whether the native operations are in use, and why",
        description="Print versions, compiler and the state of the native operations. "
        "Exits with 0 if they are in use or TF_DGC_NATIVE=0 forbids them, else with 1.",
    )
    methods = commands.add_parser(
        "methods",
        help="list the compression methods",
        description="Print name, kind, bytes per element, state, error feedback and "
        "reference of every compression method of the package, with its defaults.",
    )
    methods.add_argument(
        "--size",
        type=_count,
        default=1_000_000,
        metavar="N",
        help="entries of the tensor that bytes per element are of (1,000,000)",
    )
    return parser


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"must be a whole number, {least} or more; received: {text}"
        )
    return int(text)


def _count_or_0(text: str) -> int:
    return _count(text, least=0)
