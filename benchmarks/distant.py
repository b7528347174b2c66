"""Measures steps of distant workers, and the share that communication takes.

    sudo python benchmarks/distant.py --model medium --step_seconds 0.05
    sudo python benchmarks/distant.py --model large --rates 10mbit --delays 20 \
        --modes none,sparse_loco --step_seconds 1

Workers are processes in network namespaces whose links have a rate in both directions
and a delay: packets are held for half of the round trip (`common/distance.py`). The
table also has the measured rate and delay. Modes:

none         processes side by side that do not communicate
dense        stock Keras SGD, all gradients by all-reduce in every step
dgc, demo    `DGCOptimizer` with 99.9 % of the entries not sent, `DeMo`; in every step
local_sgd, diloco, sparse_loco    an exchange every `--period` steps

With `--step_seconds` a worker sleeps before its update until a step without an exchange
has taken that long, as with a slower machine or a larger model. `computing` is the
share of time that steps take without exchanges; for modes that exchange in every step,
it is based on the steps of `none`. Bytes are counted on the workers' links and include
protocols and heartbeats.

Each row is appended to `--json` at once and is not measured again. From rows of
`--model tiny`, `study/periods.py --links` computes how long its runs would have taken
to reach the accuracy of the dense run.
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

_MODEL = flags.DEFINE_enum("model", "medium", list(models.MODELS), "Model to train.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Worker processes.", lower_bound=2)
_MODES = flags.DEFINE_list("modes", presets.MODES, "Modes to compare.")
_PERIOD = flags.DEFINE_integer("period", 30, "Steps from one exchange to the next.", 2)
_RATES = flags.DEFINE_list("rates", list(distance.RATES), "Link rates, for `tc`.")
_DELAYS = flags.DEFINE_list("delays", ["20", "100", "200"], "Round trips, in ms.")
_STEP = flags.DEFINE_float(
    "step_seconds", 0.0, "Least seconds of a step without an exchange.", 0.0
)
_SECONDS = flags.DEFINE_float(
    "seconds", 4.0, "Seconds for a mode on a link, which takes at least a round.", 0.0
)
_THREADS = flags.DEFINE_integer("threads", 1, "Intra-op threads of a worker.")
_TIMEOUT = flags.DEFINE_float("timeout", 900.0, "Seconds that a worker has to answer.")
_JSON = flags.DEFINE_string("json", None, "A file for the rows, a line each.")


def main(_):
    """Measure missing rows, and report all."""
    plan = _plan()
    signals.raise_on_signals()
    resumable_rows = resumable.ResumableRows(
        _JSON.value, distant_runs.KEYS, reporting.provenance()
    )
    try:
        rows = distant_runs.measure(plan, resumable_rows)
        compared = distant_runs.add_comparisons(rows)
        reporting.report(compared, COLUMNS, _title(plan, rows[0]), origin={})
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
        model=_MODEL.value,
        num_workers=_WORKERS.value,
        modes=_MODES.value,
        period=_PERIOD.value,
        step_seconds=_STEP.value,
        links=[(rate, delay) for rate in _RATES.value for delay in delays],
        seconds=_SECONDS.value,
        threads=_THREADS.value,
        timeout=_TIMEOUT.value,
    )


def _title(plan, row):
    step = f"slept to {plan.step_seconds:g} s" if plan.step_seconds else "as it is"
    return (
        f"{plan.num_workers} distant workers, {row['parameters']:,} parameters, "
        f"H = {plan.period}, a step {step}"
    )


if __name__ == "__main__":
    app.run(main)
