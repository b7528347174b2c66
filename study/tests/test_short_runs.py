"""The command `study/short_runs.py`, on a task that needs no data set."""

import statistics
import sys

import programs
import pytest
from common import resumable
from test_convergence import PROGRAM

RUNS = ["dense", "dgc", "unmasked mxint8"]


@pytest.mark.exhaustive
def test_runs_have_equal_bytes_and_paired_differences(tmp_path):
    path, table = tmp_path / "runs.jsonl", tmp_path / "table.md"
    command = [
        sys.executable,
        "-c",
        PROGRAM.format(program="short_runs"),
        "--tasks=largest",
        "--steps=40",
        "--workers=2",
        f"--runs={','.join(RUNS)}",
        f"--json={path}",
    ]
    finished = programs.run([*command, "--seeds=0"])
    assert finished.returncode == 0
    finished = programs.run([*command, "--seeds=0,1", f"--markdown={table}"])
    assert finished.returncode == 0
    rows = resumable.read_rows([path])
    assert [(r["method"], r["seed"]) for r in rows] == [
        (name, seed) for seed in (0, 1) for name in RUNS
    ]
    size = 4 * (16 * 64 + 64 + 64 * 16 + 16)
    sent = {row["method"]: row["bytes_per_step"] for row in rows}
    assert sent["dense"] == size
    # The first step also sends the workers' checksums.
    assert 0.9 * sent["dgc"] < sent["unmasked mxint8"] <= sent["dgc"]
    value = {(row["method"], row["seed"]): row["value"] for row in rows}
    assert min(value.values()) > 0.3  # chance is 1/16
    differences = [
        statistics.mean(value[name, s] - value["dense", s] for s in (0, 1))
        for name in RUNS
    ]
    text = table.read_text()
    assert f"{differences[1]:+.4f}" in text
    assert f"{differences[2]:+.4f}" in text
