"""How long it takes to correct, accumulate, select and encode one gradient.

    python benchmarks/compress.py --json compress.json

Paths, alternating within one run: `native` (the fused operation), `tensorflow` (the
same by TensorFlow operations), `top_k` (`tf.math.top_k` of the magnitudes alone, which
neither accumulates nor encodes), and `floor`, a plain loop over the same memory: it
reads three arrays and writes two, as momentum SGD does, and nothing can be faster.
`--cases --paths=native` times what a warm-up, zeros, many tensors and the like take.
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
from common import paths, processes, progress, reporting
from common.paths import Work

from tf_dgc import native_library

_SIZES = flags.DEFINE_list(
    "sizes",
    ["1e4", "1e5", "1e6", "1e7", "2.556e7", "1e8"],
    "Entries of the tensor. 2.556e7 is ResNet-50.",
)
_SPARSITIES = flags.DEFINE_list(
    "sparsities", ["0.9", "0.99", "0.999", "0.9999"], "Shares that are not sent."
)
_THREADS = flags.DEFINE_list("threads", ["1", "2"], "Threads of TensorFlow's pool.")
_DTYPES = flags.DEFINE_list("dtypes", ["float32"], "Types of the gradient.")
_PATHS = flags.DEFINE_list("paths", list(paths.NAMES), "What to time.")
_REPEATS = flags.DEFINE_integer("repeats", 25, "Rounds, at most.", lower_bound=3)
_SECONDS = flags.DEFINE_float(
    "seconds", 5.0, "After this time a case ends, if it has had three rounds."
)
_CASES = flags.DEFINE_bool(
    "cases", False, "Time what is slow, of the first of `threads`, instead."
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
    """Time all paths by turns, in a process of its own; return one row per path."""
    flags.FLAGS(sys.argv)  # those of the parent
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    # Enough for Python's call of a function (a third of a millisecond) not to count.
    times = max(1, 20_000_000 // work.entries)
    names = {"floor", *_PATHS.value}
    timed = paths.make(names, work, times)
    for name, path in timed.items():
        path()  # trace
        if name == "native":  # fill the residual, and let it predict from the last step
            path()
            path()
    found = {p: [] for p in timed}
    start = time.perf_counter()
    for round_ in range(_REPEATS.value):
        for name, path in timed.items():
            before = time.perf_counter()
            path()
            found[name].append(1000 * (time.perf_counter() - before) / times)
        if round_ >= 2 and time.perf_counter() - start > _SECONDS.value:
            break
    floor = statistics.median(found["floor"])
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
        for name, t in found.items()
    ]


def extra_memory(work):
    """Return the memory of a native step beside its variables, % of the gradient.

    In a process of its own: memory that was freed before would not count again.
    """
    flags.FLAGS(sys.argv)  # those of the parent
    tf.config.threading.set_intra_op_parallelism_threads(work.threads)
    paths.make(["native"], work._replace(n=10_000, tensors=1), 1)["native"]()
    run = paths.make(["native"], work, 1)["native"]
    before = processes.resident()
    processes.forget_peak()
    run()
    size = work.entries * tf.as_dtype(work.dtype).size
    return 100 * (processes.peak() - before) / size


def all_work():
    """Return what is to be done, by its name."""
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
    wrong = set(_PATHS.value) - set(paths.NAMES)
    if wrong:
        raise app.UsageError(
            f"--paths: {', '.join(wrong)} is none of {', '.join(paths.NAMES)}"
        )
    if "native" in _PATHS.value and native_library.load_library().library is None:
        raise app.UsageError(
            f"no native operations: {native_library.load_library().reason}"
        )
    rows = []
    cases = all_work()
    for name in progress.track(cases, "cases", str):
        work = cases[name]
        found = processes.call(measure, work)
        if "native" in _PATHS.value and work.entries >= 1_000_000:
            row = next(r for r in found if r["path"] == "native")
            row["extra_memory_percent"] = processes.call(extra_memory, work)
        rows += [{"case": name, **row} for row in found]
    columns = [("case", "case", "s"), *COLUMNS] if _CASES.value else COLUMNS
    reporting.report(rows, columns, "Compressing one tensor", _JSON.value)


if __name__ == "__main__":
    app.run(main)
