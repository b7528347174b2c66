"""The command line `tf-dgc`."""

import argparse
import os
import pathlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import tf_dgc
from tf_dgc.arguments import LAST_PORT
from tf_dgc.cli import parsers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    return options.run(options)


def _doctor(options: argparse.Namespace) -> int:
    if problem := _ssh_problem(options.ssh) if options.hosts else None:
        options.error(f"--ssh: {problem}; received: {options.ssh!r}")
    _load()
    from tf_dgc.cli import doctor

    return doctor.main(options.hosts, options.ssh)


def _methods(options: argparse.Namespace) -> int:
    from tf_dgc.cli import listing

    if options.size == listing.SIZE:
        rows = listing.read_tables().methods
    else:
        _load()
        from tf_dgc.cli import tables

        rows = tables.method_rows(options.size)
    listing.print_methods(rows, options.size)
    return 0


def _collectives(options: argparse.Namespace) -> int:
    from tf_dgc.cli import listing

    if options.workers == listing.WORKERS:
        rows = listing.read_tables().collectives
    else:
        _load()
        from tf_dgc.cli import tables

        rows = tables.collective_rows(options.workers)
    listing.print_collectives(rows, options.workers)
    return 0


def _advise(options: argparse.Namespace) -> int:
    if (options.model is None) == (options.named is None):
        options.error("give one model, by itself or with --model")
    options.model = options.model or options.named
    if options.measure and (options.bandwidth or options.latency):
        options.error("--measure replaces --bandwidth and --latency")
    _load()
    from tf_dgc.cli import advise

    return advise.main(options)


def _report(options: argparse.Namespace) -> int:
    if any(map(os.path.isdir, options.runs)):
        _load()  # before tensorboard loads it
    from tf_dgc.reports import record, run_page

    def read(path: str) -> record.RunRecord:
        is_logdir = os.path.isdir(path)
        return record.read_logdir(path) if is_logdir else record.read_record(path)

    try:
        runs = dict(zip(_run_names(options.runs), map(read, options.runs), strict=True))
        text = run_page.run_page(runs)
        pathlib.Path(options.out).write_text(text, encoding="utf-8")
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"tf-dgc report: {error}")
    print(f"{options.out}: {', '.join(runs)}, {len(text) / 1000:.0f} kB")
    return 0


def _run_names(paths: list[str]) -> list[str]:
    """Return unique names: file names without suffix if they differ, else paths."""
    names = [pathlib.Path(os.path.abspath(path)).stem for path in paths]
    if len(set(names)) == len(names):
        return names
    if len(set(paths)) < len(paths):
        raise ValueError(f"Runs must be different files. Received: {', '.join(paths)}")
    return paths


def _load() -> None:
    """Load TensorFlow, or exit with the reason why it cannot be used."""
    from tf_dgc.cli import quiet

    try:
        with quiet.without_tensorflow_log():
            import tf_dgc._everything  # noqa: F401
    except ImportError as error:
        sys.exit(f"tf-dgc: {error}")


def _run(options: argparse.Namespace) -> int:
    num_workers = len(options.hosts) if options.hosts else options.workers
    if num_workers is None:
        options.error(_missing_workers(options.script, options.args))
    if options.hosts and (
        options.servers or options.workers not in (None, num_workers)
    ):
        options.error("--hosts starts one worker per host, and no servers")
    if options.hosts and (problem := _ssh_problem(options.ssh)):
        options.error(f"--ssh: {problem}; received: {options.ssh!r}")
    if not options.module and not os.path.isfile(options.script):
        options.error(f"no such script: {options.script}")
    from tf_dgc.multiworker.launch import launcher

    flags = ["-m"] if options.module else []
    command = [sys.executable, *flags, options.script, *options.args]
    if options.log_dir is not None:
        try:
            os.makedirs(options.log_dir, exist_ok=True)
        except OSError as error:
            options.error(f"--log-dir: {error}")
    hosts = None
    if options.hosts:
        hosts = launcher.Hosts(options.hosts, options.port, options.ssh)
        last = launcher.last_port(hosts, 1 + options.max_restarts)
        if last > LAST_PORT:
            options.error(
                f"--port: with --max-restarts {options.max_restarts} ports up to "
                f"{last} are needed, and {LAST_PORT} is the last"
            )
    return launcher.launch(
        command,
        num_workers,
        max_restarts=options.max_restarts,
        show_all=options.output == "all",
        log_dir=options.log_dir,
        num_servers=options.servers,
        hosts=hosts,
    )


def _remote(options: argparse.Namespace) -> int:
    from tf_dgc.multiworker.launch import remote

    return remote.main()


def _serve(options: argparse.Namespace) -> int:
    _load()
    from tf_dgc.server import process, tasks

    try:
        task = tasks.find_task()
        if task.worker is not None:
            raise ValueError(
                "This process must be a server, a task of type `ps`, according to the "
                "environment variable TF_CONFIG. Received: a worker's task, with index "
                f"{task.worker}"
            )
        process.serve_and_exit(task)
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"tf-dgc: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _missing_workers(script: str, arguments: Sequence[str]) -> str:
    usage = f"tf-dgc run --workers N {script}"
    if not any(a.split("=")[0] == "--workers" for a in arguments):
        return f"the number of workers is missing: {usage}"
    return (
        "options of `tf-dgc run` come before the script; arguments after "
        f"{script} are passed to it: {usage}"
    )


def _ssh_problem(command: str) -> str | None:
    try:
        program, *_ = shlex.split(command) or [""]
    except ValueError as error:
        return str(error)
    return None if shutil.which(program) else f"there is no program {program!r}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tf-dgc", description="Deep Gradient Compression for Keras."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers.add_run(commands, _run)
    parsers.add_remote(commands, _remote)
    parsers.add_serve(commands, _serve)
    parsers.add_doctor(commands, _doctor)
    parsers.add_methods(commands, _methods)
    parsers.add_collectives(commands, _collectives)
    parsers.add_advise(commands, _advise)
    parsers.add_report(commands, _report)
    return parser


class _Version(argparse.Action):
    """Prints the version, which is read only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"tf_dgc {tf_dgc.__version__}")
        parser.exit()
