"""Testing: several workers of one method in one process.

For tests, for comparing methods, and for those who write one.
"""

__all__ = [
    "communicator",
    "simulation",
]
