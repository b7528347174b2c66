"""Rows of finished runs, as lines of JSON."""

import datetime
import json
import math
import os
import pathlib


def read(folder):
    """Return the rows of all files `*.jsonl` of a folder, in order of their files."""
    return [
        json.loads(line)
        for path in sorted(pathlib.Path(folder).glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def append(folder, row):
    """Add a row to the file of its task, so that it is there whole or not at all."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{row['task']}.jsonl"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    replace(path, (before + json.dumps(row) + "\n").encode())


def has_value(row):
    """Return whether a run ended with a figure, and this is finite."""
    return row["value"] is not None and math.isfinite(row["value"])


def now():
    """Return the time as rows state it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "seconds")


def replace(path, content):
    """Write a file whose old content is there until the new one is on the disk."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
