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

The next three say the same of decoding the payloads of eight workers, which are copies:
what a step takes longer with eight than with one, by seven, per entry and worker. Its
floor is likewise what a plain loop takes longer to read eight payloads.

One process per method; sizes and the floor take turns, medians are shown.
"""

import os
import statistics
import timeit

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags
from common import method_runs, parts, processes, progress, reporting

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
IN_TURN = ("scale_com",)  # of whose workers one says what all send
PARTS = ("compress", "sum_1", "update")  # that a floor has
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
    method_runs.use_threads(threads)
    workers = (1,) if name in {*parts.ALONE, *IN_TURN} else WORKERS
    timed, entries = {}, {}
    for where, rows in {"memory": size // WIDTH, **ROWS}.items():
        shapes = [(rows, WIDTH)]
        method, grads = parts.Method(name, shapes), parts.gradients(shapes)[0]
        entries[where] = method.sizes[0]
        for number in workers:
            step = method.repeated(REPEATS[where], grads, number)
            step()  # after which it says what was sent
            timed[where, number] = step
        if where == "memory":
            timed |= method_runs.floors(name, method, threads)
    found = {what: [] for what in timed}
    for turn in range(rounds + 1):
        for what, function in timed.items():
            spent = timeit.timeit(function, number=1)
            found[what] += [spent] if turn else []  # the first finds nothing in place
    median = {what: statistics.median(times) for what, times in found.items()}
    return {"method": name, "threads": threads, **_row(median, entries)}


def _row(median, entries):
    """Return nanoseconds per entry; and per worker, of decoding."""
    apart = (entries["cached"] - entries["half"]) * REPEATS["cached"] / 1e9
    size = entries["memory"] / 1e9

    def per_entry(number):
        cached = median["cached", number] - median["half", number]
        return median["memory", number] / size, cached / apart

    memory, cached = per_entry(1)
    floor = sum(median[part] for part in PARTS if part in median) / size
    row = {"memory_ns": memory, "cached_ns": cached, "floor_ns": floor}
    row |= {"by_floor": memory / floor, "computing": cached / floor}
    if ("memory", 8) in median:
        more = [
            (e - o) / 7 for e, o in zip(per_entry(8), (memory, cached), strict=True)
        ]
        longer = (median["sum_8"] - median["sum_1"]) / size / 7
        row |= {"decode_memory_ns": more[0], "decode_cached_ns": more[1]}
        row["decode_floor_ns"] = longer
    return row


def main(_):
    """Measure, and print the table."""
    names = _ONLY.value or NAMES
    if unknown := set(names) - set(NAMES):
        raise app.UsageError(f"--only: {unknown} is none of {', '.join(NAMES)}")
    for name, value in launcher.ALLOCATOR_SETTINGS.items():  # as workers have it
        os.environ.setdefault(name, value)
    settings = (int(_ENTRIES.value), _THREADS.value, _ROUNDS.value)
    rows = []
    for name in progress.track(names, "methods", str):
        rows.append(processes.call(measure, name, *settings))
        if _JSON.value:  # of what is interrupted, this much is there
            reporting.write(rows, _JSON.value)
    title = f"Nanoseconds per entry, {_THREADS.value} threads"
    reporting.report(rows, COLUMNS, title, _JSON.value)


if __name__ == "__main__":
    app.run(main)
