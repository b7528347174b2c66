"""Reports the rows of a benchmark as a table, Markdown, and JSON with provenance.

    reporting.report(rows, columns, "Compressing 1 M entries", json_path)

A row is a dictionary; a column is (key, heading, format), with a Python format
specification such as ",d" or ".1f".
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
    """Print the rows as a table, with the setting of the measurement below.

    Args:
        rows: dictionaries; missing values and None are blank in the table.
        columns: (key, heading, format) of each column.
        title: title of the table.
        json_path: a JSON file for the rows with all their keys and the origin.
        origin: dictionary of versions and commit; None for that of `provenance`.
    """
    progress.stop()
    origin = provenance() if origin is None else origin
    _print(_table(rows, columns, title=title), Console())
    print(setting(rows, origin))
    if json_path:
        write(rows, json_path, origin)


def report_all(tables, path=None):
    """Print several tables, as `report` does, of rows that contain their origin.

    Args:
        tables: (title, rows, columns, *lines of text below) of each table.
        path: a Markdown file for all of them; None for none.
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
    """Return the processor, and whether TensorFlow used oneDNN, as a sentence.

    Times of different settings are not comparable: if rows differ, the text says so.

    Args:
        rows: dictionaries; their values take precedence over `origin`.
        origin: a dictionary with keys of `provenance`.
    """
    settings = dict.fromkeys(_row_setting({**origin, **row}) for row in rows)
    if len(settings) == 1:
        return next(iter(settings))
    return "Times do not compare, for settings differ: " + "; ".join(settings)


def _row_setting(row):
    if "card" in row:
        return row["card"]
    onednn = {True: "on", False: "off"}.get(row.get("onednn"), "unknown")
    text = f"Processor: {row.get('processor', 'unknown')}, oneDNN {onednn}"
    reason = row.get("no_native_operations")
    return f"{text}, no native operations ({reason})" if reason else text


def markdown(rows, columns):
    """Return the table as Markdown; arguments as for `report`."""
    text = io.StringIO()
    _print(_table(rows, columns, box=box.MARKDOWN), Console(file=text))
    return "\n".join(line for line in text.getvalue().splitlines() if line.strip())


def write(rows, path, origin=None):
    """Write rows with all their keys as JSON.

    Args:
        rows: dictionaries.
        path: path of the file.
        origin: default values of every row; None for `provenance()`.
    """
    origin = provenance() if origin is None else origin
    text = json.dumps([{**origin, **row} for row in rows], indent=2)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


def provenance():
    """Return versions, commit, processor, and which operations were used.

    `onednn` is whether TensorFlow uses oneDNN; `no_native_operations` is the reason if
    there are none, else None. `commit` is that of the benchmark, with "-dirty" if files
    differ from it, and that of the package too if `package_from_checkout`.
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
    # Wider than the terminal, or than 80 characters in a file, rather than truncated.
    unlimited = console.options.update(width=1000)
    console.width = Measurement.get(console, unlimited, table).maximum
    console.print(table)


def _cell(value, spec):
    return "" if value is None else format(value, spec)


def commit():
    """Return the checkout's commit, with "-dirty" if files differ from it."""
    head = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    if head is None or changes is None:
        return "unknown"  # not a checkout
    return head + ("-dirty" if changes else "")


def _git(*arguments):
    folder = pathlib.Path(__file__).parent
    # With sudo the checkout belongs to another user, and git would refuse to read it.
    command = ["git", "-C", str(folder), "-c", "safe.directory=*", *arguments]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.strip()
