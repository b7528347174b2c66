"""What `study/periods.py` computes from its rows and those of distant workers."""

import pytest
from common import distant_runs
from experiments import periods


def row(mode, period, step_ms, alone_ms):
    return {
        **{"mode": mode, "period": period, "rate": "10mbit", "delay_ms": 20.0},
        **{"step_ms": step_ms, "alone_ms": alone_ms, "workers": 4, "parameters": 3},
    }


def a_run(method, period, seed, curve, **other):
    return {
        **{"task": "mnist", "steps": 8, "workers": 4, "bytes": 80, "rate": 0.1},
        **{"method": method, "period": period, "seed": seed, "curve": curve},
        **{"value": curve[-1][2], "loss": 1 - curve[-1][2], "metric": "accuracy"},
        **other,
    }


def test_seconds_to_the_target():
    """Of local steps every period's, with the exchange that was measured for one."""
    dense = [a_run("dense", 1, s, [(4, None, 0.5), (8, None, 0.9)]) for s in (0, 1)]
    local = [a_run("sparse_loco", 8, s, [(4, 1, 0.895), (8, 2, 0.9)]) for s in (0, 1)]
    never = [a_run("sparse_loco", 2, s, [(8, 2, 0.5 + 0.4 * s)]) for s in (0, 1)]
    tried = [
        a_run("dense adamw", 1, periods.SEED_OF_RATES, [(8, None, value)], rate=rate)
        for rate, value in ((0.1, 0.99), (0.2, 0.5))
    ]
    others = [a_run("sparse_loco", 8, 0, [(8, 1, 0.1)], rate=0.2)]  # not chosen
    others += [a_run("dense", 1, 0, [(2, 1, 0.1)], steps=2)]  # shorter
    others += [a_run("dense", 1, 0, [(8, 1, 0.1)], workers=2)]
    runs = [*dense, *local, *never, *tried, *others]
    shown, *_ = periods.summaries(runs)
    assert [(r["method"], r["period"], r["runs"]) for r in shown] == [
        *[("dense", 1, 2), ("sparse_loco", 8, 2), ("sparse_loco", 2, 2)]
    ]
    assert [r["steps_to_target"] for r in shown] == [8, 4, None]
    assert shown[2]["to_dense"] == pytest.approx(0.3 / 0.1 - 1)
    rows = [row("none", 1, 10.0, 10.0), row("dense", 1, 100.0, None)]
    rows += [row("sparse_loco", 4, 15.0, 10.0)]
    found = periods.seconds(distant_runs.add_comparisons(rows), runs)
    assert [(r["mode"], r["period"], r["mnist"]) for r in found] == [
        ("dense", 1, pytest.approx(8 * 0.1)),
        ("sparse_loco", 8, pytest.approx(4 * (0.010 + 0.020 / 8))),
        ("sparse_loco", 2, None),
    ]
    assert (
        periods.seconds(distant_runs.add_comparisons(rows), runs[::-1])[0] == found[0]
    )
    with pytest.raises(periods.SizeError, match="Received: 30 parameters"):
        periods.seconds(
            distant_runs.add_comparisons([r | {"parameters": 30} for r in rows]), runs
        )
