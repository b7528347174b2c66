"""Times the parts of every method's step on 25 million parameters, with their floors.

    python benchmarks/methods.py --json methods.json --markdown methods.md --plot p.svg
    python benchmarks/methods.py --quick                 # some 10 minutes
    python benchmarks/methods.py --only two_bit,qsgd --shapes mlp --json some.json
    python benchmarks/methods.py --only sgd,dgc,adamw,dgc_adamw --shapes mixed
    python benchmarks/methods.py --from_json methods.json,some.json --plot p.svg

Each method has a process, in which the traced step of `CompressedOptimizer` takes turns
with shorter variants and with the floors. Forward and backward pass are left out;
gradients alternate between three random sets. Columns, in milliseconds (medians):

compress   from the gradients to the payload, including the residual
decode N   additional time to decode and sum N workers' payloads: copies of this
           worker's payload that a communicator of the benchmark returns, whose own
           time does not count
update     additional time of SGD with momentum, the same for all methods; below 0 if a
           method updates only the entries that were sent and never has the whole sum
step       the whole step of one worker, with the package's communicator
processor  time on all processors, which other programs affect less
by floor   ratio to the time of a plain loop that reads and writes the arrays that the
           method's definition reads and writes (`common/floors.py`). A step's floor is
           the sum over its parts, so a step that never writes the sum may take less

`memory` is the memory of steps 3 to 5 in addition to that after `build`, in sizes of
the gradients; `gathered` are the payloads of two workers, counted separately.
`sgd` and `adamw` are Keras's optimizers alone; `dgc_adamw` is DGC around AdamW.

The picture shows the step's time by the speed of the links between two workers: a step
with both payloads, 2 ms per collective, and bytes divided by speed (`links.py`).
"""

import json
import os
import pathlib

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags
from common import links, method_parts, method_runs, processes, progress, reporting
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
_SHAPES = flags.DEFINE_list("shapes", ["mixed", "mlp"], "Shapes of the variables.")
_QUICK = flags.DEFINE_bool("quick", False, "One set of shapes, few turns.")
_THREADS = flags.DEFINE_integer("threads", 2, "Threads of a process.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 15.0, "Seconds after which a method ends.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns, at least.", lower_bound=1)
_MEMORY = flags.DEFINE_bool("memory", True, "Whether to measure memory.")
_JSON = flags.DEFINE_string("json", None, "A file for all rows.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs to report; later rows replace earlier ones."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "A file for the tables, .md.")
_PLOT = flags.DEFINE_string("plot", None, "A file for the picture, .svg or .png.")


def measure():
    """Return the rows of all cases; write them to `--json` after each."""
    rows = []
    for name, value in launcher.ALLOCATOR_SETTINGS.items():  # as in workers
        os.environ.setdefault(name, value)
    for case in progress.track(_cases(), "cases", _label):
        row = processes.call(method_runs.measure_times, case)
        if _MEMORY.value:
            row |= processes.call(method_runs.measure_memory, case)
        rows.append(row)
        if _JSON.value:  # survives an interrupt
            reporting.write(rows, _JSON.value)
    return rows


def _cases():
    shapes, seconds, rounds = _SHAPES.value, _SECONDS.value, _ROUNDS.value
    if _QUICK.value:
        shapes, seconds, rounds = shapes[:1], min(seconds, 3.0), 3
    names = _ONLY.value or NAMES
    _check_names("only", names, [*NAMES, *WITH_ADAM])
    _check_names("shapes", shapes, method_parts.SHAPES)
    return [
        method_runs.Case(name, shape, _THREADS.value, seconds, rounds)
        for shape in shapes
        for name in names
    ]


def _check_names(flag, names, choices):
    if unknown := set(names) - set(choices):
        raise app.UsageError(
            f"Unknown names in --{flag}: {unknown}. Choices are {', '.join(choices)}"
        )


def _label(case):
    return f"{case.shapes}, {case.method}"


def read(paths):
    """Return the rows of several files; the last per method and shapes counts."""
    rows = {}
    for path in paths:
        for row in json.loads(pathlib.Path(path).read_text()):
            rows[row["shapes"], row["method"]] = row
    names = [*NAMES, *WITH_ADAM]
    order = sorted(rows, key=lambda key: (key[0], names.index(key[1])))
    return [rows[key] for key in order]


def main(_):
    """Measure or read rows, and report them."""
    rows = read(_FROM_JSON.value) if _FROM_JSON.value else measure()
    # Rows of a file have their own provenance.
    origin = {} if _FROM_JSON.value else reporting.provenance()
    texts = []
    for shapes in dict.fromkeys(row["shapes"] for row in rows):
        group = [row for row in rows if row["shapes"] == shapes]
        first = group[0]
        title = (
            f"{first['variables']} variables ({shapes}), {first['parameters']:,} "
            f"parameters, {first['threads']} threads"
        )
        reporting.report(group, COLUMNS, title, origin=origin)
        winners = links.describe_fastest(group)
        print(winners)
        texts += [f"### {title}", reporting.markdown(group, COLUMNS)]
        texts += [reporting.setting(group, origin), winners]
    if _JSON.value:
        reporting.write(rows, _JSON.value, origin)
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text("\n\n".join(texts) + "\n")
    if _PLOT.value:
        links.draw(rows, _PLOT.value)


if __name__ == "__main__":
    app.run(main)
