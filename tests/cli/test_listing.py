"""`tf-dgc methods` and `tf-dgc collectives`."""

import pytest

from tf_dgc import collectives, compressors
from tf_dgc.cli import listing, main


def test_lists_every_method(capsys):
    assert main.main(["methods", "--size", "1000000"]) == 0
    _, _, header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["name", "kind", "bytes/element"]
    cells = {line.split()[0]: line for line in lines}
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
    assert "ICLR 2018" in cells["top_k"]


def test_lists_every_collective_algorithm(capsys):
    assert main.main(["collectives", "--workers", "8"]) == 0
    _, _, header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["name", "of", "a", "sum"]
    cells = {line.split()[0]: line for line in lines}
    assert list(cells) == collectives.names()
    assert " 14, 1.75 " in cells["ring"]
    assert " 7, 7 " in cells["ring"]
    assert " 3, 3 " in cells["gtopk"]
    assert " 14, 2.344 " in cells["oktopk"]
    assert " 14, 2.344 " in cells["twoway"]


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
