"""The command line: `tf-dgc run`, `tf-dgc doctor`, `tf-dgc methods`.

`main` is the entry; nothing else is loaded before it is needed.
"""

__all__ = [
    "doctor",
    "listing",
    "main",
    "serving",
]
