"""The files of the tutorial's blocks do what the tutorial says."""

import json
import pathlib
import re
import sys

import programs
import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "tutorial.md"


def files():
    """Return the contents of the files that the Python blocks form, by name."""
    parts = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        name, _, text = block.partition("\n")
        parts.setdefault(name.removeprefix("# "), []).append(text)
    return {name: "\n".join(texts) for name, texts in parts.items()}


def test_blocks_name_their_files():
    assert list(files()) == ["train.py", "serve.py"]
    assert "tf_dgc" not in files()["serve.py"]


@pytest.mark.exhaustive
@pytest.mark.workers
def test_the_tutorial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in files().items():
        pathlib.Path(name).write_text(text)
    command = [sys.executable, "-m", "tf_dgc", "run", "--workers", "2", "train.py"]
    for flags, folder in (["--dense"], "dense"), ([], "run"):
        finished = programs.run([*command, *flags], merged=True)
        assert finished.returncode == 0, finished.stdout
        record = json.loads(pathlib.Path(folder, "run.json").read_text())
        assert record["workers"] == 2
        assert [e["steps"] for e in record["epochs"]] == [56 * i for i in range(1, 7)]
        logs = record["epochs"][-1]["logs"]
        assert logs["val_accuracy"] > 0.85
        assert f"bytes_per_step: {logs['bytes_per_step']:.4f}" in PAGE.read_text()
    served = programs.run([sys.executable, "serve.py"])
    assert served.returncode == 0, served.stderr
    assert re.search(r"\[\[.*\]\]", served.stdout)
    assert pathlib.Path("run/served/1/saved_model.pb").exists()
    page = [sys.executable, "-m", "tf_dgc", "report", "dense/run.json", "run/run.json"]
    assert programs.run(page).returncode == 0
    assert "<svg" in pathlib.Path("report.html").read_text()
