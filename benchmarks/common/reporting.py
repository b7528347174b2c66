"""What the benchmarks share: the closing table, and JSON that says what was measured.

    reporting.report(rows, columns, "Compressing 1 M entries", json_path)

A row is a dictionary; a column is (key, heading, format), with a format specification
of Python, such as ",d" or ".1f".
"""

import io
import json
import os
import pathlib
import platform
import subprocess

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from common import progress


def report(rows, columns, title, json_path=None, origin=None):
    """Print the rows as a table, and below it in which setting they were measured.

    All of it is written as JSON if a path is given.

    Args:
        rows: dictionaries; what a row lacks, or is None, is left blank in the table.
        columns: (key, heading, format) of what the table shows, in this order.
        title: of the table.
        json_path: a file for the rows with all their keys, and versions and commit.
        origin: a dictionary of the latter; that of `provenance` if it is None.
    """
    progress.stop()
    origin = provenance() if origin is None else origin
    _print(_table(rows, columns, title=title), Console())
    print(setting(rows, origin))
    if json_path:
        write(rows, json_path, origin)


def report_all(tables, path=None):
    """Print several tables of rows that say their own setting, as `report` does.

    Args:
        tables: (title, rows, columns) of each, and lines of text to stand below it.
        path: a file for all of them as Markdown; None for none.
    """
    text = []
    for title, rows, columns, *notes in tables:
        report(rows, columns, title, origin={})
        for note in notes:
            print(note)
        text += [f"### {title}", markdown(rows, columns), setting(rows, {}), *notes]
    if path:
        pathlib.Path(path).write_text("\n\n".join(text) + "\n", encoding="utf-8")


def setting(rows, origin):
    """Return the processor, and whether TensorFlow used oneDNN, of all rows.

    Times of different settings do not compare: if rows differ, the text says so.

    Args:
        rows: dictionaries; what they say of themselves goes before `origin`.
        origin: a dictionary, as of `provenance`.
    """
    found = dict.fromkeys(_setting({**origin, **row}) for row in rows)
    if len(found) == 1:
        return next(iter(found))
    return "Times do not compare, for settings differ: " + "; ".join(found)


def _setting(row):
    if "card" in row:
        return row["card"]
    onednn = {True: "on", False: "off"}.get(row.get("onednn"), "unknown")
    text = f"Processor: {row.get('processor', 'unknown')}, oneDNN {onednn}"
    slow = row.get("no_native_operations")
    return f"{text}, no native operations ({slow})" if slow else text


def markdown(rows, columns):
    """Return the table as Markdown, for the documentation; see `report`."""
    text = io.StringIO()
    _print(_table(rows, columns, box=box.MARKDOWN), Console(file=text))
    return "\n".join(line for line in text.getvalue().splitlines() if line.strip())


def write(rows, path, origin=None):
    """Write rows as JSON, with all their keys, and with `origin`.

    Args:
        rows: dictionaries.
        path: of the file.
        origin: what else to say of every row, where it does not itself; None for
            `provenance()`.
    """
    origin = provenance() if origin is None else origin
    text = json.dumps([{**origin, **row} for row in rows], indent=2)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


def provenance():
    """Return versions, commit, processor, and what operations take their times.

    TensorFlow's may use oneDNN; why there are no native ones is said where there are
    none.

    The commit is the benchmark's, with "-dirty" if files differ from it. It is also
    that of the package where this was imported from the same checkout.
    """
    import keras
    import tensorflow as tf

    import tf_dgc
    from tf_dgc import native_library
    from tf_dgc._internals import tracing
    from tf_dgc.multiworker.launch.onednn import processor

    native = native_library.load_library()
    checkout, package = (pathlib.Path(f).resolve() for f in (__file__, tf_dgc.__file__))
    return {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tf_dgc": tf_dgc.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "package_from_checkout": package.parents[1] == checkout.parents[2],
        "cpus": os.cpu_count(),
        "processor": processor(),
        "onednn": tracing.uses_onednn(),
        "no_native_operations": None if native.library else native.reason,
    }


def _table(rows, columns, **style):
    table = Table(**style)
    for _, heading, _ in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(_cell(row.get(key), spec) for key, _, spec in columns))
    return table


def _print(table, console):
    # A table that is wider than the terminal, or than 80 characters in a file, is
    # still better than one with its figures cut off.
    unlimited = console.options.update(width=1000)
    console.width = Measurement.get(console, unlimited, table).maximum
    console.print(table)


def _cell(value, spec):
    return "" if value is None else format(value, spec)


def commit():
    """Return the checkout's commit, with "-dirty" if files differ from it."""
    found = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    if found is None or changes is None:
        return "unknown"  # not a checkout
    return found + ("-dirty" if changes else "")


def _git(*arguments):
    folder = pathlib.Path(__file__).parent
    # With sudo, the checkout is somebody else's, which git distrusts.
    command = ["git", "-C", str(folder), "-c", "safe.directory=*", *arguments]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.strip()
