"""The tables of `study/short_runs.py`, of invented and of stored rows."""

import pathlib

import pytest
from common import reporting, resumable
from experiments import short_runs

ROWS = pathlib.Path(__file__).parents[1] / "rows"
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "research"


def make_rows(**values):
    """Return a row per value, by name of the run and seed."""
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


def test_differences_are_paired_by_seed():
    rows = make_rows(constant=[0.7, 0.7], dgc=[0.5, 0.5, 0.3], dense=DENSE)
    dense, dgc, constant = short_runs.summaries(rows)
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
    assert constant["gap"] is None  # two pairs of `dgc` are no clear difference


def test_no_gap_if_dgc_does_not_differ_clearly_from_dense():
    rows = make_rows(dense=DENSE, dgc=[0.8, 0.8, 0.7], constant=[0.85, 0.75, 0.65])
    _, dgc, constant = short_runs.summaries(rows)
    assert dgc["difference"] == pytest.approx(-0.1 / 3)
    assert dgc["half_width"] > 0.1
    assert dgc["gap"] is constant["gap"] is None
    assert constant["half_width"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("failed", ["dense", "dgc", "constant"])
def test_no_difference_if_a_run_failed(failed):
    """The mean of the others would hide the failure."""
    values = {"dense": DENSE, "dgc": [0.5, 0.5, 0.3], "constant": [0.7, 0.7, 0.6]}
    values[failed] = [*values[failed][:2], float("nan")]
    *_, constant = short_runs.summaries(make_rows(**values))
    assert constant["gap"] is None
    assert (constant["difference"] is None) == (failed != "dgc")


def test_one_seed_has_no_interval():
    rows = make_rows(dense=DENSE[:1], dgc=[0.8])
    ((title, lines, columns),) = short_runs.tables(rows)
    assert title == "mnist: accuracy after 300 steps, 4 workers, seeds: 1"
    assert lines[1]["difference"] == pytest.approx(-0.1)
    keys = {key for key, _, _ in columns}
    assert keys == {"method", "value", "difference", "bytes_per_step"}


@pytest.mark.parametrize("name", ["horizons", "horizons_tuning"])
def test_docs_have_the_tables_of_the_stored_rows(name):
    tables = short_runs.tables(resumable.read_rows([ROWS / f"{name}.jsonl"]))
    assert len(tables) == 2
    text = (DOCS / "short_runs.md").read_text()
    for title, lines, columns in tables:
        assert reporting.markdown(lines, columns) in text, title
