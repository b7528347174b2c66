"""The tables of `study/periods.py`."""

import pytest
from common import distant_runs
from experiments import periods


def link_row(mode, period, step_ms, alone_ms):
    return {
        **{"mode": mode, "period": period, "rate": "10mbit", "delay_ms": 20.0},
        **{"step_ms": step_ms, "alone_ms": alone_ms, "workers": 4, "parameters": 3},
    }


def run_row(method, period, seed, curve, **overrides):
    return {
        **{"task": "mnist", "steps": 8, "workers": 4, "bytes": 80, "rate": 0.1},
        **{"method": method, "period": period, "seed": seed, "curve": curve},
        **{"value": curve[-1][2], "loss": 1 - curve[-1][2], "metric": "accuracy"},
        **overrides,
    }


def test_seconds_to_the_target():
    """The exchange measured with one period serves for all periods."""
    dense = [run_row("dense", 1, s, [(4, None, 0.5), (8, None, 0.9)]) for s in (0, 1)]
    local = [run_row("sparse_loco", 8, s, [(4, 1, 0.895), (8, 2, 0.9)]) for s in (0, 1)]
    not_reached = [
        run_row("sparse_loco", 2, s, [(8, 2, 0.5 + 0.4 * s)]) for s in (0, 1)
    ]
    search = [
        run_row("dense adamw", 1, periods.SEED_OF_RATES, [(8, None, value)], rate=rate)
        for rate, value in ((0.1, 0.99), (0.2, 0.5))
    ]
    ignored = [
        run_row("sparse_loco", 8, 0, [(8, 1, 0.1)], rate=0.2),  # another rate
        run_row("dense", 1, 0, [(2, 1, 0.1)], steps=2),  # shorter
        run_row("dense", 1, 0, [(8, 1, 0.1)], workers=2),
    ]
    runs = [*dense, *local, *not_reached, *search, *ignored]
    lines, *_ = periods.summaries(runs)
    assert [(r["method"], r["period"], r["runs"]) for r in lines] == [
        *[("dense", 1, 2), ("sparse_loco", 8, 2), ("sparse_loco", 2, 2)]
    ]
    assert [r["steps_to_target"] for r in lines] == [8, 4, None]
    assert lines[2]["to_dense"] == pytest.approx(0.3 / 0.1 - 1)
    rows = [link_row("none", 1, 10.0, 10.0), link_row("dense", 1, 100.0, None)]
    rows += [link_row("sparse_loco", 4, 15.0, 10.0)]
    seconds = periods.seconds(distant_runs.add_comparisons(rows), runs)
    assert [(r["mode"], r["period"], r["mnist"]) for r in seconds] == [
        ("dense", 1, pytest.approx(8 * 0.1)),
        ("sparse_loco", 8, pytest.approx(4 * (0.010 + 0.020 / 8))),
        ("sparse_loco", 2, None),
    ]
    assert (
        periods.seconds(distant_runs.add_comparisons(rows), runs[::-1])[0] == seconds[0]
    )
    with pytest.raises(periods.SizeError, match="Received: 30 parameters"):
        periods.seconds(
            distant_runs.add_comparisons([r | {"parameters": 30} for r in rows]), runs
        )
