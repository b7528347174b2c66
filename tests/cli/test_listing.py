"""`tf-dgc methods` and `tf-dgc collectives`."""

import inspect
import itertools

import keras
import pytest

import tf_dgc
from tf_dgc import collectives, compressors
from tf_dgc.cli import listing, main, tables


@pytest.fixture(autouse=True)
def _unlimited_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


def table_cells(output):
    """Return the lines below the header by their first cell."""
    lines = iter(output.splitlines())
    next(line for line in lines if line.startswith("name "))
    table = itertools.takewhile(bool, lines)
    return {line.split()[0]: line for line in table if not line.endswith(":")}


@pytest.mark.parametrize("size", [1_000_000, 999_999])
def test_lists_every_method(capsys, size):
    assert main.main(["methods", "--size", str(size)]) == 0
    output = capsys.readouterr().out
    shape = "1000 x 1000" if size == 10**6 else "999 x 1001"
    assert f"{shape} float32 matrix" in " ".join(output.split())
    cells = table_cells(output)
    assert set(cells) == set(compressors.METHODS)
    # 2 bits and a norm per 512; one bit and a word; two factors of 1000 x 4.
    for name, each in (
        ("none", "4"),
        ("float16", "2"),
        ("qsgd", "0.2564"),
        ("ef_sign_sgd", "0.125"),
        ("power_sgd", "0.032"),
    ):
        assert f" {each} " in cells[name]
    assert "shift, shift_sum" in cells["diana"]
    assert "Deep gradient compression, ICLR 2018" in cells["top_k"]


def test_methods_begin_with_what_to_use(capsys):
    assert main.main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Start with one of these")
    assert [line.split()[0] for line in lines[3:6:2]] == ["dgc", "dgc_for_steps"]
    sparsity = inspect.signature(tf_dgc.DGCOptimizer).parameters["sparsity"].default
    assert f"sends {(1 - sparsity) * 100:.1f} % of the entries" in lines[4]
    for line in (lines[3], lines[5]):
        names = {"tf_dgc": tf_dgc, "optimizer": keras.optimizers.SGD(0.1)}
        optimizer = eval(line.split(maxsplit=1)[1], names)
        assert isinstance(optimizer, tf_dgc.DGCOptimizer)


@pytest.mark.parametrize("command", ["methods", "collectives"])
@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(capsys, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main.main([command]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= columns
    is_short = columns == 80
    cells = table_cells(output)
    if command == "methods":
        last = (
            "Lin et al., ICLR 2018" if is_short else "gradient compression, ICLR 2018"
        )
        assert cells["top_k"].endswith(last)
    else:
        assert ("JPDC 2009" in output) != is_short
        assert ("A wider terminal" in output) == is_short


@pytest.mark.parametrize("workers", [8, 9])
def test_lists_every_collective_algorithm(capsys, workers):
    assert main.main(["collectives", "--workers", str(workers)]) == 0
    cells = table_cells(capsys.readouterr().out)
    assert list(cells) == collectives.names()
    costs = {name: line.split()[1:7] for name, line in cells.items()}
    if workers == 8:
        assert costs["ring"] == ["14", "1.75", "7", "7", "7", "7"]
        assert costs["gtopk"] == ["14", "1.75", "7", "7", "3", "3"]
        for name in ("oktopk", "twoway"):
            assert costs[name] == ["14", "1.75", "7", "7", "14", "2.344"]
    else:
        assert costs["ring"] == ["16", "1.778", "8", "8", "8", "8"]


def test_the_recorded_tables_are_those_of_the_classes():
    assert listing.read_tables() == tables.default_tables(), (
        "after a change of methods or collectives, run `python -m tf_dgc.cli.tables`"
    )


@pytest.mark.parametrize("size", ["0", "-1", "many"])
def test_wrong_size_raises(capsys, size):
    with pytest.raises(SystemExit):
        main.main(["methods", "--size", size])
    assert "must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "shape"), [(1, (1, 1)), (12, (3, 4)), (17, (1, 17)), (10**6, (1000, 1000))]
)
def test_as_matrix(size, shape):
    assert listing.as_matrix(size) == shape
