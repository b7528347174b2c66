"""How many bytes an entry costs on the wire, and what coding costs in time.

    python benchmarks/wire.py --json wire.json

Encoding is of one payload, on one thread. Decoding is of eight, checks included, with
the operation's code on all processors; here threads are even started for it. The fused
operation encodes within its own time, which is `compress`, of the same run.
"""

import ctypes
import itertools
import os
import statistics
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import compress
import kernels
import numpy as np
import reporting
from absl import app, flags

from tf_dgc import ops
from tf_dgc.compressors import num_sent

VALUE_TYPES = {"float32": 0, "bfloat16": 2, "float16": 3, "sign": 4}  # as in wire.h
PAYLOADS = 8

_WIRE_SIZES = flags.DEFINE_list("n", ["1e6", "2.556e7"], "Entries of the tensor.")
_WIRE_SPARSITIES = flags.DEFINE_list(
    "sparsity", ["0.99", "0.999", "0.9999"], "Shares that are not sent."
)
_ROUNDS = flags.DEFINE_integer("rounds", 31, "Rounds.", lower_bound=3)

COLUMNS = [
    ("value_dtype", "value type", ""),
    ("n", "n", ",d"),
    ("sparsity", "sparsity", ".2%"),
    ("bytes_per_entry", "bytes per entry", ".2f"),
    ("encode_ms", "encode (ms)", ".3f"),
    ("decode_ms", f"decode {PAYLOADS} (ms)", ".3f"),
    ("compress_ms", "compress (ms)", ",.2f"),
    ("coding_percent", "coding by compress", ".1f"),
]


def make_coding(library, n, k, value_dtype):
    """Return the bytes of a payload, and functions that encode one and decode eight."""
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

    def decode():
        workers = [kernels.pointer(buffers), kernels.length(PAYLOADS)]
        if library.decode(*workers, ctypes.c_int(os.cpu_count()), *shape):
            raise RuntimeError("the decoder refused what was encoded")

    return words.nbytes, encode, decode


def measure(library, n, sparsity):
    """Time all value types and the fused operation by turns; return rows."""
    k = num_sent(n, sparsity)
    coding = {v: make_coding(library, n, k, v) for v in VALUE_TYPES}
    times = max(1, 20_000_000 // n)
    step = compress.make_paths(n, sparsity, "float32", os.cpu_count(), times)["native"]
    found = {}
    for round_ in range(_ROUNDS.value + 2):
        timed = [
            ("step", step),
            *((v, f) for v, (_, *fs) in coding.items() for f in fs),
        ]
        for i, (_, function) in enumerate(timed):
            start = time.perf_counter()
            function()
            if round_ > 1:  # the first ones trace and fill the residual
                found.setdefault(i, []).append(1000 * (time.perf_counter() - start))
    medians = [statistics.median(found[i]) for i in range(len(timed))]
    compress_ms = medians[0] / times
    rows = []
    for i, (value_dtype, (num_bytes, *_)) in enumerate(coding.items()):
        encode_ms, decode_ms = medians[1 + 2 * i : 3 + 2 * i]
        rows.append(
            {
                "value_dtype": value_dtype,
                "n": n,
                "sparsity": sparsity,
                "bytes_per_entry": num_bytes / k,
                "encode_ms": encode_ms,
                "decode_ms": decode_ms,
                "compress_ms": compress_ms,
                "coding_percent": 100 * (encode_ms + decode_ms) / compress_ms,
            }
        )
    return rows


def main(_):
    """Measure all combinations and print the table."""
    if ops.native().library is None:
        raise app.UsageError(f"no native operations: {ops.native().reason}")
    library = kernels.load()
    cases = itertools.product(_WIRE_SIZES.value, _WIRE_SPARSITIES.value)
    rows = [row for n, s in cases for row in measure(library, int(float(n)), float(s))]
    reporting.report(rows, COLUMNS, "Coding on the wire", flags.FLAGS.json)


if __name__ == "__main__":
    app.run(main)
