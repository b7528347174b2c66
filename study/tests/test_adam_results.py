"""The tables of `study/adam.py`, of invented and of stored rows."""

import pathlib

import pytest
from common import resumable
from experiments import adam

ROWS = pathlib.Path(__file__).parents[1] / "rows/adam.jsonl"
SIZE, UNCOMPRESSED, STEPS = 4 * 400_000, 4 * 3200, 100


def row(**overrides):
    """Return a row; all methods but dense send a tenth of the bytes in each step."""
    method = overrides.get("method", "dgc 99 %")
    seed = overrides.get("seed", 0)
    per_step = SIZE if method == "dense" else SIZE / 10
    return {
        "task": "shakespeare",
        "method": method,
        "rate": 0.001,
        "steps": STEPS,
        "workers": 2,
        "batch": 16,
        "seed": seed,
        "metric": "loss",
        "value": 2.0 + seed,
        "dense_bytes_per_step": SIZE,
        "exempt_bytes_per_step": UNCOMPRESSED,
        "seconds": 60.0,
        "curve": [
            [step, step * per_step, 4.0 + seed - step / 50]
            for step in range(10, 101, 10)
        ],
        **overrides,
    }


def test_loss_at_a_budget_is_interpolated():
    """It is None before the first point, and the final loss after the last one."""
    curve = [(10, 100.0, 3.0), (20, 300.0, 2.0)]
    budgets = {50: None, 100: 3.0, 250: 2.25, 300: 2.0, 1000: 2.0}
    assert {b: adam.loss_at(curve, b) for b in budgets} == budgets
    rows = [row(method=m, seed=s) for m in ("dense", "dgc 99 %") for s in (0, 1)]
    dense, dgc = adam.summaries(rows, [4.0, 25.0])
    assert dense["loss_at_4"] == pytest.approx(4.5 - 25 / 50)
    assert dense["loss_at_25"] is None
    assert dgc["loss_at_4"] == dgc["value"] == 2.5
    assert dgc["loss_at_25"] == pytest.approx(4.5 - 40 / 50)
    assert (dgc["to_dense"], dgc["to_dense_half_width"], dgc["xla"]) == (0, 0, None)
    assert "to_control" not in dgc
    assert "to_dense" not in dense


def test_differences_are_paired_by_seed():
    """A single pair has no interval."""
    values = {"dense": [2.0, 5.0, 7.0], "dgc 99 %": [2.1, 5.3], "1-bit adam": [3.0]}
    rows = [
        row(method=method, seed=seed, value=value)
        for method, by_seed in values.items()
        for seed, value in enumerate(by_seed)
    ]
    _, dgc, one = adam.summaries(rows)
    assert dgc["to_dense"] == pytest.approx(0.2)
    assert dgc["to_dense_half_width"] == pytest.approx(12.7062 * 0.1, rel=1e-5)
    assert one["to_dense"] == 1.0
    assert "to_dense_half_width" not in one


def test_no_difference_if_a_run_failed():
    """The mean of the others would hide the failure."""
    rows = [row(method="dense", seed=seed) for seed in (0, 1)]
    rows += [row(value=2.5), row(seed=1, value=float("nan"))]
    _, dgc = adam.summaries(rows)
    assert dgc["value"] != dgc["value"]
    assert "to_dense" not in dgc


@pytest.mark.parametrize(
    ("method", "uncompressed"),
    [("dgc 99 %", UNCOMPRESSED), ("dgc 99.2 % mxfp4", 3200 + 100)],
)
def test_uncompressed_tensors_count_in_their_dtype(method, uncompressed):
    """float32, or 8 bits and a scale per 32 entries."""
    curve = [[step, step * (uncompressed + 1000), 2.0] for step in (20, 100)]
    (line,) = adam.summaries([row(method=method, curve=curve)])
    assert line["apart"] == pytest.approx((SIZE - UNCOMPRESSED) / 1000)
    assert line["ratio"] == pytest.approx(SIZE / (uncompressed + 1000))


def search_rows(by_steps):
    return [
        row(seed=100, steps=steps, rate=rate, value=value)
        for steps, values in by_steps.items()
        for rate, value in values.items()
    ]


@pytest.mark.parametrize(
    ("by_steps", "expected"),
    [
        ({10: {0.001: 3.0, 0.004: 2.0}, 50: {0.001: 2.0, 0.002: 3.0}}, (50, "yes")),
        ({10: {0.001: 2.0, 0.004: 3.0}, 50: {0.001: 2.0, 0.002: 1.0}}, (10, "yes")),
        ({50: {0.001: 2.0, 0.002: 3.0, 0.0005: 3.0}}, (50, None)),
        ({10: {0.001: 2.0, 0.002: 3.0}, 50: {0.001: 2.0}}, (10, "yes")),  # incomplete
        ({50: {0.001: 2.0, 0.002: 1.0}}, (None, None)),  # another rate is better
        ({200: {0.001: 2.0, 0.002: 3.0}}, (None, None)),
    ],
)
def test_search_that_selected_the_rate_is_reported(by_steps, expected):
    """The longest such search, and whether the rate is at its edge."""
    (line,) = adam.summaries([*search_rows(by_steps), row(rate=0.001)])
    assert (line.get("searched"), line.get("edge")) == expected


def test_best_rate_of_the_search_is_used():
    """Even if other rates are better with other seeds."""
    search = search_rows({STEPS: {0.001: 2.0, 0.002: 1.0, 0.004: 3.0}})
    first_seed = [row(rate=rate, value=rate) for rate in (0.001, 0.002, 0.004)]
    second_seed = row(rate=0.004, seed=1)
    for rows in ([*first_seed, second_seed], [second_seed, *first_seed[::-1]]):
        (line,) = adam.summaries([*search, *rows])
        assert (line["rate"], line["value"]) == (0.002, 0.002)
        (line,) = adam.summaries(rows)
        assert (line["rate"], line["seeds"]) == (0.004, 2)


def test_line_without_control_rows_has_no_difference():
    (line,) = adam.summaries([row(method="0/1 adam", jit_compile=True)])
    assert (line.get("to_control"), line["xla"]) == (None, "yes")


def test_stored_rows_can_be_summarized_and_plotted(tmp_path):
    lines = adam.summaries(resumable.read_rows([ROWS]), [25.0])
    assert "dense" in {line["method"] for line in lines}
    for line in lines:
        assert 0 < line["then"] <= line["apart"]
    pytest.importorskip("adjustText")
    from experiments import pictures

    panels = {"first": lines, "second": lines}
    pictures.draw_curves(panels, tmp_path / "curves.svg")
    picture = (tmp_path / "curves.svg").read_text()
    assert picture.count("bytes that a worker sent") == 2
