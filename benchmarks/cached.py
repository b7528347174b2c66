"""Measures whether memory or computation keeps each method above its floor.

    python benchmarks/cached.py --json cached.json
    python benchmarks/cached.py --only qsgd,two_bit --rounds 20

The whole step of one worker with SGD with momentum, in nanoseconds per entry:

memory     with 25 million entries (`--entries`), whose arrays come from memory
cached     with half a million entries, whose arrays stay in the last-level cache; the
           difference to half as many entries, which excludes the overhead of a call
floor      time of a plain loop that reads and writes the arrays that the method's
           definition reads and writes (`common/floors.py`)
computing  `cached` divided by `floor`: about what would remain of `by floor` if memory
           took no time. Above 1.5, only less computation can bring the step to 1.5
           floors on this processor, not a better order of reading and writing.

The next three columns are about decoding the payloads of eight workers, which are
copies: the additional time of eight payloads over one, divided by seven, per entry and
worker. The floor is the additional time of a plain loop that reads them.

Each method has a process. Sizes and the floor take turns; the table shows medians.
"""

import os
import statistics
import timeit

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags
from common import method_parts, method_runs, processes, progress, reporting

from tf_dgc.multiworker.launch import launcher

NAMES = [*method_runs.NAMES, *method_runs.WITH_ADAM]
COLUMNS = [
    ("method", "method", ""),
    ("memory_ns", "memory", ".2f"),
    ("cached_ns", "cached", ".2f"),
    ("floor_ns", "floor", ".2f"),
    ("by_floor", "by floor", ".1f"),
    ("computing", "computing", ".1f"),
    ("decode_memory_ns", "decode: memory", ".2f"),
    ("decode_cached_ns", "cached", ".2f"),
    ("decode_floor_ns", "floor", ".2f"),
]
WORKERS = (1, 8)
ONE_WORKER_SELECTS = ("scale_com",)  # one worker chooses what all send
FLOOR_PARTS = ("compress", "sum_1", "update")
WIDTH = 1000
ROWS = {"cached": 500, "half": 250}
REPEATS = {"memory": 1, "cached": 40, "half": 40}  # steps in one call

_ONLY = flags.DEFINE_list("only", [], "Names of methods; empty for all.")
_ENTRIES = flags.DEFINE_float("entries", 25e6, "Size in memory.", lower_bound=1e6)
_THREADS = flags.DEFINE_integer("threads", 2, "Threads of a process.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 12, "Turns.", lower_bound=3)
_JSON = flags.DEFINE_string("json", None, "A file for all rows.")


def measure(name, size, threads, rounds):
    """Return the row of a method with `size` entries in memory; sets TF's threads."""
    method_runs.use_threads(threads)
    single = name in {*method_parts.ALONE, *ONE_WORKER_SELECTS}
    functions, entries = {}, {}
    for case, rows in {"memory": size // WIDTH, **ROWS}.items():
        shapes = [(rows, WIDTH)]
        method = method_parts.Method(name, shapes)
        gradients = method_parts.gradients(shapes)[0]
        entries[case] = method.sizes[0]
        for num_workers in (1,) if single else WORKERS:
            step = method.repeated(REPEATS[case], gradients, num_workers)
            step()  # `floors` reads the bytes of this step
            functions[case, num_workers] = step
        if case == "memory":
            functions |= method_runs.floors(name, method, threads)
    times = {key: [] for key in functions}
    for turn in range(rounds + 1):
        for key, function in functions.items():
            seconds = timeit.timeit(function, number=1)
            if turn > 0:  # caches are cold in the first turn
                times[key].append(seconds)
    medians = {key: statistics.median(turns) for key, turns in times.items()}
    return {"method": name, "threads": threads, **_row(medians, entries)}


def _row(medians, entries):
    """Return nanoseconds per entry, and for decoding per entry and worker."""
    memory_size = entries["memory"] / 1e9
    cached_size = (entries["cached"] - entries["half"]) * REPEATS["cached"] / 1e9

    def per_entry(num_workers):
        cached = medians["cached", num_workers] - medians["half", num_workers]
        return medians["memory", num_workers] / memory_size, cached / cached_size

    memory, cached = per_entry(1)
    floor_seconds = sum(medians[part] for part in FLOOR_PARTS if part in medians)
    floor = floor_seconds / memory_size
    row = {"memory_ns": memory, "cached_ns": cached, "floor_ns": floor}
    row |= {"by_floor": memory / floor, "computing": cached / floor}
    if ("memory", 8) in medians:
        memory_8, cached_8 = per_entry(8)
        row |= {
            "decode_memory_ns": (memory_8 - memory) / 7,
            "decode_cached_ns": (cached_8 - cached) / 7,
            "decode_floor_ns": (medians["sum_8"] - medians["sum_1"]) / memory_size / 7,
        }
    return row


def main(_):
    """Measure and print the table."""
    names = _ONLY.value or NAMES
    if unknown := set(names) - set(NAMES):
        raise app.UsageError(
            f"Unknown names in --only: {unknown}. Methods are {', '.join(NAMES)}"
        )
    for name, value in launcher.ALLOCATOR_SETTINGS.items():  # as in workers
        os.environ.setdefault(name, value)
    rows = []
    for name in progress.track(names, "methods", str):
        row = processes.call(
            measure, name, int(_ENTRIES.value), _THREADS.value, _ROUNDS.value
        )
        rows.append(row)
        if _JSON.value:  # survives an interrupt
            reporting.write(rows, _JSON.value)
    title = f"Nanoseconds per entry, {_THREADS.value} threads"
    reporting.report(rows, COLUMNS, title, _JSON.value)


if __name__ == "__main__":
    app.run(main)
