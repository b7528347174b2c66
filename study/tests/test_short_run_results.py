"""What `study/horizons.py` makes of its rows, and those that are kept."""

import pathlib

import pytest
from common import reporting, resumable
from experiments import horizons

ROWS = pathlib.Path(__file__).parents[1] / "rows"
DOCS = pathlib.Path(__file__).parents[2] / "docs"


def rows(**values):
    """Return rows of runs, by name, of as many seeds as there are values."""
    return [
        {
            "task": "mnist",
            "steps": 300,
            "workers": 4,
            "metric": "accuracy",
            "method": method.replace("_", " "),
            "seed": seed,
            "value": value,
            "bytes_per_step": 100.0 + seed,
        }
        for method, by_seed in values.items()
        for seed, value in enumerate(by_seed)
    ]


DENSE = [0.9, 0.8, 0.7]


def test_means_in_pairs():
    """With their deviation, and the interval of three seeds, or of two."""
    made = rows(constant=[0.7, 0.7], dgc=[0.5, 0.5, 0.3], dense=DENSE)
    dense, dgc, constant = horizons.summaries(made)
    assert (dense["difference"], dense["half_width"], dense["gap"]) == (None,) * 3
    assert dense["value"] == pytest.approx(0.8)
    assert dense["spread"] == pytest.approx(0.1)
    assert dense["bytes_per_step"] == 101.0
    error = (0.01 / 3) ** 0.5 / 3**0.5  # of -0.4, -0.3 and -0.4
    assert dgc["difference"] == pytest.approx(-1.1 / 3)
    assert dgc["half_width"] == pytest.approx(4.30265 * error, rel=1e-5)
    assert dgc["gap"] == 1
    assert constant["difference"] == pytest.approx(-0.15)
    assert constant["seeds"] == 2
    assert constant["gap"] is None  # two pairs of `dgc` tell nothing


def test_no_gap_where_dgc_is_not_told_from_dense():
    made = rows(dense=DENSE, dgc=[0.8, 0.8, 0.7], constant=[0.85, 0.75, 0.65])
    _, dgc, constant = horizons.summaries(made)
    assert dgc["difference"] == pytest.approx(-0.1 / 3)
    assert dgc["half_width"] > 0.1
    assert dgc["gap"] is constant["gap"] is None
    assert constant["half_width"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("failed", ["dense", "dgc", "constant"])
def test_no_difference_where_a_run_failed(failed):
    """The mean of those that did not fail would hide it."""
    values = {"dense": DENSE, "dgc": [0.5, 0.5, 0.3], "constant": [0.7, 0.7, 0.6]}
    values[failed] = [*values[failed][:2], float("nan")]
    *_, constant = horizons.summaries(rows(**values))
    assert constant["gap"] is None
    assert (constant["difference"] is None) == (failed != "dgc")


def test_one_seed_has_no_interval():
    made = rows(dense=DENSE[:1], dgc=[0.8])
    ((title, lines, columns),) = horizons.tables(made)
    assert title == "mnist: accuracy after 300 steps, 4 workers, seeds: 1"
    assert lines[1]["difference"] == pytest.approx(-0.1)
    shown = {key for key, _, _ in columns}
    assert shown == {"method", "value", "difference", "bytes_per_step"}


@pytest.mark.parametrize("name", ["horizons", "horizons_tuning"])
def test_tables_of_the_docs_are_made_of_the_rows_that_are_kept(name):
    found = horizons.tables(resumable.read_rows([ROWS / f"{name}.jsonl"]))
    assert len(found) == 2
    text = (DOCS / "short_runs.md").read_text()
    for title, lines, columns in found:
        assert reporting.markdown(lines, columns) in text, title
