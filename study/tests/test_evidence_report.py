"""Verdicts and the report of `study/evidence.py`."""

import math
import re

import numpy as np
import pytest
from evidence_rows import row
from registered import comparisons, intervals, papers, plan, plan_page, report, tables
from registered.specs import Spec
from scipy import stats


def test_paired_difference_equals_ttest():
    values = {"dense": [0.1, 0.5, 0.3, None], "dgc": [0.2, 0.4, 0.5, 0.6]}
    rows = [
        {"method": method, "seed": seed, "value": value}
        for method, by_seed in values.items()
        for seed, value in enumerate(by_seed)
    ]
    difference = intervals.paired(rows, "dgc")
    assert difference.seeds == (0, 1, 2)
    expected = stats.ttest_rel([0.2, 0.4, 0.5], [0.1, 0.5, 0.3])
    low, high = expected.confidence_interval(0.95)
    assert difference.mean == pytest.approx((low + high) / 2)
    assert difference.half_width == pytest.approx((high - low) / 2)
    assert not difference.separates
    one_pair = intervals.paired(rows[:1] + rows[4:], "dgc")
    assert one_pair.half_width == math.inf
    assert not one_pair.separates
    assert math.isnan(intervals.paired(rows[:1], "dgc").mean)


@pytest.mark.parametrize(
    ("task", "dgc", "verdict"),
    [
        ("cifar10", [0.801, 0.8, 0.8, 0.8, 0.8], "within the aim, 0.2"),
        ("cifar10", [0.8, 0.8], "within the aim, 0.2 (2 of 5 pairs so far)"),
        ("cifar10", [0.797, 0.796, 0.797, 0.797, 0.796], "not inferior by 0.5"),
        ("cifar10", [0.78, 0.81, 0.8, 0.81, 0.78], "open"),
        ("cifar10", [0.78, 0.781, 0.78, 0.78, 0.78], "inferior by more than 0.5"),
        ("cifar10", [0.8], "no interval yet"),
        ("cifar10", [0.801, 0.8, None, 0.8, None], "failed in 2 of 5"),
        ("cifar10", [0.801, 0.8, math.nan], "failed in 1 of 3"),
        # PTB's seed 0 is excluded for `dgc`.
        ("ptb", [0.9, 0.8, 0.8, math.inf], "failed in 1 of 3"),
        ("ptb", [0.9, 0.8, 0.8, 0.801], "within the aim, 0.5"),
        ("ptb", [0.82, 0.821, 0.82], "inferior by more than 1.0"),
        ("mnist", [0.8, 0.8], ""),
    ],
)
def test_verdict_compares_interval_and_margin(task, dgc, verdict):
    specs = plan.Group(task, plan.PAIR, tuple(range(len(dgc)))).specs()
    rows = [row(s, 0.8 if s.method == "dense" else dgc[s.seed]) for s in specs]
    (comparison,) = comparisons.from_rows(rows)
    assert comparison.verdict("dgc") == verdict
    assert comparison.verdict("dense") == ""


def test_superseded_runs_are_listed_and_pending(tmp_path):
    methods = *plan.PAIR, "float16"
    tasks = "shakespeare", "mnist"
    specs = [s for t in tasks for s in plan.Group(t, methods, (0,)).specs()]
    rows = [row(s, 0.5, commit=plan.FIRST_COMMITS[0] + 33 * "0") for s in specs]
    pending = [s for s in plan.pending(rows) if s in specs]
    assert [(s.task, s.method) for s in pending if s.method != "dgc"] == [
        ("shakespeare", "float16")
    ]
    report.write(rows, tmp_path)
    section = (tmp_path / "report.md").read_text().partition("## Not counted")[2]
    assert section.count("- `") == 1
    assert all((s.command in section) == (s.method != "dgc") for s in pending)


def test_runs_with_rate_when_sent_are_labelled_and_pending(tmp_path):
    specs = plan.Group("ptb", (*plan.PAIR, plan.UNMASKED), (0, 1)).specs()
    rows = [row(s, 0.5, commit=plan.FIRST_COMMITS[1] + 33 * "0") for s in specs]
    assert {s.method for s in plan.pending(rows) if s in specs} == {"dgc"}
    (comparison,) = comparisons.from_rows(rows)
    labels, suffix = comparison.labels, plan.RATE_WHEN_SENT
    assert labels[0] == "dense"
    assert {label for label in labels if label.endswith(suffix)} == {
        "dgc" + suffix,
        plan.UNMASKED + suffix,
    }
    assert comparison.verdict("dgc" + suffix) == "exploratory"
    repeated = [row(s, 0.5, commit=40 * "1") for s in specs]
    assert not [s for s in plan.pending(rows + repeated) if s in specs]


