"""The command `study/adam.py`, on tasks that need no data set."""

import json
import pathlib
import statistics
import sys

import programs
import pytest

STUDY = pathlib.Path(__file__).parents[1]
PROGRAM = f"""
import sys
sys.path.insert(0, {str(STUDY)!r})
import adam, keras, numpy as np
from absl import app
from tasks import transformer as ours
from tasks import small

def text(number):
    tokens = np.random.default_rng(0).integers(0, number, 300).astype("int32")
    return [tokens, tokens]

ours.Characters.load = staticmethod(lambda folders: text(65))
ours.Words.load = staticmethod(lambda folders: text(10_000))

def digits(name, data_dir, split):
    random = np.random.default_rng(0)
    return random.integers(0, 255, (200, 28, 28, 1)), np.arange(200) % 10

small.read = digits
{{more}}
app.run(adam.main)
"""
# Replaces the transformer with one layer, which takes seconds instead of minutes.
TINY = """
@classmethod
def model(cls):
    embed = keras.layers.Embedding(cls.vocabulary, 64)
    layers = keras.Input((cls.length,), dtype="int32"), embed
    return keras.Sequential([*layers, keras.layers.Dense(cls.vocabulary)])

ours.Language.model = model
"""


def run(path, *flags, more=""):
    text = PROGRAM.replace("{more}", more)
    flags = [f"--json={path}", "--batch=1", "--steps=5", *flags]
    finished = programs.run([sys.executable, "-c", text, *flags])
    assert finished.returncode == 0
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines], finished.stdout


@pytest.mark.exhaustive
def test_rates_are_searched_and_rows_reused(tmp_path):
    path, table = tmp_path / "runs.jsonl", tmp_path / "table.md"
    flags = "--rates=0.1,0.2", "--runs=dense,dgc 99 %", "--seeds=2"
    rows, output = run(path, *flags, more=TINY)
    searches = [row for row in rows if row["seed"] == 100]
    counted = [row for row in rows if row["seed"] != 100]
    for name in ("dense", "dgc 99 %"):
        rates = {row["rate"]: row["value"] for row in searches if row["method"] == name}
        assert {0.1, 0.2} < set(rates)  # and one beyond the edge
        runs = [row for row in counted if row["method"] == name]
        assert [row["seed"] for row in runs] == [0, 1]
        assert {row["rate"] for row in runs} == {min(rates, key=rates.get)}
        assert [step for step, _, _ in runs[0]["curve"]] == [1, 2, 3, 4, 5]
        assert f" {name} " in output
    assert {row["jit_compile"] for row in rows} == {True}
    dense, dgc = counted[0], counted[2]
    size = dense["dense_bytes_per_step"]
    assert dense["curve"][-1][:2] == [5, 5 * size]
    assert 0 < dgc["curve"][-1][1] < 3 * size
    more, _ = run(path, *flags, "--seeds=3", more=TINY)
    assert more[: len(rows)] == rows
    assert [row["seed"] for row in more[len(rows) :]] == [2, 2]
    _, output = run(tmp_path / "none", f"--from_json={path}", f"--markdown={table}")
    assert " at 1/25 " in output
    values = [r["value"] for r in more if r["method"] == "dense" and r["seed"] < 100]
    for text in (output, table.read_text()):
        assert f" {statistics.mean(values):.4f} " in text
        assert " dgc 99 % " in text
    assert not (tmp_path / "none").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs.jsonl", "table.md"]


LORA_SIZE = 512 * 8 + 8 * 128
HEAD_SIZE = 128 * 10 + 10


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("task", "size"), [("lora", LORA_SIZE + HEAD_SIZE), ("finetune", 80_202)]
)
def test_fine_tuning_trains_the_expected_parameters(tmp_path, task, size):
    flags = f"--task={task}", "--rate=0.001", "--runs=dgc 99 %", "--seeds=1"
    (row,), _ = run(tmp_path / "runs.jsonl", *flags)
    assert (row["task"], row["dense_bytes_per_step"]) == (task, 4 * size)
    assert 0 < row["value"] < 10


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("task", "size"), [("shakespeare", 413_312), ("ptb", 413_312 + 9935 * 128)]
)
def test_gpt2_has_the_expected_size(tmp_path, task, size):
    pytest.importorskip("keras_hub")
    flags = f"--task={task}", "--rate=0.001", "--runs=dgc 99 %", "--seeds=1"
    (row,), _ = run(tmp_path / "runs.jsonl", *flags)
    assert row["dense_bytes_per_step"] == 4 * size
    assert 3 < row["value"] < 10


@pytest.mark.slow
def test_unknown_run_is_an_error(tmp_path):
    text = PROGRAM.replace("{more}", "")
    finished = programs.run([sys.executable, "-c", text, "--runs=dgc 42 %"])
    assert finished.returncode
    assert "['dgc 42 %']" in finished.stdout + finished.stderr
