"""`tf-dgc report`: runs as one page."""

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
    """Return names that differ: of files without their ending, or else whole."""
    names = [pathlib.Path(os.path.abspath(path)).stem for path in paths]
    if len(set(names)) == len(names):
        return names
    if len(set(paths)) < len(paths):
        raise ValueError(f"Runs must differ. Received: {', '.join(paths)}")
    return paths
