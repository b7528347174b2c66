"""Resumable benchmark runs: finished rows are in a file and are not measured again."""

import io
import json
import os
import pathlib
import time

import numpy as np


def read_rows(paths):
    """Return the rows of several files, lines of JSON, or a list of them."""
    return [row for path in paths for row in _parse(pathlib.Path(path).read_text())]


def group_rows(rows, names):
    """Return rows by what they have under these names, in order of the first ones."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def _parse(text):
    if text.startswith("["):
        return json.loads(text)
    return [row for line in text.splitlines() if (row := _line(line)) is not None]


def _line(line):
    try:
        return json.loads(line)
    except json.JSONDecodeError:  # the last one, of a process that was killed
        return None


class ResumableRows:
    """Rows of runs, each with a key, appended to a file as soon as a run ends.

    Several processes may append to a file at once, of which each does other runs; what
    another one has done meanwhile is not done again.

    Args:
        path: of the file; None to keep rows in memory alone.
        keys: names of what tells one run from another.
        origin: what else to say of every row.
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
        """Return the row of a run, which is run if it is not there.

        Args:
            key: dictionary with `keys`.
            measure: called with the run's `RunCheckpoint`; returns the rest of the row.
        """
        if self._key(key) not in self._rows:
            self._rows |= self._read()
        row = self._rows.get(self._key(key))
        if row is None:
            saved = self._saved(key)
            measured = measure(saved)
            row = {**self._origin, **key, **measured, **saved.commits_of_row()}
            self._append(row)
            self._rows[self._key(key)] = row
            saved.forget()
        return row

    def _read(self):
        there = self._path is not None and self._path.exists()
        return {self._key(row): row for row in read_rows([self._path] if there else [])}

    def _key(self, row):
        return tuple(row.get(name) for name in self._keys)

    def _saved(self, key):
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
            torn = file.read() not in (b"", b"\n")
            file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


class RunCheckpoint:
    """A checkpoint of one run, saved now and then, from which a killed run resumes.

    Args:
        path: of a file; None to remember nothing.
        every: seconds from one time to the next.
        commit: commit of this checkout.
    """

    def __init__(self, path, every=120.0, commit="unknown"):
        self._path, self._every = path, every
        self._commit, self._commits = commit, [commit]
        self._last = time.monotonic()

    def load(self):
        """Return the last arrays by name and notes, or None."""
        if self._path is None or not self._path.exists():
            return None
        with np.load(self._path) as file:
            arrays = {name: file[name] for name in file.files if name != "notes"}
            notes = json.loads(str(file["notes"]))
        before = notes.pop("commits", ["unknown"])
        self._commits = before + [self._commit] * (before[-1] != self._commit)
        return arrays, notes

    def commits_of_row(self):
        """Return what a row says if a run went on at other commits than it began at."""
        first, *others = self._commits
        return {"commit": first, "resumed_at": others} if others else {}

    def is_due(self):
        """Return whether it is time to save."""
        due = time.monotonic() - self._last >= self._every
        return self._path is not None and due

    def save(self, arrays, notes):
        """Remember arrays by name, and notes that JSON can hold."""
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
        """Remove what is remembered."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
