"""`tf-dgc report`: an HTML page about runs."""

import argparse
import os
import pathlib
import sys

from tf_dgc.reports import record, run_page
from tf_dgc.reports.record import RunRecord


def main(options: argparse.Namespace) -> int:
    """Write the page; return the exit code."""
    try:
        runs = dict(zip(_names(options.runs), map(_read, options.runs), strict=True))
        text = run_page.run_page(runs)
        pathlib.Path(options.out).write_text(text, encoding="utf-8")
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"tf-dgc report: {error}")
    print(f"{options.out}: {', '.join(runs)}, {len(text) / 1000:.0f} kB")
    return 0


def _read(path: str) -> RunRecord:
    return record.read_logdir(path) if os.path.isdir(path) else record.read_record(path)


def _names(paths: list[str]) -> list[str]:
    """Return unique names: file names without suffix if they differ, else paths."""
    names = [pathlib.Path(os.path.abspath(path)).stem for path in paths]
    if len(set(names)) == len(names):
        return names
    if len(set(paths)) < len(paths):
        raise ValueError(f"Runs must be different files. Received: {', '.join(paths)}")
    return paths
