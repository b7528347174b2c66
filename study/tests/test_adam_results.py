"""What `study/adam.py` makes of its rows, and those that are kept."""

import pathlib

import pytest
from common import resumable
from experiments import adam

ROWS = pathlib.Path(__file__).parents[1] / "rows/adam.jsonl"
SIZE, EXEMPT, STEPS = 4 * 400_000, 4 * 3200, 100


def row(**differing):
    """Return a row of a run that sends a tenth of everything in each step."""
    method = differing.get("method", "dgc 99 %")
    seed = differing.get("seed", 0)
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
        "exempt_bytes_per_step": EXEMPT,
        "seconds": 60.0,
        "curve": [
            [at, at * per_step, 4.0 + seed - at / 50] for at in range(10, 101, 10)
        ],
        **differing,
    }


def test_losses_at_equal_bytes():
    """Between points, the last one of who sends less, and none before the first."""
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


def test_distances_are_of_pairs():
    """With Student's interval, of the seeds that both have; none of a single one."""
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


def test_no_distance_of_runs_of_which_one_failed():
    """The mean of those that did not fail would hide it."""
    rows = [row(method="dense", seed=seed) for seed in (0, 1)]
    rows += [row(value=2.5), row(seed=1, value=float("nan"))]
    _, dgc = adam.summaries(rows)
    assert dgc["value"] != dgc["value"]
    assert "to_dense" not in dgc


@pytest.mark.parametrize(
    ("method", "uncompressed"),
    [("dgc 99 %", EXEMPT), ("dgc 99.2 % mxfp4", 3200 + 100)],
)
def test_exempt_tensors_count_in_their_own_type(method, uncompressed):
    """In 8 bits and a scale for 32 of them, or whole; no ratio is negative."""
    few = [[at, at * (uncompressed + 1000), 2.0] for at in (20, 100)]
    (line,) = adam.summaries([row(method=method, curve=few)])
    assert line["apart"] == pytest.approx((SIZE - EXEMPT) / 1000)
    assert line["ratio"] == pytest.approx(SIZE / (uncompressed + 1000))


def searches(by_steps):
    return [
        row(seed=100, steps=steps, rate=rate, value=value)
        for steps, values in by_steps.items()
        for rate, value in values.items()
    ]


@pytest.mark.parametrize(
    ("by_steps", "found"),
    [
        ({10: {0.001: 3.0, 0.004: 2.0}, 50: {0.001: 2.0, 0.002: 3.0}}, (50, "yes")),
        ({10: {0.001: 2.0, 0.004: 3.0}, 50: {0.001: 2.0, 0.002: 1.0}}, (10, "yes")),
        ({50: {0.001: 2.0, 0.002: 3.0, 0.0005: 3.0}}, (50, None)),
        ({10: {0.001: 2.0, 0.002: 3.0}, 50: {0.001: 2.0}}, (10, "yes")),  # just begun
        ({50: {0.001: 2.0, 0.002: 1.0}}, (None, None)),  # so it was given
        ({200: {0.001: 2.0, 0.002: 3.0}}, (None, None)),
    ],
)
def test_how_the_rate_was_chosen(by_steps, found):
    """By the longest search that chose it, and whether it ended at the edge."""
    (line,) = adam.summaries([*searches(by_steps), row(rate=0.001)])
    assert (line.get("searched"), line.get("edge")) == found


def test_the_rate_that_was_searched_is_taken():
    """Whatever other rates reach with seeds that count."""
    search = searches({STEPS: {0.001: 2.0, 0.002: 1.0, 0.004: 3.0}})
    given = [row(rate=rate, value=rate) for rate in (0.001, 0.002, 0.004)]
    more = row(rate=0.004, seed=1)
    for counted in ([*given, more], [more, *given[::-1]]):
        (line,) = adam.summaries([*search, *counted])
        assert (line["rate"], line["value"]) == (0.002, 0.002)
        (line,) = adam.summaries(counted)
        assert (line["rate"], line["seeds"]) == (0.004, 2)


def test_names_of_earlier_days_have_no_control():
    (line,) = adam.summaries([row(method="0/1 adam", jit_compile=True)])
    assert (line.get("to_control"), line["xla"]) == (None, "yes")


def test_rows_that_are_kept(tmp_path):
    lines = adam.summaries(resumable.read_rows([ROWS]), [25.0])
    assert "dense" in {line["method"] for line in lines}
    for line in lines:
        assert 0 < line["then"] <= line["apart"]
    pytest.importorskip("adjustText")
    from experiments import pictures

    pictures.draw_curves({"kept": lines, "again": lines}, tmp_path / "curves.svg")
    picture = (tmp_path / "curves.svg").read_text()
    assert picture.count("bytes that a worker sent") == 2
