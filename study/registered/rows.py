"""Reads and writes rows of finished runs, one JSON object per line."""

import datetime
import json
import math
import os
import pathlib


def read(folder):
    """Return the rows of all `*.jsonl` files of a folder, sorted by file name."""
    return [
        json.loads(line)
        for path in sorted(pathlib.Path(folder).glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def append(folder, row):
    """Append a row to its task's file, atomically."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{row['task']}.jsonl"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    replace(path, (before + json.dumps(row) + "\n").encode())


def has_value(row):
    """Return whether a run ended with a finite value."""
    return row["value"] is not None and math.isfinite(row["value"])


def now():
    """Return the current time in the format of rows."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "seconds")


def replace(path, content):
    """Replace a file's content atomically; the old content survives a crash."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
