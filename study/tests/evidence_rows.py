"""Invented rows of `study/evidence.py`."""


def row(spec, value=0.5, **overrides):
    """Return the row of a run that ended with this value."""
    curve = [
        {"step": s, "bytes": 100 * s, "seconds": s, "loss": 1.0, "value": value}
        for s in (5, 10)
    ]
    row = {
        **vars(spec),
        **{"metric": "accuracy", "value": value, "curve": curve},
        **{"bytes_per_worker": 1000, "seconds": 60.0, "commit": "abc" * 14},
        **{"command": spec.command, "started": "2026-01-01 00:00:00+00:00"},
    }
    return {**row, **overrides}
