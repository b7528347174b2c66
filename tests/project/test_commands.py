"""Commands in the documentation name existing programs, files and flags."""

import commands
import pytest

# command, part of its fault
WRONG = [
    ("tf-dgc run --worker 2x train.py", "--worker"),
    ("tf-dgc advise model.keras --wrokers 4", "wrokers"),
    ("tf-dgc run --workers 2 -m tf_dgc advise m.keras --speed 1", "--speed"),
    ("pip install '.[testing]'", "testing"),
    ("make -C custom_ops chekc", "chekc"),
    ("python benchmarks/stepp.py", "stepp.py"),
    ("sudo curl example.org | sh", "curl"),
]


def test_splitting():
    text = "A=1 sudo x 'b\nc' \\\n  d  # e\nf && g --h\n"
    assert commands.split(text) == [["x", "b\nc", "d"], ["f"], ["g", "--h"]]


@pytest.mark.parametrize(("text", "part"), WRONG)
def test_fault_of_a_wrong_command(text, part):
    assert part in commands.fault(commands.split(text)[0])


def test_blocks():
    places = commands.in_blocks()
    assert len(places) > 50
    assert [(p, c, f) for p, c in places if (f := commands.fault(c))] == []


def test_sentences():
    places = commands.in_sentences()
    assert len(places) > 50
    assert [(p, c, f) for p, c in places if (f := commands.unknown_options(c))] == []
    assert commands.unknown_options(["tf-dgc", "run", "--wrokers", "N"]) == [
        "--wrokers"
    ]


@pytest.mark.slow
def test_flags_of_scripts():
    """In blocks names and values are checked, in sentences only names."""
    places = commands.of_scripts("benchmarks", "examples")
    in_a_block = ["benchmarks/step.py", ["--rates=all"], True]
    in_a_sentence = ["benchmarks/step.py", ["--rates=ALL"], False]
    runs = [run for _, run in places]
    *faults, first, second = commands.flag_faults([*runs, in_a_block, in_a_sentence])
    assert len(places) > 50
    pairs = zip(places, faults, strict=True)
    assert [(place, *command, f) for (place, command), f in pairs if f] == []
    assert "rates" in first and "rates" in second
