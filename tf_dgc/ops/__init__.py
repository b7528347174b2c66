"""Ops: the door to the native operations.

Finds, checks and loads the library. Imports nothing of the package.
"""

__all__ = [
    "loader",
]
