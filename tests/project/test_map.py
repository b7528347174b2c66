"""Folders of tests match the package's folders, except for those listed here."""

import pathlib
import re

import tf_dgc

PACKAGE = pathlib.Path(tf_dgc.__file__).parent
TESTS = pathlib.Path(__file__).parents[1]

ABOUT_THE_WHOLE = {
    "contract": "properties of every step implementation, method and inner optimizer",
    "end_to_end": "real workers, and process-wide settings",
    "faults": "real workers that are killed, stopped and cut off",
    "gpu": "the CUDA kernels, without TensorFlow",
    "on_gpu": "training on GPUs, or on a device that stands for one",
    "project": "examples, benchmarks, docs, and what is exported",
    "support": "shared code of tests; no tests",
}
WITHOUT_A_FOLDER = {
    "_internals": "only private names of others; their users are tested",
}


def folders(root, pattern):
    return {path.parent.relative_to(root).parts[0] for path in root.glob(pattern)}


def test_every_package_folder_has_tests():
    packages = folders(PACKAGE, "*/__init__.py")
    assert len(packages) > 10
    tested = folders(TESTS, "*/**/test_*.py") & packages
    assert tested == packages - {*WITHOUT_A_FOLDER}


def test_other_folders_are_listed():
    packages = folders(PACKAGE, "*/__init__.py")
    assert folders(TESTS, "*/**/*.py") - packages == {*ABOUT_THE_WHOLE}


def test_top_level_tests_are_named_after_modules():
    modules = {path.stem.lstrip("_") for path in PACKAGE.glob("*.py")}
    assert {
        path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")
    } <= modules


def test_names_in_the_design_exist():
    """Every file, and every name that the page places in a file."""
    text = (TESTS.parent / "docs" / "contributing" / "design.md").read_text(
        encoding="utf-8"
    )
    files = set(re.findall(r"`([\w/]+\.py)`", text))
    places = re.findall(r"`([\w.]+)`(?:, `[\w.]+`)* in `([\w/]+\.py)`", text)
    assert len(files) > 40
    assert len(places) > 40
    assert {f for f in files if not (PACKAGE / f).is_file()} == set()
    missing = [
        (name, file)
        for name, file in places
        if not re.search(
            rf"^ *(?:class|def) {name.rpartition('.')[2]}\b",
            (PACKAGE / file).read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    ]
    assert missing == []
