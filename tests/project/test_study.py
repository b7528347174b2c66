"""The experiments of `study/` work with the package; `study/tests` tests them."""

import ast
import pathlib
import sys

import commands
import programs
import pytest

ROOT = pathlib.Path(__file__).parents[2]
STUDY = ROOT / "study"

# MNIST's network with easy images: each class has a separate row of pixels.
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


def test_other_folders_do_not_import_the_study():
    modules = {path.parent.name for path in STUDY.glob("*/__init__.py")}
    modules |= {path.stem for path in STUDY.glob("*.py")} | {"study"}
    folders = "tf_dgc", "benchmarks", "custom_ops", "docs", "examples", "tests"
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 500
    imports = [f"{f}: {name}" for f in files for name in imported(f) & modules]
    assert imports == []


def imported(file):
    """Return the top-level names that a file imports."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    names += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
    return {name.split(".")[0] for name in names}


@pytest.mark.slow
def test_commands_of_the_study_have_valid_flags():
    scripts = [p for p in sorted(STUDY.glob("*.py")) if "__main__" in p.read_text()]
    assert len(scripts) == 10
    runs = [[f"study/{p.name}", [], p.name != "evidence.py"] for p in scripts]
    assert commands.flag_faults(runs) == [None] * 10


@pytest.mark.slow
def test_short_run():
    flags = ["--tasks=mnist", "--steps=10", "--seeds=1", "--workers=2", "--methods=dgc"]
    finished = programs.run([sys.executable, "-c", PROGRAM, *flags])
    assert finished.returncode == 0
    assert "mnist: accuracy after 10 steps, 2 workers" in finished.stdout
