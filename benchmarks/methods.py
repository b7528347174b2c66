"""Every method's step on 25 million parameters, taken apart, and against its floor.

    python benchmarks/methods.py --json methods.json --markdown methods.md --plot p.svg
    python benchmarks/methods.py --quick                 # some 10 minutes
    python benchmarks/methods.py --only two_bit,qsgd --shapes mlp --json some.json
    python benchmarks/methods.py --only sgd,dgc,adamw,dgc_adamw --shapes mixed
    python benchmarks/methods.py --from_json methods.json,some.json --plot p.svg

One process per method, in which the traced step of `CompressedOptimizer` takes turns
with others that do less, and with the floors; forward and backward pass are left out,
and gradients alternate between three sets that were drawn before. Columns, in
milliseconds (medians):

compress   all up to what is handed over, what is kept included
decode N   what decoding and summing N workers' payloads adds; theirs are copies of the
           own one, which a communicator of the benchmark hands back, whose own time
           does not count
update     what SGD with momentum adds, for all methods the same; below 0 where a
           method updates only what was sent and never has the whole sum
step       the whole step of one worker, with the package's communicator
processor  its time on all processors, which other programs change less
by floor   its multiple of the time that a plain loop takes to read and write what the
           method's definition reads and writes (`common/floors.py`); that of a step is
           of its parts, so that one which never writes the sum may take less

memory is what steps 3 to 5 need beside what is there after `build`, in gradients; what
was gathered, of two workers, is counted apart. `sgd` is Keras's, without a method;
`adamw` too, and `dgc_adamw` is DGC around it.

The picture has the step's time by the speed of the links between two workers: a step
with both payloads, 2 ms per collective, and bytes by speed (`links.py`).
"""

import json
import os
import pathlib

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags
from common import links, method_runs, parts, processes, progress, reporting
from common.method_runs import NAMES, WITH_ADAM

from tf_dgc.multiworker.launch import launcher

COLUMNS = [
    ("method", "method", ""),
    ("bytes_per_step", "bytes", ",d"),
    ("compress_ms", "compress", ",.1f"),
    ("compress_ratio", "by floor", ",.1f"),
    ("decode_2_ms", "decode 2", ",.1f"),
    ("decode_8_ms", "decode 8", ",.1f"),
    ("decode_8_ratio", "by floor", ",.1f"),
    ("update_ms", "update", ",.1f"),
    ("step_ms", "step", ",.1f"),
    ("step_p90_ms", "p90", ",.1f"),
    ("step_processor_ms", "processor", ",.1f"),
    ("step_floor_ms", "floor", ",.1f"),
    ("step_ratio", "by floor", ",.1f"),
    ("extra_memory", "memory", ".2f"),
    ("gathered_memory", "gathered", ".2f"),
]

_ONLY = flags.DEFINE_list("only", [], "Names of methods; empty for all.")
_SHAPES = flags.DEFINE_list("shapes", ["mixed", "mlp"], "Of the variables.")
_QUICK = flags.DEFINE_bool("quick", False, "One set of shapes, few turns.")
_THREADS = flags.DEFINE_integer("threads", 2, "Of every process.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 15.0, "After which the turns of one end.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns, at least.", lower_bound=1)
_MEMORY = flags.DEFINE_bool("memory", True, "Whether to measure memory.")
_JSON = flags.DEFINE_string("json", None, "A file for all rows.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs, to be reported; later rows count."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "A file for the tables, .md.")
_PLOT = flags.DEFINE_string("plot", None, "A file for the picture, .svg or .png.")


def measure():
    """Return the rows of what the flags ask for; they are written as they come."""
    rows = []
    for name, value in launcher.ALLOCATOR_SETTINGS.items():  # as workers have it
        os.environ.setdefault(name, value)
    for case in progress.track(_cases(), "cases", _named):
        row = processes.call(method_runs.times, case)
        if _MEMORY.value:
            row |= processes.call(method_runs.memory, case)
        rows.append(row)
        if _JSON.value:  # of what is interrupted, this much is there
            reporting.write(rows, _JSON.value)
    return rows


def _cases():
    shapes, seconds, rounds = _SHAPES.value, _SECONDS.value, _ROUNDS.value
    if _QUICK.value:
        shapes, seconds, rounds = shapes[:1], min(seconds, 3.0), 3
    names = _ONLY.value or NAMES
    for what, known, given in (
        ("only", [*NAMES, *WITH_ADAM], names),
        ("shapes", parts.SHAPES, shapes),
    ):
        if unknown := set(given) - set(known):
            raise app.UsageError(f"--{what}: {unknown} is none of {', '.join(known)}")
    return [
        method_runs.Case(name, shape, _THREADS.value, seconds, rounds)
        for shape in shapes
        for name in names
    ]


def _named(case):
    return f"{case.shapes}, {case.method}"


def read(paths):
    """Return the rows of several files, of each method and shapes the last."""
    found = {}
    for path in paths:
        for row in json.loads(pathlib.Path(path).read_text()):
            found[row["shapes"], row["method"]] = row
    names = [*NAMES, *WITH_ADAM]
    order = sorted(found, key=lambda key: (key[0], names.index(key[1])))
    return [found[key] for key in order]


def main(_):
    """Measure or read, and report."""
    rows = read(_FROM_JSON.value) if _FROM_JSON.value else measure()
    # Rows that are read say of themselves where they come from.
    origin = {} if _FROM_JSON.value else reporting.provenance()
    texts = []
    for shapes in dict.fromkeys(row["shapes"] for row in rows):
        shown = [row for row in rows if row["shapes"] == shapes]
        first = shown[0]
        title = f"{first['variables']} variables ({shapes}), {first['parameters']:,} "
        title += f"parameters, {first['threads']} threads"
        reporting.report(shown, COLUMNS, title, origin=origin)
        wins = links.winners(shown)
        print(wins)
        texts += [f"### {title}", reporting.markdown(shown, COLUMNS)]
        texts += [reporting.setting(shown, origin), wins]
    if _JSON.value:
        reporting.write(rows, _JSON.value, origin)
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text("\n\n".join(texts) + "\n")
    if _PLOT.value:
        links.draw(rows, _PLOT.value)


if __name__ == "__main__":
    app.run(main)
