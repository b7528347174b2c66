"""Commands in the documentation name what there is, with flags that it takes."""

import commands
import pytest

# name, what a fault of it says
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


@pytest.mark.parametrize("text, said", WRONG)
def test_wrong_ones_are_found(text, said):
    assert said in commands.fault(commands.split(text)[0])


def test_blocks():
    found = commands.in_blocks()
    assert len(found) > 50
    assert [(p, c, f) for p, c in found if (f := commands.fault(c))] == []


def test_sentences():
    found = commands.in_sentences()
    assert len(found) > 50
    assert [(p, c, f) for p, c in found if (f := commands.unknown_options(c))] == []
    assert commands.unknown_options(["tf-dgc", "run", "--wrokers", "N"]) == [
        "--wrokers"
    ]


@pytest.mark.slow
def test_flags_of_scripts():
    """Values too where a block has the command; of those in sentences, names."""
    found = commands.of_scripts("benchmarks", "examples")
    wrong = ["benchmarks/step.py", ["--rates=all"], True]
    others = ["benchmarks/step.py", ["--rates=ALL"], False]
    asked = [command for _, command in found]
    *faults, first, second = commands.flag_faults([*asked, wrong, others])
    assert len(found) > 50
    pairs = zip(found, faults, strict=True)
    assert [(place, *command, f) for (place, command), f in pairs if f] == []
    assert "rates" in first and "rates" in second