def test_seeds_that_led_to_a_method_are_excluded():
    methods = "dense", plan.UNMASKED, "float16"
    specs = plan.Group("ptb", methods, (0, 1, 2)).specs()
    (comparison,) = comparisons.from_rows([row(s, 1.0 + s.seed) for s in specs])
    assert comparison.difference(plan.UNMASKED).seeds == (1, 2)
    assert comparison.difference("float16").seeds == (0, 1, 2)
    for label in methods[1:]:
        assert comparison.verdict(label) == "exploratory"


@pytest.mark.parametrize(
    "other", [{"settings": {"tuning": True}}, {"steps": 1500}, {"seed": 7, "steps": 1}]
)
def test_unplanned_runs_are_ignored(other):
    """For example tuning runs, which are no evidence."""
    specs = plan.Group("cifar10", plan.PAIR, (0, 1)).specs()
    rows = [row(s, 0.8) for s in specs]
    expected, *_ = comparisons.from_rows(rows)
    unplanned = {**row(specs[1], 0.1), **other}
    groups = comparisons.from_rows([*rows, unplanned])
    (comparison,) = (group for group in groups if "dense" in group.labels)
    assert comparison.difference("dgc") == expected.difference("dgc")
    assert comparison.mean("dgc") == expected.mean("dgc")


def test_ratio_of_the_paper():
    sizes = [(1000, 1000), (1000,)]
    expected = 4 * 1_001_000 / (6 * 1000 + 4 * 1000)
    assert papers.ratio(sizes) == pytest.approx(expected)


def test_failed_dense_run_prevents_a_verdict():
    specs = plan.Group("cifar10", plan.PAIR, (0, 1, 2)).specs()
    rows = [row(s, None if (s.method, s.seed) == ("dense", 1) else 0.8) for s in specs]
    (comparison,) = comparisons.from_rows(rows)
    assert comparison.verdict("dgc") == "failed in 1 of 3"
    assert comparison.difference("dgc").seeds == (0, 2)
    assert comparison.mean("dgc", (0, 2)) == pytest.approx(80)
    rows.append(row(specs[2], 0.8))  # a retry
    (comparison,) = comparisons.from_rows(rows)
    assert comparison.verdict("dgc") == "within the aim, 0.2 (3 of 5 pairs so far)"


def test_answers_include_tasks_whose_runs_failed():
    specs = plan.Group("cifar10", plan.PAIR, (0, 1)).specs()
    rows = [row(s, 0.8 if s.method == "dense" else None) for s in specs]
    rows.append(row(plan.Group("mnist", ("dense",), (0,)).specs()[0]))  # without a pair
    text = tables.answers(comparisons.from_rows(rows))
    headings, _, line = ([c.strip() for c in x.split("|")] for x in text.splitlines())
    cells = dict(zip(headings[3:], line[3:], strict=True))
    assert line[1:3] == ["cifar10, 4 workers", "accuracy %"]
    assert (cells["pairs"], cells["dgc"], cells["difference"]) == ("0", "", "")
    assert cells["margin"] == "failed in 2 of 2"


