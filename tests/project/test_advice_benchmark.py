"""`benchmarks/advice.py` reports predictions and their errors."""

import json
import os
import pathlib
import sys

import programs
import pytest
from common import advice_rows

BENCHMARK = pathlib.Path(__file__).parents[2] / "benchmarks" / "advice.py"


def row(method, link="1gbit", **values):
    key = {"model": "cnn", "workers": 2, "link": link, "method": method}
    return {**key, **values}


def test_comparison_of_predicted_and_measured_rows():
    predicted = [
        row("dense", predicted_ms=10.0, advised="*", exchange="ring"),
        row("dgc", predicted_ms=30.0, advised="", exchange="ring"),
        row("dense", "10mbit", predicted_ms=90.0, advised="", exchange="ring"),
        row("dgc", "10mbit", predicted_ms=30.0, advised="*", exchange="ring"),
        row("dgc", "1mbit", predicted_ms=30.0, advised="*", exchange="ring"),
    ]
    measured = [
        row("dense", measured_ms=8.0, went_by="ring", commit="c" * 40),
        row("dgc", measured_ms=40.0, went_by="ring, 3 buckets"),
        row("dense", "10mbit", measured_ms=20.0, went_by="ring"),
        row("dgc", "10mbit", measured_ms=24.0, went_by="ring"),
    ]
    rows = advice_rows.compare(predicted, measured)
    assert [r["error"] for r in rows] == pytest.approx([0.25, -0.25, 3.5, 0.25])
    assert [r["of_best"] for r in rows] == pytest.approx([1, 5, 1, 1.2])
    summary = advice_rows.summarize(rows)
    assert summary.startswith(
        "2 configurations, 4 steps: off by 25% in the median, 350%"
    )
    assert "in 1 of 2, 1.20 of it at worst; in 1 it was not to compress" in summary
    assert "dense was within 5 % of the best in 2. 1 steps went by another" in summary
    assert [r["went_by"] for r in rows[:2]] == ["ring", "ring, 3 buckets"]
    sources = advice_rows.describe_sources(
        "a.json", [row("dense", commit="b" * 40)], measured[:1]
    )
    assert sources == (
        "Predictions are those of a.json, made at commit bbbbbbbbbbbb; measured at "
        "cccccccccccc."
    )


@pytest.mark.slow
def test_predictions_do_not_overwrite_a_file(tmp_path):
    path = tmp_path / "predicted.json"
    path.write_text("[]")
    command = [sys.executable, BENCHMARK, "--predict", f"--predicted={path}"]
    finished = programs.run(command)
    assert finished.returncode != 0
    assert "name a new file by --predicted" in finished.stderr + finished.stdout
    assert path.read_text() == "[]"


@pytest.mark.parametrize(
    ("text", "link"),
    [("1gbit", ("1gbit", 0.0)), ("100mbit+20ms", ("100mbit", 20.0))],
)
def test_links(text, link):
    assert advice_rows.Link.of(text) == pytest.approx(link)


@pytest.mark.exhaustive
@pytest.mark.workers
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_predictions_are_measured(tmp_path):
    predicted, measured = tmp_path / "predicted.json", tmp_path / "measured.jsonl"
    flags = ["--models=tiny", "--workers=2", "--links=100mbit,100mbit+10ms"]
    flags += ["--methods=dense,dgc,local_sgd 4", "--seconds=1"]
    command = [sys.executable, BENCHMARK, *flags, f"--predicted={predicted}"]
    finished = programs.run([*command, "--predict"])
    assert finished.returncode == 0, finished.stderr
    rows = json.loads(predicted.read_text())
    methods = ["dense", "dgc", "local_sgd 4"]
    assert [r["method"] for r in rows] == 2 * methods
    assert [r["advised"] for r in rows].count("*") == 2
    finished = programs.run([*command, "--measure", f"--json={measured}"])
    assert finished.returncode == 0, finished.stderr
    measurements = [json.loads(line) for line in measured.read_text().splitlines()]
    assert [(r["link"], r["method"]) for r in measurements] == [
        (link, method) for link in ("100mbit", "100mbit+10ms") for method in methods
    ]
    delayed = {r["method"]: r["measured_ms"] for r in measurements[3:]}
    assert delayed["dense"] > 5  # half a round trip at least
    assert delayed["local_sgd 4"] < delayed["dense"]
    finished = programs.run([*command[:-5], *command[-1:], f"--from_json={measured}"])
    assert "2 configurations, 6 steps" in finished.stdout, finished.stderr
