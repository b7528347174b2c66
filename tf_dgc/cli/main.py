"""The command line: `tf-dgc run`, `serve`, `doctor`, `methods` and others."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import tf_dgc


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    return options.run(options)


def _doctor(options: argparse.Namespace) -> int:
    _load()
    from tf_dgc.cli import doctor

    return doctor.main()


def _methods(options: argparse.Namespace) -> int:
    _load()
    from tf_dgc.cli import listing

    return listing.main(options.size)


def _exchanges(options: argparse.Namespace) -> int:
    _load()
    from tf_dgc.cli import listing

    return listing.list_exchanges(options.workers)


def _advise(options: argparse.Namespace) -> int:
    _load()
    from tf_dgc.cli import advise

    return advise.main(options)


def _load() -> None:
    """Load TensorFlow, or end with the reason why it cannot be used."""
    try:
        import tf_dgc._everything  # noqa: F401
    except ImportError as error:
        sys.exit(f"tf-dgc: {error}")


def _run(options: argparse.Namespace) -> int:
    if options.workers is None:
        options.error(_about_workers(options.script, options.args))
    if not os.path.isfile(options.script):
        options.error(f"no such script: {options.script}")
    from tf_dgc.launch import launcher

    command = [sys.executable, options.script, *options.args]
    if options.log_dir is not None:
        try:
            os.makedirs(options.log_dir, exist_ok=True)
        except OSError as error:
            options.error(f"--log-dir: {error}")
    return launcher.launch(
        command,
        options.workers,
        max_restarts=options.max_restarts,
        show_all=options.output == "all",
        log_dir=options.log_dir,
        num_servers=options.servers,
    )


def _serve(options: argparse.Namespace) -> int:
    _load()
    from tf_dgc.cli import serving

    return serving.main()


def _about_workers(script: str, arguments: Sequence[str]) -> str:
    usage = f"tf-dgc run --workers N {script}"
    if not any(a.split("=")[0] == "--workers" for a in arguments):
        return f"the number of workers is missing: {usage}"
    return (
        "options of `tf-dgc run` come before the script, and what comes after "
        f"{script} is passed on to it: {usage}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tf-dgc", description="Deep Gradient Compression for Keras."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="tell the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_serve(commands)
    _add_doctor(commands)
    _add_methods(commands)
    _add_exchanges(commands)
    _add_advise(commands)
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a training script on several workers on this machine",
        description="Start one process per worker on this machine with TF_CONFIG set, "
        "show what the first one prints, and end all of them as soon as one fails. "
        "With --max-restarts all are then started again, up to K times, with "
        "the number of the attempt in TF_DGC_ATTEMPT; the script resumes from its own "
        "backup. On several machines, set TF_CONFIG yourself and start the script "
        "directly.",
    )
    run.set_defaults(run=_run, error=run.error)
    run.add_argument(
        "--workers", type=_count, metavar="N", help="number of workers, always needed"
    )
    run.add_argument(
        "--servers",
        type=_count_or_0,
        choices=(0, 1),
        default=0,
        metavar="S",
        help="number of parameter servers for tf_dgc.ServerOptimizer, 0 or 1 (0)",
    )
    run.add_argument(
        "--max-restarts",
        type=_count_or_0,
        default=0,
        metavar="K",
        help="how often to start all workers again after one failed (0)",
    )
    run.add_argument(
        "--output",
        choices=("first", "all"),
        default="first",
        help="whose lines to show: the first worker's, or those of all, each behind "
        "its rank (first)",
    )
    run.add_argument(
        "--log-dir",
        metavar="DIR",
        help="where to write all that the workers print, TensorFlow's log included, to "
        "worker-RANK.log (a temporary directory, kept if a worker fails)",
    )
    run.add_argument("script", help="a Python script; it makes its own strategy")
    run.add_argument(
        "args", nargs=argparse.REMAINDER, help="arguments passed to the script"
    )


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="be the parameter server that TF_CONFIG says this process is",
        description="Serve the workers that TF_CONFIG names, which train with "
        "tf_dgc.ServerOptimizer, at the address that it names for the one task of type "
        "ps, which is this process; end when they have left. `tf-dgc run --servers 1` "
        "does so by itself. docs/server.md says what protects it.",
    )
    serve.set_defaults(run=_serve)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="tell whether the native operations are in use, and why",
        description="Print versions, compiler and the state of the native operations. "
        "Exits with 0 if they are in use or TF_DGC_NATIVE=0 forbids them, else with 1.",
    )
    doctor.set_defaults(run=_doctor)


def _add_exchanges(commands: Any) -> None:
    ways = commands.add_parser(
        "exchanges",
        help="list the exchanges",
        description="Print name, rounds and bytes of every way in which workers sum "
        "and gather, with its defaults; docs/exchanges.md says which one when.",
    )
    ways.set_defaults(run=_exchanges)
    ways.add_argument(
        "--workers",
        type=_count,
        default=8,
        metavar="N",
        help="number of workers (8)",
    )


def _add_methods(commands: Any) -> None:
    methods = commands.add_parser(
        "methods",
        help="list the compression methods",
        description="Print name, kind, bytes per element, state, error feedback and "
        "reference of every compression method of the package, with its defaults.",
    )
    methods.set_defaults(run=_methods)
    methods.add_argument(
        "--size",
        type=_count,
        default=1_000_000,
        metavar="N",
        help="entries of the tensor that bytes per element are of (1,000,000)",
    )


def _add_advise(commands: Any) -> None:
    advise = commands.add_parser(
        "advise",
        help="tell which way to train is the fastest for a model on some links",
        description="Time a step of a model on this machine by several ways to train, "
        "and print what several workers are predicted to take, each on a machine like "
        "this one; * is what is advised. docs/advice.md says how well that is known.",
    )
    advise.set_defaults(run=_advise)
    advise.add_argument(
        "model",
        help="a .keras file, or a function's name, as keras.applications.ResNet50",
    )
    advise.add_argument(
        "--batch-size", type=_count, default=32, metavar="B", help="of a worker (32)"
    )
    advise.add_argument(
        "--workers",
        type=_counts,
        default=[2, 4, 8],
        metavar="N,...",
        help="numbers of workers (2,4,8)",
    )
    advise.add_argument(
        "--bandwidth", default="1gbit", help="of a worker's link, both ways (1gbit)"
    )
    advise.add_argument(
        "--latency", default="0.2ms", help="round trip between two workers (0.2ms)"
    )
    advise.add_argument(
        "--methods",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help="dgc, 'dgc 0.99', 'local_sgd 16', or methods of `tf-dgc methods`",
    )
    advise.add_argument(
        "--seconds", type=float, default=20.0, help="to spend on timed steps (20)"
    )
    advise.add_argument("--json", metavar="PATH", help="file to write the rows to")


class _Version(argparse.Action):
    """Reads the version when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"tf_dgc {tf_dgc.__version__}")
        parser.exit()


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"must be a whole number, {least} or more; received: {text}"
        )
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _count_or_0(text: str) -> int:
    return _count(text, least=0)
