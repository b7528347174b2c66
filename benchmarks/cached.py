"""What keeps each method from its floor: reading and writing, or computing.

    python benchmarks/cached.py --json cached.json
    python benchmarks/cached.py --only qsgd,two_bit --rounds 20

The whole step of one worker, with SGD with momentum inside, in nanoseconds per entry:

memory     of 25 million entries (`--entries`), whose arrays come from memory
cached     of half a million, whose arrays all stay in the last cache, step after step;
           the difference to half as many, so that what a step takes by itself does not
           count
floor      what a plain loop takes to read and write, in memory, what the method's
           definition reads and writes (`common/floors.py`)
computing  `cached` by `floor`: about what would be left of `by floor` if memory took no
           time at all. Where it is above 1.5, no order of reading and writing brings
           the step to 1.5 floors on this processor; only less computing does.

One process per method; sizes and the floor take turns, medians are shown.
"""

import os
import statistics
import timeit

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from absl import app, flags, logging
from common import parts, processes, reporting
from common.floors import Floors

from tf_dgc import compressors
from tf_dgc.launch import allocator

NAMES = ["sgd", *sorted(compressors.METHODS), "dgc"]
COLUMNS = [
    ("method", "method", ""),
    ("memory_ns", "memory", ".2f"),
    ("cached_ns", "cached", ".2f"),
    ("floor_ns", "floor", ".2f"),
    ("by_floor", "by floor", ".1f"),
    ("computing", "computing", ".1f"),
]
WIDTH = 1000
ROWS = {"cached": 500, "half": 250}
REPEATS = {"memory": 1, "cached": 40, "half": 40}  # of the step, in one call

_ONLY = flags.DEFINE_list("only", [], "Names of methods; empty for all.")
_ENTRIES = flags.DEFINE_float("entries", 25e6, "In memory.", lower_bound=1e6)
_THREADS = flags.DEFINE_integer("threads", 2, "Of every process.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 12, "Turns.", lower_bound=3)
_JSON = flags.DEFINE_string("json", None, "A file for all rows.")


def measure(name, size, threads, rounds):
    """Return the row of a method, in this process; `size` entries are in memory."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    timed, entries = {}, {}
    for what, rows in {"memory": size // WIDTH, **ROWS}.items():
        shapes = [(rows, WIDTH)]
        method, grads = parts.Method(name, shapes), parts.gradients(shapes)[0]
        entries[what] = method.sizes[0]
        timed[what] = method.repeated(REPEATS[what], grads)
        timed[what]()  # after which it says what was sent
        if what == "memory":
            timed |= _floors(name, method, threads)
    found = {what: [] for what in timed}
    for turn in range(rounds + 1):
        for what, function in timed.items():
            spent = timeit.timeit(function, number=1)
            found[what] += [spent] if turn else []  # the first finds nothing in place
    median = {what: statistics.median(times) for what, times in found.items()}
    apart = (entries["cached"] - entries["half"]) * REPEATS["cached"]
    floor = sum(median[what] for what in timed if what not in REPEATS)
    per_entry = {
        "memory_ns": 1e9 * median["memory"] / entries["memory"],
        "cached_ns": 1e9 * (median["cached"] - median["half"]) / apart,
        "floor_ns": 1e9 * floor / entries["memory"],
    }
    return {
        "method": name,
        "threads": threads,
        **per_entry,
        "by_floor": per_entry["memory_ns"] / per_entry["floor_ns"],
        "computing": per_entry["cached_ns"] / per_entry["floor_ns"],
    }


def _floors(name, method, threads):
    """Return the floors of a step's parts."""
    if name in parts.ALONE:
        return {
            "update": Floors(name, method.sizes, 0, True, threads).function("update")
        }
    sent = method.optimizer.stats.bytes_per_step
    summed = method.optimizer.compressor.aggregation == "sum"
    floors = Floors(name, method.sizes, sent, summed, threads)
    return {part: floors.function(part) for part in ("compress", "decode", "update")}


def main(_):
    """Measure, and print the table."""
    names = _ONLY.value or NAMES
    if unknown := set(names) - set(NAMES):
        raise app.UsageError(f"--only: {unknown} is none of {', '.join(NAMES)}")
    for name, value in allocator.SETTINGS.items():  # as workers have it
        os.environ.setdefault(name, value)
    settings = (int(_ENTRIES.value), _THREADS.value, _ROUNDS.value)
    rows = []
    for name in names:
        logging.info("%s", name)
        rows.append(processes.call(measure, name, *settings))
    title = f"Nanoseconds per entry, {_THREADS.value} threads"
    reporting.report(rows, COLUMNS, title, _JSON.value)


if __name__ == "__main__":
    app.run(main)
