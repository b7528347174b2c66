"""Metrics: what was sent, and how long entries have waited.

May import `distribute` and `collectives`.
"""

__all__ = [
    "counting",
    "staleness",
]
