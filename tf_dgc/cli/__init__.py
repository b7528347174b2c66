"""The command line: `tf-dgc run`, `doctor`, `advise`, `report` and others.

`main` is the entry; nothing else is loaded before it is needed.
"""

__all__ = [
    "advise",
    "doctor",
    "kinds",
    "listing",
    "main",
    "parsers",
    "quiet",
    "report",
    "serving",
]
