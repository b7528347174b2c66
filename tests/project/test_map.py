"""The tests' folders are those of the package, and a few about the whole of it."""

import pathlib
import re

import tf_dgc

PACKAGE = pathlib.Path(tf_dgc.__file__).parent
TESTS = pathlib.Path(__file__).parents[1]

ABOUT_THE_WHOLE = {
    "contract": "what holds whatever the path, method or inner optimizer",
    "end_to_end": "real workers, and settings of a whole process",
    "faults": "real workers that are killed, stopped and cut off",
    "gpu": "the CUDA kernels, without TensorFlow",
    "project": "examples, benchmarks, docs, and what is exported",
    "support": "what tests share; no tests",
}
WITHOUT_A_FOLDER = {
    "_internals": "private names alone; whoever asks for them is tested",
}


def folders(root, pattern):
    return {path.parent.relative_to(root).parts[0] for path in root.glob(pattern)}


def test_every_room_has_a_folder_of_tests():
    rooms = folders(PACKAGE, "*/__init__.py")
    assert len(rooms) > 10
    assert folders(TESTS, "*/**/test_*.py") & rooms == rooms - {*WITHOUT_A_FOLDER}


def test_every_folder_is_a_room_or_about_the_whole():
    rooms = folders(PACKAGE, "*/__init__.py")
    assert folders(TESTS, "*/**/*.py") - rooms == {*ABOUT_THE_WHOLE}


def test_what_stands_beside_the_folders_is_named_after_a_module():
    modules = {path.stem.lstrip("_") for path in PACKAGE.glob("*.py")}
    assert {
        path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")
    } <= modules


def test_names_in_the_design_exist():
    """Every file, and every name that is said to be in a file."""
    text = (TESTS.parent / "docs" / "design.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([\w/]+\.py)`", text))
    named = re.findall(r"`([\w.]+)`(?:, `[\w.]+`)* in `([\w/]+\.py)`", text)
    assert len(files) > 40
    assert len(named) > 40
    assert {f for f in files if not (PACKAGE / f).is_file()} == set()
    missing = [
        (name, file)
        for name, file in named
        if not re.search(
            rf"^ *(?:class|def) {name.rpartition('.')[2]}\b",
            (PACKAGE / file).read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    ]
    assert missing == []
