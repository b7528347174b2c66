"""Checks in a long run of a small model that memory and counts do not grow.

    python benchmarks/soak.py --steps 20000

Worker processes on loopback train with `model.fit`. The benchmark compares memory,
traces, functions and keys of collectives with those after the first tenth of the run,
and the norm of the residual with its largest value in the first half. The exit status
is 1 if one of them grows, or if the workers' step counts differ. The table also has the
staleness; see docs/research/reliability.md.
"""

import sys

from absl import app, flags
from common import network, progress, reporting
from common.cluster import Cluster, WorkerError

COLUMNS = [
    ("steps", "steps", ",d"),
    ("median_ms", "median (ms)", ".2f"),
    ("memory_mb", "memory (MB)", ",.1f"),
    ("traces", "traces", "d"),
    ("functions", "functions", "d"),
    ("keys", "keys", "d"),
    ("residual_norm", "residual", ".3f"),
    ("staleness_mean", "stale: mean", ".0f"),
    ("staleness_p99", "p99", ".0f"),
    ("staleness_max", "max", ".0f"),
    ("loss", "loss", ".3f"),
]
CONSTANT = ("traces", "functions", "keys")

_STEPS = flags.DEFINE_integer("steps", 20_000, "Steps of the run.", lower_bound=20)
_PARTS = flags.DEFINE_integer("parts", 20, "Rows of the table.", lower_bound=2)
_WORKERS = flags.DEFINE_integer("workers", 2, "Worker processes.", lower_bound=2)
_LIMIT_MB = flags.DEFINE_float("limit_mb", 8.0, "How much memory may grow.")
_TIMEOUT = flags.DEFINE_float("timeout", 300.0, "Seconds that a part may take.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")


def main(_):
    """Run, report, and check."""
    try:
        rows = measure()
    except WorkerError as error:
        sys.exit(f"soak.py: {error}")
    except KeyboardInterrupt:
        sys.exit("soak.py: interrupted")
    title = f"A run of {_STEPS.value:,} steps, {_WORKERS.value} workers"
    reporting.report(rows, COLUMNS, title, _JSON.value)
    problems = judge(rows, _LIMIT_MB.value)
    if problems:
        sys.exit("soak.py: " + "; ".join(problems))
    first = rows[_first_row(rows)]
    print(
        f"From step {first['steps']:,} to {rows[-1]['steps']:,} memory grew by "
        f"{_growth(rows):.1f} MB (limit {_LIMIT_MB.value:g}), and a step takes "
        f"{rows[-1]['median_ms'] / first['median_ms']:.2f} times as long."
    )


def measure():
    """Return one row per part, with the largest figures of all workers."""
    settings = {"mode": "dgc", "steps": _STEPS.value, "parts": _PARTS.value}
    with (
        network.connect("loopback", _WORKERS.value, 1) as net,
        Cluster(
            settings, net.addresses(0), net, _TIMEOUT.value, "soak_worker.py"
        ) as cluster,
    ):
        parts = progress.track(range(_PARTS.value), "parts")
        return [combine(cluster.wait()) for _ in parts]


def combine(answers):
    """Return the largest figures of all workers, and whether their steps agree."""
    row = {key: max(answer[key] for answer in answers) for key in answers[0]}
    row["workers"] = len(answers)
    row["agree"] = len({answer["steps"] for answer in answers}) == 1
    return row


def judge(rows, limit_mb):
    """Return a message for each figure that grew."""
    first, last = rows[_first_row(rows)], rows[-1]
    problems = [
        f"{key} grew from {first[key]} to {last[key]}"
        for key in CONSTANT
        if last[key] != first[key]
    ]
    if _growth(rows) > limit_mb:
        problems.append(f"memory grew by {_growth(rows):.1f} MB, over {limit_mb:g}")
    half = len(rows) // 2
    norms = [row["residual_norm"] for row in rows]
    bound = 2 * max(norms[:half])
    if not all(norm <= bound for norm in norms[half:]):  # also catches NaN
        problems.append(f"the residual grew to a norm of {norms[-1]:g}")
    if not all(row["agree"] for row in rows):
        problems.append("workers did not count the same steps")
    return problems


def _first_row(rows):
    """Return the index of the row to compare with; libraries fill pools before it."""
    return max(len(rows) // 10 - 1, 0)


def _growth(rows):
    return rows[-1]["memory_mb"] - rows[_first_row(rows)]["memory_mb"]


if __name__ == "__main__":
    app.run(main)
