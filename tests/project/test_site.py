"""The documentation's site: public names have entries, and it is built strictly."""

import importlib.util
import pathlib
import re
import sys

import programs
import pytest

import tf_dgc

ROOT = pathlib.Path(__file__).parents[2]
MODULES = {"callbacks", "cluster", "compressors", "exchanges", "saving", "schedules"}


def entries():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return [e for p in pages for e in re.findall(r"^::: (\S+)$", p.read_text(), re.M)]


def test_entries_are_there():
    """Every one names something, and every public name but modules has one."""
    found = entries()
    assert len(found) == len({*found})
    for entry in found:
        module, _, name = entry.rpartition(".")
        __import__(module)
        assert hasattr(sys.modules[module], name), entry
    named = {entry.rpartition(".")[2] for entry in found}
    assert {*tf_dgc.__all__} - MODULES <= named
    assert {type(m()).__name__ for m in tf_dgc.compressors.METHODS.values()} <= named
    assert {*tf_dgc.callbacks.__all__} <= named


def test_every_page_is_in_the_menu():
    menu = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    pages = {p.name for p in (ROOT / "docs").glob("*.md")}
    pages |= {f"reference/{p.name}" for p in (ROOT / "docs" / "reference").glob("*.md")}
    assert pages - {*menu} == set()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs the extra `docs`"
)
def test_the_site_is_built(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    built = programs.run([*command, tmp_path, "-f", ROOT / "mkdocs.yml"], merged=True)
    assert built.returncode == 0, built.stdout
    first = (tmp_path / "index.html").read_text()
    assert "Distributed Keras training" in first
    assert "DGCOptimizer" in (tmp_path / "reference/optimizers/index.html").read_text()
