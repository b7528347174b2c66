"""Steps of workers that are far from each other: what they take, and for what.

    sudo python benchmarks/distant.py --model medium --step_seconds 0.05
    sudo python benchmarks/distant.py --model large --rates 10mbit --delays 20 \
        --modes none,sparse_loco --step_seconds 1

Workers are processes in network namespaces, whose links have a rate in both directions,
and a delay: packets are held for half of the round trip (`common/distance.py`). Rate
and delay are measured too, and are in the table. Modes:

none         as many processes side by side, which do not communicate
dense        stock Keras SGD, all gradients by all-reduce in every step
dgc, demo    `DGCOptimizer`, 99.9 % of the entries not sent; `DeMo`; in every step
local_sgd, diloco, sparse_loco    an exchange every `--period` steps

With `--step_seconds` a step without an exchange takes so long, as on a machine or with
a model that is slower: a worker sleeps before its update. `computing` is the share of
the time that steps without an exchange take: a worker's own between exchanges, or for
what exchanges in every step those of `none`. Bytes are counted on the workers' links,
protocols and heartbeats included.

A row is appended to `--json` as soon as it is there, and is not measured again. From
rows of `--model tiny`, `study/periods.py --links` computes in how much time its runs
would have reached the accuracy of the dense run.
"""

import sys

from absl import app, flags
from common import (
    distance,
    distant_runs,
    models,
    network,
    presets,
    reporting,
    resumable,
    signals,
)
from common.cluster import WorkerError

COLUMNS = [
    ("rate", "rate", ""),
    ("mbit", "measured (Mbit/s)", ".1f"),
    ("delay_ms", "round trip (ms)", "g"),
    ("ping_ms", "measured (ms)", ".1f"),
    ("mode", "mode", ""),
    ("step_ms", "step (ms)", ",.1f"),
    ("of_none", "of none", ",.2f"),
    ("computing", "computing", ".1%"),
    ("exchange_ms", "exchange (ms)", ",.0f"),
    ("bytes_per_step", "bytes per step and worker", ",.0f"),
    ("bytes_per_exchange", "per exchange", ",.0f"),
    ("sent", "handed over", ",.0f"),
    ("steps_per_second", "steps/s", ",.2f"),
]

_MODEL = flags.DEFINE_enum("model", "medium", list(models.MODELS), "What is trained.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Worker processes.", lower_bound=2)
_MODES = flags.DEFINE_list("modes", presets.MODES, "What to compare.")
_PERIOD = flags.DEFINE_integer("period", 30, "Steps from one exchange to the next.", 2)
_RATES = flags.DEFINE_list("rates", list(distance.RATES), "Of links, as for `tc`.")
_DELAYS = flags.DEFINE_list("delays", ["20", "100", "200"], "Round trips, in ms.")
_STEP = flags.DEFINE_float(
    "step_seconds", 0.0, "What a step without an exchange takes at least.", 0.0
)
_SECONDS = flags.DEFINE_float(
    "seconds", 4.0, "For a mode on a link; a round is measured at least.", 0.0
)
_THREADS = flags.DEFINE_integer("threads", 1, "Intra-op threads of a worker.")
_TIMEOUT = flags.DEFINE_float("timeout", 900.0, "Seconds that a worker has to answer.")
_JSON = flags.DEFINE_string("json", None, "A file for the rows, a line each.")


def main(_):
    """Measure what is not there, and report."""
    plan = _plan()
    signals.end_orderly()
    done = resumable.ResumableRows(
        _JSON.value, distant_runs.KEYS, reporting.provenance()
    )
    try:
        rows = distant_runs.measure(plan, done)
        shown = distant_runs.add_comparisons(rows)
        reporting.report(shown, COLUMNS, _title(plan, rows[0]), origin={})
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"distant.py: {error}")
    except KeyboardInterrupt:
        sys.exit("distant.py: interrupted")


def _plan():
    unknown = [mode for mode in _MODES.value if mode not in presets.MODES]
    if unknown or len(set(_MODES.value)) < len(_MODES.value):
        raise app.UsageError(
            f"Give each mode once, of {', '.join(presets.MODES)}. "
            f"Received: {_MODES.value}"
        )
    try:
        delays = [float(delay) for delay in _DELAYS.value]
    except ValueError as error:
        raise app.UsageError(f"Round trips are in ms: {error}") from error
    return distant_runs.Plan(
        _MODEL.value, _WORKERS.value, _MODES.value, _PERIOD.value, _STEP.value,
        [(rate, delay) for rate in _RATES.value for delay in delays],
        _SECONDS.value, _THREADS.value, _TIMEOUT.value,
    )  # fmt: skip


def _title(plan, row):
    step = f"slept to {plan.step_seconds:g} s" if plan.step_seconds else "as it is"
    return (
        f"{plan.num_workers} distant workers, {row['parameters']:,} parameters, "
        f"H = {plan.period}, a step {step}"
    )


if __name__ == "__main__":
    app.run(main)