@pytest.mark.slow
def test_report_has_methods_failures_and_papers(tmp_path):
    pytest.importorskip("matplotlib")
    from registered import report

    random = np.random.default_rng(0)
    labels = *plan.ALL, plan.UNMASKED, *plan.ABLATION, "sign_sgd"
    groups = [
        plan.Group("cifar10", labels, (0, 1, 2)),
        plan.Group("cifar10", plan.PAIR, (0,), model=plan.RESNET20),
        plan.Group("ptb", plan.PAIR, (0, 1)),
    ]
    rows = [row(s, random.uniform(0.8, 0.9)) for g in groups for s in g.specs()]
    failed = Spec("cifar10", "stc", {}, 4, 0, 10_000)
    rows.append(row(failed, None, error="the loss is not finite"))
    crashed = Spec("ptb", "float16", {}, 4, 0, 5_000)  # its row has no metric
    rows.insert(0, row(crashed, None, metric=None, curve=[], error="status 1"))
    unpaired = Spec("ptb", "dense", {}, 4, 2, 5_000)
    rows.append(row(unpaired, 8.0))
    rows[-1]["commit"] = "def" * 14 + "-dirty"
    rows[-2]["resumed_at"] = ["fed" * 14]
    rows[-2]["curve"][0]["value"] = None  # not finite at this step
    report.write(rows, tmp_path)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    for label in ("dense", "float16", *plan.ABLATION, "sign_sgd", "stc"):
        assert f"| {label} |" in page
    assert "1 of abcabcabcabc, then fedfedfedfed; 1 of defdefdefdef-dirty." in page
    assert "All are of commit abcabcabcabc." in page
    assert f"`{failed.command}`: the loss is not finite" in page
    (heading,) = (
        line
        for line in page.splitlines()
        if "| perplexity |" in line and "method" in line
    )
    columns = [cell.strip() for cell in heading.strip("|").split("|")]
    (dgc,) = (
        line
        for line in page.split("## ptb")[1].split("## ")[0].splitlines()
        if "| dgc (" in line
    )
    cells = dict(zip(columns, dgc.strip("|").split("|"), strict=True))
    assert int(cells["pairs"]) == 1  # without seed 0
    assert float(cells["dense, same seeds"]) < 1
    assert "| dgc unmasked (defined after seeds 0 and 1 had been evaluated) |" in page
    answers = page.partition("## How to read this")[0]
    (line,) = (
        x for x in answers.splitlines() if x.startswith("| cifar10, 4 workers |")
    )
    assert line.split(" | ")[1] == "accuracy %"
    assert line.split(" | ")[4] == "3"
    assert "| sign_sgd | dgc | 3 |" in page
    assert "| + warm-up | + factor masking | 3 |" in page
    assert "Time to an accuracy" not in page  # no such rows
    assert plan_page.changes() in page
    assert "2026-11-25: `dgc unmasked` is a method too" in page
    assert "| 93.75 | 93.87 |" in page
    assert "| 72.3 | 72.24 |" in page
    assert "## cifar10 with 3 blocks, stride 1, 4 workers" in page
    assert "| ratio | ratio at the end | ring ratio | ring ratio at the end |" in page
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.count("<table>") == 6
    for name in re.findall(r'src="(.+?)"', html):
        assert (tmp_path / name).stat().st_size > 1000
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.slow
def test_report_of_time_over_links(tmp_path):
    pytest.importorskip("matplotlib")
    shared = dict.fromkeys(["workers", "steps", "looks", "width", "cpus"], 2)
    shared |= {"task": "digits", "rate": "1gbit", "processor": "one", "attempt": 0}
    curves = {
        ("dense", 0): [[0.0, 0, 0.1], [10.0, 5, 0.6], [20.0, 10, 0.9]],
        ("dense", 1): [[0.0, 0, 0.1], [10.0, 5, 0.6], [30.0, 10, 0.9]],
        ("dgc", 0): [[0.0, 0, 0.1], [5.0, 5, 0.896], [10.0, 10, 0.91]],
        ("dgc", 1): [[0.0, 0, 0.1], [5.0, 5, 0.5], [10.0, 10, 0.91]],
        ("late", 0): [[0.0, 0, 0.1], [5.0, 5, 0.5], [10.0, 10, 0.89]],
    }
    rows = [
        {**shared, "mode": mode, "seed": seed, "curve": curve, "value": curve[-1][2]}
        for (mode, seed), curve in curves.items()
    ]
    key = {**shared, "mode": "dead", "seed": 0}
    rows.append({**key, "value": None, "curve": [], "error": "died"})
    report.write([], tmp_path, rows)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| digits")]
    cells = {c[3]: c for c in ([w.strip() for w in x.split("|")] for x in lines)}
    assert cells["dense"][4:9] == ["2", "90.00", "", "25.0", ""]
    assert cells["dgc"][4:8] == ["2", "91.00", "+1.00 ± 0.00", "7.5"]
    assert cells["dgc"][8].startswith("3.46 (")  # the root of 4 times 3
    assert cells["late"][4:9] == ["1", "89.00", "-1.00", "0 of 1 reached it", ""]
    assert cells["dead"][5] == "1 failed"
    assert (tmp_path / "over-links.svg").stat().st_size > 1000
