"""Resumable benchmark runs: finished rows are not measured again."""

import json

import numpy as np
import pytest
from common import resumable

KEYS = ["method", "seed"]


def test_rows_are_run_once(tmp_path):
    path, calls = tmp_path / "deep" / "rows.jsonl", []

    def measure(_):
        calls.append(1)
        return {"value": len(calls)}

    for _ in range(2):
        resumable_rows = resumable.ResumableRows(path, KEYS, {"commit": "abc"})
        rows = [
            resumable_rows.row({"method": "dense", "seed": seed}, measure)
            for seed in (0, 1)
        ]
        assert [row["value"] for row in rows] == [1, 2]
        assert resumable_rows.rows == rows == resumable.read_rows([path])
    assert rows[0] == {"commit": "abc", "method": "dense", "seed": 0, "value": 1}


def test_rows_of_another_process_are_not_run_again(tmp_path):
    path, key = tmp_path / "rows.jsonl", {"method": "dense", "seed": 0}
    first, second = (resumable.ResumableRows(path, KEYS, {"by": name}) for name in "ab")
    for rows in (first, second):
        assert rows.row(key, lambda _: {})["by"] == "a"
    assert first.rows == second.rows == resumable.read_rows([path])


def test_row_of_an_incomplete_line_is_run_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = resumable.ResumableRows(path, KEYS, {})
    for seed in (0, 1):
        rows.row({"method": "dense", "seed": seed}, lambda _: {})
    path.write_bytes(path.read_bytes()[:-10])
    rows = resumable.ResumableRows(path, KEYS, {})
    assert [row["seed"] for row in rows.rows] == [0]
    rows.row({"method": "dense", "seed": 1}, lambda _: {})
    assert [row["seed"] for row in resumable.read_rows([path])] == [0, 1]


def test_row_has_all_commits_of_its_run(tmp_path):
    path, key = tmp_path / "rows.jsonl", {"method": "dense", "seed": 0}

    def fail(progress):
        progress.load()
        progress.save({"a": np.ones(2)}, {"step": 1})
        raise KeyboardInterrupt

    def measure(progress):
        arrays, notes = progress.load()
        assert notes == {"step": 1}
        return {"value": float(arrays["a"].sum())}

    for commit in ("abc", "def", "def"):
        with pytest.raises(KeyboardInterrupt):
            resumable.ResumableRows(path, KEYS, {"commit": commit}).row(key, fail)
    row = resumable.ResumableRows(path, KEYS, {"commit": "123"}).row(key, measure)
    assert row == {**key, "commit": "abc", "resumed_at": ["def", "123"], "value": 2.0}
    assert resumable.read_rows([path]) == [row]


def test_json_lists_are_read_too(tmp_path):
    rows = [{"seed": 0}, {"seed": 1}]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "lines.jsonl").write_text('{"seed": 2}\n')
    paths = [tmp_path / "list.json", tmp_path / "lines.jsonl"]
    assert resumable.read_rows(paths) == [*rows, {"seed": 2}]
