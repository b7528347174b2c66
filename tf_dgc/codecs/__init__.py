"""Codecs: positions, values and headers as words of 32 bits, and back.

docs/wire_format.md specifies them. May import `transforms` and `_internals`.
"""

__all__ = [
    "bits",
    "bitstream",
    "blocks",
    "checks",
    "dense",
    "elias",
    "elias_fano",
    "gaps",
    "header",
    "tensor",
    "value_types",
    "wire",
]
