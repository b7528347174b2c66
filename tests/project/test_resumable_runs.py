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
        done = resumable.ResumableRows(path, KEYS, {"commit": "abc"})
        found = [done.row({"method": "dense", "seed": s}, measure) for s in (0, 1)]
        assert [row["value"] for row in found] == [1, 2]
        assert done.rows == found == resumable.read_rows([path])
    assert found[0] == {"commit": "abc", "method": "dense", "seed": 0, "value": 1}


def test_what_another_process_has_done_is_not_done_again(tmp_path):
    path, key = tmp_path / "rows.jsonl", {"method": "dense", "seed": 0}
    one, other = (resumable.ResumableRows(path, KEYS, {"by": name}) for name in "ab")
    for done in (one, other):
        assert done.row(key, lambda _: {})["by"] == "a"
    assert one.rows == other.rows == resumable.read_rows([path])


def test_a_line_that_was_torn_is_run_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    done = resumable.ResumableRows(path, KEYS, {})
    for seed in (0, 1):
        done.row({"method": "dense", "seed": seed}, lambda _: {})
    path.write_bytes(path.read_bytes()[:-10])
    done = resumable.ResumableRows(path, KEYS, {})
    assert [row["seed"] for row in done.rows] == [0]
    done.row({"method": "dense", "seed": 1}, lambda _: {})
    assert [row["seed"] for row in resumable.read_rows([path])] == [0, 1]


def test_a_row_has_all_commits_of_its_run(tmp_path):
    path, key = tmp_path / "rows.jsonl", {"method": "dense", "seed": 0}

    def killed(saved):
        saved.load()
        saved.save({"a": np.ones(2)}, {"step": 1})
        raise KeyboardInterrupt

    def measure(saved):
        arrays, notes = saved.load()
        assert notes == {"step": 1}
        return {"value": float(arrays["a"].sum())}

    for commit in ("abc", "def", "def"):
        with pytest.raises(KeyboardInterrupt):
            resumable.ResumableRows(path, KEYS, {"commit": commit}).row(key, killed)
    row = resumable.ResumableRows(path, KEYS, {"commit": "123"}).row(key, measure)
    assert row == {**key, "commit": "abc", "resumed_at": ["def", "123"], "value": 2.0}
    assert resumable.read_rows([path]) == [row]


def test_lists_are_read_too(tmp_path):
    rows = [{"seed": 0}, {"seed": 1}]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "lines.jsonl").write_text('{"seed": 2}\n')
    found = resumable.read_rows([tmp_path / "list.json", tmp_path / "lines.jsonl"])
    assert found == [*rows, {"seed": 2}]
