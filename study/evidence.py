"""Does DGC train as well as dense training? The runs of `study/plan.md` and a report.

    python study/evidence.py run --work ~/evidence

does the pending runs of the plan, one at a time and at the lowest priority. Each run is
a process that saves a checkpoint every few minutes. However it ends, calling `run`
again resumes it with the same bits. Finished runs are rows of JSON in `WORK/runs`.

    python study/evidence.py pause --work ~/evidence    # until `resume`
    python study/evidence.py retry KEY --work ~/evidence
    python study/evidence.py status --work ~/evidence
    python study/evidence.py collect --work ~/evidence  # copies rows to study/runs
    python study/evidence.py report                     # about study/runs
    python study/evidence.py coverage                   # of intervals, simulated

`pause` creates a file `WORK/PAUSE`, which makes a run wait between two steps. `retry`
repeats a run whose process failed, by the key that `status` prints, and keeps both
rows. `one` does a single run; every row's `command` is such a call.

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
    """Do the pending runs of the plan."""
    _run_queue(arguments, plan.pending, "The plan is done.")


def retry(arguments):
    """Repeat a run whose process failed."""
    try:
        pending = queue.retry(arguments.work, arguments.key)
    except ValueError as error:
        sys.exit(str(error))
    _run_queue(arguments, pending, "It was run again.")


def _run_queue(arguments, pending, success_message):
    os.nice(19)
    command = [sys.executable, __file__]
    options = [f"--data={arguments.data}"]
    options += ["--other_commit"] * arguments.other_commit
    try:
        finished = queue.Queue(arguments.work, command, options, pending).run()
    except RuntimeError as error:
        sys.exit(str(error))
    print(success_message if finished else "Stopped; `run` goes on from here.")


def pause(arguments):
    """Pause the run in progress, and all later ones."""
    arguments.work.mkdir(parents=True, exist_ok=True)
    (arguments.work / "PAUSE").touch()


def resume(arguments):
    """End a pause."""
    (arguments.work / "PAUSE").unlink(missing_ok=True)


def status(arguments):
    """Print which runs are done, in progress and pending."""
    finished = rows.read(arguments.work / "runs")
    pending = plan.pending(finished)
    failed = [row for row in finished if not rows.has_value(row)]
    hours = sum(row["seconds"] or 0 for row in finished) / 3600
    print(f"done: {len(finished)}, {len(failed)} of them failures; {hours:.1f} hours")
    for row in failed:
        print(f"failed: {Spec.of(row).key}, {row['started']}")
    hours = plan.estimated_minutes(pending) / 60
    print(f"to come: {len(pending)}, about {hours:.1f} hours")
    for file in sorted((arguments.work / "running").glob("*.npz")):
        print(f"begun: {file.stem}")
    if (arguments.work / "PAUSE").exists():
        print("paused, until `resume`")


def collect(arguments):
    """Copy new rows of finished runs to the study's folder."""
    stored = {(Spec.of(r).key, r["started"]) for r in rows.read(arguments.out)}
    new_rows = [
        row
        for row in rows.read(arguments.work / "runs")
        if (Spec.of(row).key, row["started"]) not in stored
    ]
    for row in new_rows:
        rows.append(arguments.out, row)
    print(f"{len(new_rows)} rows are new in {arguments.out}")


def one(arguments):
    """Train a single run."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # TensorFlow leaves oneDNN off on some processors, which makes steps slower.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    import tensorflow as tf
    from common import reporting
    from registered.run import Run
    from training.trainer import make_strategy

    # On a single thread, an operation adds in the same order on every machine.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    spec = Spec.of({**vars(arguments), "settings": json.loads(arguments.settings)})
    single_run = Run(
        spec,
        arguments.data,
        arguments.work,
        make_strategy(spec.workers),
        reporting.commit(),
        other_commit=arguments.other_commit,
    )
    single_run.finish()
    row = single_run.row()
    print(f"{row['metric']} {row['value']}, {row['bytes_per_worker']:,} bytes")


def print_plan(arguments):
    """Print the tables of study/plan.md."""
    del arguments
    print(plan_page.tables())


def print_coverage(arguments):
    """Print how often intervals cover the mean if seeds are added."""
    from registered import coverage

    del arguments
    print(coverage.table())


def report(arguments):
    """Write the report about the stored rows."""
    from common import resumable
    from registered.report import write

    timed = resumable.read_rows([arguments.timed])
    write(rows.read(arguments.runs), arguments.out, timed)


def _parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for call in (run, retry, pause, resume, status, collect):
        _add(commands, call, "work")
    for name in ("run", "retry"):
        _add_run_arguments(commands.choices[name])
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
    _add_run_arguments(command)
    work = pathlib.Path(tempfile.gettempdir(), "tf_dgc_evidence")
    command.add_argument("--work", type=pathlib.Path, default=work)


def _add_run_arguments(command):
    command.add_argument("--data", default=_data())
    command.add_argument(
        "--other_commit",
        action="store_true",
        help="resume runs that were begun at another commit; their rows have both",
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
    arguments = _parser().parse_args()
    arguments.call(arguments)
