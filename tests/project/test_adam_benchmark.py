"""`benchmarks/adam.py` trains what it says, on a text that needs no data set."""

import json
import pathlib
import sys

import programs
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
PROGRAM = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import adam, numpy as np
from absl import app

def load(data_dir):
    text = np.random.default_rng(0).integers(0, 65, 300).astype("int32")
    return [text, text]

class Characters(adam.Characters):
    load = staticmethod(load)

    @classmethod
    def model(cls):
        made = super().model()
        assert made.count_params() == 413312
        return made

adam.Characters = Characters
app.run(adam.main)
"""


@pytest.mark.exhaustive
def test_runs_are_compared_with_dense_ones(tmp_path):
    path = tmp_path / "runs.json"
    flags = ["--steps=5", "--batch=1", "--runs=dgc 99 %", f"--json={path}"]
    finished = programs.run([sys.executable, "-c", PROGRAM, *flags])
    assert finished.returncode == 0
    dense, dgc = json.loads(path.read_text())
    assert dense["method"] == "dense"
    assert dense["ratio"] == 1
    assert dgc["ratio"] > 10
    assert 3 < dgc["value"] < 5
