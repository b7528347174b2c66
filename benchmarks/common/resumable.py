"""Resumable benchmark runs: finished rows are in a file and are not measured again."""

import io
import json
import os
import pathlib
import time

import numpy as np


def read_rows(paths):
    """Return the rows of several files of JSON lines or JSON lists."""
    return [row for path in paths for row in _parse(pathlib.Path(path).read_text())]


def group_rows(rows, names):
    """Group rows by their values of `names`, in order of first occurrence."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def _parse(text):
    if text.startswith("["):
        return json.loads(text)
    return [row for line in text.splitlines() if (row := _parse_line(line)) is not None]


def _parse_line(line):
    try:
        return json.loads(line)
    except json.JSONDecodeError:  # the last line of a killed process
        return None


class ResumableRows:
    """Rows of runs, each with a key, appended to a file when the run ends.

    Several processes with different runs may append to a file at once. A run that
    another process has finished meanwhile is not repeated.

    Args:
        path: path of the file; None for rows in memory only.
        keys: names of the values that identify a run.
        origin: additional values of every row.
    """

    def __init__(self, path, keys, origin):
        self._path = pathlib.Path(path) if path else None
        self._keys, self._origin = keys, origin
        self._rows = self._read()

    @property
    def rows(self):
        """All rows, those of the file first."""
        return list(self._rows.values())

    def row(self, key, measure):
        """Return the row of a run; measure it if it is missing.

        Args:
            key: dictionary with `keys`.
            measure: function of the run's `RunCheckpoint` that returns the rest of the
                row.
        """
        if self._key(key) not in self._rows:
            self._rows |= self._read()
        row = self._rows.get(self._key(key))
        if row is None:
            checkpoint = self._checkpoint(key)
            values = measure(checkpoint)
            row = {**self._origin, **key, **values, **checkpoint.commits_of_row()}
            self._append(row)
            self._rows[self._key(key)] = row
            checkpoint.forget()
        return row

    def _read(self):
        if self._path is None or not self._path.exists():
            return {}
        return {self._key(row): row for row in read_rows([self._path])}

    def _key(self, row):
        return tuple(row.get(name) for name in self._keys)

    def _checkpoint(self, key):
        commit = self._origin.get("commit", "unknown")
        if self._path is None:
            return RunCheckpoint(None, commit=commit)
        name = "-".join(str(part) for part in self._key(key))
        safe = "".join(c if c.isalnum() or c in "-." else "_" for c in name)
        path = self._path.with_name(f"{self._path.name}.{safe}.npz")
        return RunCheckpoint(path, commit=commit)

    def _append(self, row):
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            if file.read() not in (b"", b"\n"):  # an incomplete line
                file.write(b"\n")
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


class RunCheckpoint:
    """A checkpoint of one run, saved regularly, from which a killed run resumes.

    Args:
        path: path of the file; None to save nothing.
        every: seconds from one save to the next.
        commit: commit of this checkout.
    """

    def __init__(self, path, every=120.0, commit="unknown"):
        self._path, self._every = path, every
        self._commit, self._commits = commit, [commit]
        self._last = time.monotonic()

    def load(self):
        """Return the saved arrays by name, and notes; None without a checkpoint."""
        if self._path is None or not self._path.exists():
            return None
        with np.load(self._path) as file:
            arrays = {name: file[name] for name in file.files if name != "notes"}
            notes = json.loads(str(file["notes"]))
        self._commits = notes.pop("commits", ["unknown"])
        if self._commits[-1] != self._commit:
            self._commits.append(self._commit)
        return arrays, notes

    def commits_of_row(self):
        """Return the row's values for a run that resumed at another commit, else {}."""
        first, *others = self._commits
        return {"commit": first, "resumed_at": others} if others else {}

    def is_due(self):
        """Whether it is time to save."""
        due = time.monotonic() - self._last >= self._every
        return self._path is not None and due

    def save(self, arrays, notes):
        """Save arrays by name, and notes that JSON can represent."""
        content = io.BytesIO()
        notes = json.dumps({**notes, "commits": self._commits})
        np.savez(content, notes=notes, **arrays)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        with open(new, "wb") as file:
            file.write(content.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)
        self._last = time.monotonic()

    def forget(self):
        """Delete the checkpoint."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
