"""Measures bytes per entry on the wire, and the time of encoding and decoding.

    python benchmarks/wire.py --json wire.json

`encode` is one payload on one thread; `decode` is eight payloads on all processors,
with the operation's checks. `sum` is decoding followed by a dense sum, `update`
decoding followed by a sparse update of the variables. `compress` is the fused operation
in the same run, which includes encoding.
"""

import ctypes
import functools
import itertools
import os
import statistics
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from absl import app, flags
from common import compression_paths, kernels, progress, reporting

from tf_dgc import native_library
from tf_dgc.compressors import num_sent

# As in wire.h.
VALUE_TYPES = {
    "float32": 0,
    "bfloat16": 2,
    "float16": 3,
    "mxint8": 6,
    "mxfp4": 7,
    "sign": 4,
}
PAYLOADS = 8

_WIRE_SIZES = flags.DEFINE_list("n", ["1e6", "2.556e7"], "Entries of the tensor.")
_WIRE_SPARSITIES = flags.DEFINE_list(
    "sparsity", ["0.99", "0.999", "0.9999"], "Shares of entries not sent."
)
_ROUNDS = flags.DEFINE_integer("rounds", 31, "Rounds.", lower_bound=3)
_JSON = flags.DEFINE_string("json", None, "File to write the rows of the table to.")

COLUMNS = [
    ("value_dtype", "value type", ""),
    ("n", "n", ",d"),
    ("sparsity", "sparsity", ".2%"),
    ("bytes_per_entry", "bytes per entry", ".2f"),
    ("encode_ms", "encode (ms)", ".3f"),
    ("decode_ms", f"decode {PAYLOADS} (ms)", ".3f"),
    ("sum_ms", "and sum (ms)", ".3f"),
    ("update_ms", "or update (ms)", ".3f"),
    ("compress_ms", "compress (ms)", ",.2f"),
    ("coding_percent", "coding by compress", ".1f"),
]


def create_functions(library, n, k, value_dtype):
    """Return the bytes of a payload, and the functions to time by their column."""
    rng = np.random.default_rng(0)
    positions = np.unique(rng.integers(0, n, int(1.2 * k) + 8).astype(np.int32))
    positions = np.sort(rng.permutation(positions)[:k])
    values = kernels.floats(k, 1)
    shape = [
        kernels.length(n),
        kernels.length(k),
        ctypes.c_int(VALUE_TYPES[value_dtype]),
    ]
    inputs = [kernels.pointer(positions), kernels.pointer(values)]
    words = np.zeros(library.encode(*inputs, *shape, None), np.uint32)

    def encode():
        library.encode(*inputs, *shape, kernels.pointer(words))

    encode()
    buffers = np.tile(words, PAYLOADS)
    weights = kernels.floats(n, 2)

    def decode(sums=0, descends=0):
        workers = [kernels.pointer(buffers), kernels.length(PAYLOADS)]
        options = map(ctypes.c_int, (os.cpu_count(), sums, descends))
        if library.decode(*workers, *options, kernels.pointer(weights), *shape):
            raise RuntimeError("the decoder rejected the encoded payload")

    functions = {
        "encode_ms": encode,
        "decode_ms": decode,
        "sum_ms": functools.partial(decode, sums=1),
        "update_ms": functools.partial(decode, descends=1),
    }
    return words.nbytes, functions


def measure(library, n, sparsity):
    """Time all value types and the fused operation in turn; return rows."""
    k = num_sent(n, sparsity)
    codings = {v: create_functions(library, n, k, v) for v in VALUE_TYPES}
    num_steps = max(1, 20_000_000 // n)
    work = compression_paths.Work(n, sparsity, threads=os.cpu_count())
    step = compression_paths.create_functions(["native"], work, num_steps)
    functions = {("step", "ms"): step["native"]}
    for value_dtype, (_, coding) in codings.items():
        functions |= {(value_dtype, name): f for name, f in coding.items()}
    times = {key: [] for key in functions}
    for round_ in range(_ROUNDS.value + 2):
        for key, function in functions.items():
            start = time.perf_counter()
            function()
            if round_ > 1:  # earlier rounds trace and fill the residual
                times[key].append(1000 * (time.perf_counter() - start))
    medians = {key: statistics.median(t) for key, t in times.items()}
    compress_ms = medians["step", "ms"] / num_steps
    rows = []
    for value_dtype, (num_bytes, coding) in codings.items():
        row = {name: medians[value_dtype, name] for name in coding}
        coding_ms = row["encode_ms"] + row["decode_ms"]
        rows.append(
            {
                "value_dtype": value_dtype,
                "n": n,
                "sparsity": sparsity,
                "bytes_per_entry": num_bytes / k,
                **row,
                "compress_ms": compress_ms,
                "coding_percent": 100 * coding_ms / compress_ms,
            }
        )
    return rows


def main(_):
    """Measure all combinations and print the table."""
    if native_library.load_library().library is None:
        raise app.UsageError(
            f"no native operations: {native_library.load_library().reason}"
        )
    library = kernels.load()
    cases = itertools.product(_WIRE_SIZES.value, _WIRE_SPARSITIES.value)
    cases = progress.track(cases, "cases", ", ".join)
    rows = [row for n, s in cases for row in measure(library, int(float(n)), float(s))]
    reporting.report(rows, COLUMNS, "Coding on the wire", _JSON.value)


if __name__ == "__main__":
    app.run(main)
