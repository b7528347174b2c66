"""Makes `common`, which the benchmarks share, importable: each command imports this."""

import pathlib
import sys

_BENCHMARKS = str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks")
if _BENCHMARKS not in sys.path:
    sys.path.append(_BENCHMARKS)
