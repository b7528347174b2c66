"""Times correcting, accumulating, selecting and encoding one gradient.

    python benchmarks/compress.py --json compress.json

The paths take turns within one run: `native` (the fused operation), `tensorflow` (the
same with TensorFlow operations), `top_k` (only `tf.math.top_k` of the magnitudes, which
neither accumulates nor encodes), and `floor`, a plain loop that reads three arrays and
writes two, like momentum SGD; nothing can be faster. `--cases --paths=native` times
slow cases, such as the sparsities of a warm-up, zeros and many tensors.
"""

import itertools
import os
import statistics
import sys
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from absl import app, flags
from common import compression_paths, processes, progress, reporting
from common.compression_paths import Work

from tf_dgc import native_library

_SIZES = flags.DEFINE_list(
    "sizes",
    ["1e4", "1e5", "1e6", "1e7", "2.556e7", "1e8"],
    "Entries of the tensor. 2.556e7 is ResNet-50.",
)
_SPARSITIES = flags.DEFINE_list(
    "sparsities", ["0.9", "0.99", "0.999", "0.9999"], "Shares of entries not sent."
)
_THREADS = flags.DEFINE_list("threads", ["1", "2"], "Threads of TensorFlow's pool.")
_DTYPES = flags.DEFINE_list("dtypes", ["float32"], "Types of the gradient.")
_PATHS = flags.DEFINE_list("paths", list(compression_paths.NAMES), "Paths to time.")
_REPEATS = flags.DEFINE_integer("repeats", 25, "Rounds, at most.", lower_bound=3)
_SECONDS = flags.DEFINE_float(
    "seconds", 5.0, "Seconds after which a case ends, once it has had three rounds."
)
_CASES = flags.DEFINE_bool(
    "cases", False, "Time slow cases instead, with the first number of `threads`."
)
_JSON = flags.DEFINE_string("json", None, "File to write the rows of the table to.")

COLUMNS = [
    ("path", "path", "s"),
    ("n", "n", ",d"),
    ("sparsity", "sparsity", ".2%"),
    ("threads", "threads", "d"),
    ("dtype", "type", "s"),
    ("median_ms", "median (ms)", ",.2f"),
    ("p90_ms", "p90 (ms)", ",.2f"),
    ("ratio_to_floor", "by floor", ".2f"),
    ("ns_per_entry", "ns per entry", ".2f"),
    ("extra_memory_percent", "extra memory (% of gradient)", ".2f"),
]


RESNET = 25_560_000
CASES = {
    "75 %": Work(RESNET, 0.75),
    "93.75 %": Work(RESNET, 0.9375),
    "98.4375 %": Work(RESNET, 0.984375),
    "99.6 %": Work(RESNET, 0.996),
    "99.9 %": Work(RESNET, 0.999),
    "75 %, nine of ten are 0": Work(RESNET, 0.75, content="mostly zeros"),
    "90 %, nine of ten are 0": Work(RESNET, 0.9, content="mostly zeros"),
    "99.9 %, all are 0": Work(RESNET, 0.999, content="zeros"),
    "99.9 %, 500 tensors of 2,048": Work(2048, 0.999, tensors=500),
    "90 %, 500 tensors of 2,048": Work(2048, 0.9, tensors=500),
    "99.999 % of 50 M": Work(50_000_000, 0.99999),
    "99.9 %, float16": Work(RESNET, 0.999, "float16"),
    "99.9 %, left out": Work(RESNET, 0.999, content="left out"),
}


def measure(work):
    """Time all paths in turn, in a process of their own; return one row per path."""
    flags.FLAGS(sys.argv)  # as in the parent
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    # Enough steps to make the third of a millisecond of a Python call negligible.
    num_steps = max(1, 20_000_000 // work.entries)
    names = {"floor", *_PATHS.value}
    functions = compression_paths.create_functions(names, work, num_steps)
    for name, function in functions.items():
        function()  # traces
        if name == "native":  # fills the residual; later steps predict from the last
            function()
            function()
    times = {name: [] for name in functions}
    start = time.perf_counter()
    for round_ in range(_REPEATS.value):
        for name, function in functions.items():
            before = time.perf_counter()
            function()
            times[name].append(1000 * (time.perf_counter() - before) / num_steps)
        if round_ >= 2 and time.perf_counter() - start > _SECONDS.value:
            break
    floor = statistics.median(times["floor"])
    return [
        {
            "path": name,
            "n": work.entries,
            "sparsity": work.sparsity,
            "threads": work.threads,
            "dtype": work.dtype,
            "median_ms": statistics.median(t),
            "p90_ms": float(np.percentile(t, 90)),
            "ratio_to_floor": statistics.median(t) / floor,
            "ns_per_entry": 1e6 * statistics.median(t) / work.entries,
            "rounds": len(t),
            "extra_memory_percent": None,
        }
        for name, t in times.items()
    ]


def extra_memory(work):
    """Return a native step's memory without its variables, in % of the gradient.

    Needs a process of its own: reused memory would not count.
    """
    flags.FLAGS(sys.argv)  # as in the parent
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    small = work._replace(n=10_000, tensors=1)
    compression_paths.create_functions(["native"], small, 1)["native"]()
    run = compression_paths.create_functions(["native"], work, 1)["native"]
    before = processes.resident()
    processes.forget_peak()
    run()
    size = work.entries * tf.as_dtype(work.dtype).size
    return 100 * (processes.peak() - before) / size


def create_cases():
    """Return the cases to measure, by name."""
    threads = list(map(int, _THREADS.value))
    if _CASES.value:
        return {name: work._replace(threads=threads[0]) for name, work in CASES.items()}
    product = itertools.product(
        [int(float(n)) for n in _SIZES.value],
        map(float, _SPARSITIES.value),
        _DTYPES.value,
        threads,
    )
    return {"-".join(map(str, work)): Work(*work) for work in product}


def main(_):
    """Measure all combinations and print the table."""
    unknown = set(_PATHS.value) - set(compression_paths.NAMES)
    if unknown:
        raise app.UsageError(
            f"Unknown names in --paths: {', '.join(unknown)}. "
            f"Paths are {', '.join(compression_paths.NAMES)}"
        )
    if "native" in _PATHS.value and native_library.load_library().library is None:
        raise app.UsageError(
            f"no native operations: {native_library.load_library().reason}"
        )
    rows = []
    cases = create_cases()
    for name in progress.track(cases, "cases", str):
        work = cases[name]
        case_rows = processes.call(measure, work)
        if "native" in _PATHS.value and work.entries >= 1_000_000:
            row = next(r for r in case_rows if r["path"] == "native")
            row["extra_memory_percent"] = processes.call(extra_memory, work)
        rows += [{"case": name, **row} for row in case_rows]
    columns = [("case", "case", "s"), *COLUMNS] if _CASES.value else COLUMNS
    reporting.report(rows, columns, "Compressing one tensor", _JSON.value)


if __name__ == "__main__":
    app.run(main)
