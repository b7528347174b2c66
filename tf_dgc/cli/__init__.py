"""The command line: `tf-dgc run`, `doctor`, `methods`, `exchanges` and `advise`.

`main` is the entry; nothing else is loaded before it is needed.
"""

__all__ = [
    "advise",
    "doctor",
    "listing",
    "main",
    "serving",
]
