"""Does it train as well? The runs of `study/plan.md`, and their report.

    python study/evidence.py run --work ~/evidence

takes up the plan where it stands, at the lowest priority, one run after another. A run
is a process that saves what it remembers every few minutes; ended by a signal, a power
failure or in any other way, it goes on from there with the same bits when `run` is
called again. Finished runs are rows of JSON in `WORK/runs`.

    python study/evidence.py pause --work ~/evidence    # until `resume`
    python study/evidence.py retry KEY --work ~/evidence
    python study/evidence.py status --work ~/evidence
    python study/evidence.py collect --work ~/evidence  # into study/runs
    python study/evidence.py report                     # of study/runs
    python study/evidence.py coverage                   # of intervals, simulated

`pause` makes a file `WORK/PAUSE`, at which a run stops between two steps. `retry` runs
again what a process failed at, by the key that `status` prints; both rows are kept.
`one` is a single run, as every row's `command` has it.

Data sets are in `--data`, `$TF_DGC_DATA` or `../shared`: `tensorflow_datasets` with
CIFAR-10, MNIST and tiny Shakespeare, and `datasets/ptb` with
`ptb.{train,valid,test}.txt`.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile

import benchmarks_path  # noqa: F401
from registered import plan, plan_page, queue, rows
from registered.specs import Spec

STUDY = pathlib.Path(__file__).resolve().parent


def run(arguments):
    """Take up the plan where it stands."""
    _take_up(arguments, plan.pending, "The plan is done.")


def retry(arguments):
    """Run again what a process failed at."""
    try:
        pending = queue.again(arguments.work, arguments.key)
    except ValueError as error:
        sys.exit(str(error))
    _take_up(arguments, pending, "It was run again.")


def _take_up(arguments, pending, done):
    os.nice(19)
    command = [sys.executable, __file__]
    further = [f"--data={arguments.data}"]
    further += ["--other_commit"] * arguments.other_commit
    try:
        ended = queue.Queue(arguments.work, command, further, pending).run()
    except RuntimeError as error:
        sys.exit(str(error))
    print(done if ended else "Stopped; `run` goes on from here.")


def pause(arguments):
    """Let the run in progress wait, and all after it."""
    arguments.work.mkdir(parents=True, exist_ok=True)
    (arguments.work / "PAUSE").touch()


def resume(arguments):
    """End a pause."""
    (arguments.work / "PAUSE").unlink(missing_ok=True)


def status(arguments):
    """Print what is done, in progress and to come."""
    finished = rows.read(arguments.work / "runs")
    todo = plan.pending(finished)
    failed = [row for row in finished if not rows.has_value(row)]
    hours = sum(row["seconds"] or 0 for row in finished) / 3600
    print(f"done: {len(finished)}, {len(failed)} of them failures; {hours:.1f} hours")
    for row in failed:
        print(f"failed: {Spec.of(row).key}, {row['started']}")
    print(f"to come: {len(todo)}, about {plan.minutes(todo) / 60:.1f} hours")
    for file in sorted((arguments.work / "running").glob("*.npz")):
        print(f"begun: {file.stem}")
    if (arguments.work / "PAUSE").exists():
        print("paused, until `resume`")


def collect(arguments):
    """Copy the rows of finished runs to where they are kept, once each."""
    kept = {(Spec.of(r).key, r["started"]) for r in rows.read(arguments.out)}
    new = [
        row
        for row in rows.read(arguments.work / "runs")
        if (Spec.of(row).key, row["started"]) not in kept
    ]
    for row in new:
        rows.append(arguments.out, row)
    print(f"{len(new)} rows are new in {arguments.out}")


def one(arguments):
    """Train a single run."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # TensorFlow leaves it off on some processors, where steps take longer.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    import tensorflow as tf
    from common import reporting
    from registered.single import Run
    from training.trainer import make_strategy

    # An operation on one thread adds in the same order wherever it runs.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    spec = Spec.of({**vars(arguments), "settings": json.loads(arguments.settings)})
    strategy = make_strategy(spec.workers)
    asked = spec, arguments.data, arguments.work, strategy, reporting.commit()
    single = Run(*asked, other_commit=arguments.other_commit)
    single.finish()
    row = single.row()
    print(f"{row['metric']} {row['value']}, {row['bytes_per_worker']:,} bytes")


def print_plan(arguments):
    """Print the tables of the plan, as study/plan.md has them."""
    del arguments
    print(plan_page.tables())


def print_coverage(arguments):
    """Print how often the interval holds the mean where seeds are added."""
    from registered import coverage

    del arguments
    print(coverage.table())


def report(arguments):
    """Write the page about the rows that are kept."""
    from common import resumable
    from registered import report as pages

    timed = resumable.read_rows([arguments.timed])
    pages.write(rows.read(arguments.runs), arguments.out, timed)


def _parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for call in (run, retry, pause, resume, status, collect):
        _add(commands, call, "work")
    for name in ("run", "retry"):
        _add_of_runs(commands.choices[name])
    commands.choices["retry"].add_argument("key", help="of a run that failed")
    commands.choices["collect"].add_argument(
        "--out", type=pathlib.Path, default=STUDY / "runs"
    )
    _add_one(commands)
    _add(commands, print_plan).description = "The tables of the plan."
    _add(commands, print_coverage).description = "By simulation, for CIFAR-10."
    _add_report(commands)
    return parser


def _add(commands, call, *folders):
    name = call.__name__.removeprefix("print_")
    command = commands.add_parser(name, help=call.__doc__)
    command.set_defaults(call=call)
    for folder in folders:
        command.add_argument(f"--{folder}", type=pathlib.Path, required=True)
    return command


def _add_one(commands):
    command = _add(commands, one)
    command.add_argument("--task", required=True)
    command.add_argument("--method", required=True)
    command.add_argument("--workers", type=int, default=4)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--steps", type=int, required=True)
    command.add_argument(
        "--settings", default="{}", help="JSON; see registered/specs.py"
    )
    _add_of_runs(command)
    again = pathlib.Path(tempfile.gettempdir(), "tf_dgc_evidence")
    command.add_argument("--work", type=pathlib.Path, default=again)


def _add_of_runs(command):
    command.add_argument("--data", default=_data())
    command.add_argument(
        "--other_commit",
        action="store_true",
        help="go on with runs that were begun at another commit; their rows say so",
    )


def _add_report(commands):
    command = _add(commands, report)
    command.add_argument("--runs", type=pathlib.Path, default=STUDY / "runs")
    timed = STUDY / "rows" / "time_to_accuracy.jsonl"
    command.add_argument("--timed", type=pathlib.Path, default=timed)
    command.add_argument("--out", type=pathlib.Path, default=STUDY)


def _data():
    return os.environ.get("TF_DGC_DATA", str(STUDY.parents[1] / "shared"))


if __name__ == "__main__":
    given = _parser().parse_args()
    given.call(given)
