"""The experiments of `study/`, whose tests are its own, still fit the package."""

import ast
import pathlib
import sys

import commands
import programs
import pytest

ROOT = pathlib.Path(__file__).parents[2]
STUDY = ROOT / "study"

# MNIST's network by images that are easy: each class has a row of pixels of its own.
PROGRAM = f"""
import sys
sys.path.insert(0, {str(STUDY)!r})
import convergence, numpy as np
from absl import app
from tasks import small

def read(name, data_dir, split):
    labels = np.arange(400) % 10
    images = np.zeros((400, 28, 28, 1), np.uint8)
    images[np.arange(400), 2 * labels] = 255
    return images, labels

small.read = read
app.run(convergence.main)
"""


def test_nothing_else_imports_it():
    own = {path.parent.name for path in STUDY.glob("*/__init__.py")}
    own |= {path.stem for path in STUDY.glob("*.py")} | {"study"}
    folders = "tf_dgc", "benchmarks", "custom_ops", "docs", "examples", "tests"
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 500
    found = [f"{file}: {name}" for file in files for name in imported(file) & own]
    assert found == []


def imported(file):
    """Return the top-level names that a file imports."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    names += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
    return {name.split(".")[0] for name in names}


@pytest.mark.slow
def test_its_commands_start():
    scripts = [p for p in sorted(STUDY.glob("*.py")) if "__main__" in p.read_text()]
    assert len(scripts) == 10
    asked = [[f"study/{p.name}", [], p.name != "evidence.py"] for p in scripts]
    assert commands.flag_faults(asked) == [None] * 10


@pytest.mark.slow
def test_a_short_run():
    flags = "--tasks=mnist", "--steps=10", "--seeds=1", "--workers=2", "--methods=dgc"
    finished = programs.run([sys.executable, "-c", PROGRAM, *flags])
    assert finished.returncode == 0
    assert "mnist: accuracy after 10 steps, 2 workers" in finished.stdout
