"""Times a training step: without communication, dense, and compressed.

    python benchmarks/step.py --workers 2
    sudo python benchmarks/step.py --rate 1gbit,100mbit --json step.json --plot step.svg
    python benchmarks/step.py --model resnet50 --loop fit     # and --loop custom
    sudo python benchmarks/step.py --rate 1gbit --method float16,power_sgd --peers
    sudo python benchmarks/step.py --rate 100mbit --workers 4 --collective gtopk,auto

Modes take turns within one run, so that all run under the same conditions:

none    processes side by side that do not communicate: the goal
dense   stock Keras SGD, all gradients by all-reduce
dgc     DGCOptimizer with 99.9 % of the entries not sent
dgc-tf  the same without the native operation

`--modes dgc,dgc-engine` compares DGCOptimizer's own step with the step of the native
engine, which all other methods use.

`--method` adds a mode for each method, with the settings of `method_settings.py`;
`no_compression` is the method `none`. `--collective` adds DGC with each of these
collective algorithms. `--peers` adds the same model, links and SGD with PyTorch's
DistributedDataParallel over gloo (`pip install '.[peers]'`): `torch` is dense, the
others use one of its communication hooks.

A rate other than loopback puts every worker into a network namespace with a link of
that rate, which needs root. Bytes are counted on the workers' links and include
protocols; on loopback they are all bytes that this machine sent to itself.
"""

import sys

from absl import app, flags
from common import (
    method_settings,
    network,
    peers,
    progress,
    reporting,
    signals,
    step_runs,
)
from common.cluster import WorkerError

from tf_dgc import collectives

MODES = ["none", "dense", "dgc", "dgc-tf"]
ENGINE_MODE = "dgc-engine"
COLUMNS = [
    ("rate", "rate", ""),
    ("mode", "mode", ""),
    ("median_ms", "median (ms)", ",.1f"),
    ("p90_ms", "p90 (ms)", ",.1f"),
    ("ratio_to_none", "of none", ".2f"),
    ("cpu_ms", "cpu (ms)", ",.1f"),
    ("bytes_per_step", "bytes per step and worker", ",d"),
    ("packets_per_step", "packets", ".1f"),
    ("collectives_per_step", "collectives", "g"),
    ("gradients_ms", "forward, backward (ms)", ",.1f"),
    ("collective_ms", "collective (ms)", ",.1f"),
    ("outside_ms", "outside (ms)", ",.1f"),
]

# Memory of a worker: the peak in mode dgc. Other methods have more temporaries.
_GIGABYTES = {
    **{"mlp": 1.8, "cnn": 1.0, "medium": 0.8, "tiny": 0.8},
    **{"resnet50": 2.0, "resnet50_224": 5.0},
}

_MODEL = flags.DEFINE_enum("model", "mlp", list(_GIGABYTES), "Model to train.")
_LOOP = flags.DEFINE_enum(
    "loop", "custom", ["custom", "fit"], "Loop over `strategy.run`, or Keras's `fit`."
)
_WORKERS = flags.DEFINE_integer("workers", 2, "Worker processes.", lower_bound=1)
_RATE = flags.DEFINE_list(
    "rate", ["loopback"], f"Rates of the links: {', '.join(network.RATES)}; or all."
)
_MODES = flags.DEFINE_list("modes", MODES, "Modes to compare.")
_METHOD = flags.DEFINE_list(
    "method", [], "Methods to compare as well; `tf-dgc methods` lists them."
)
_COLLECTIVE = flags.DEFINE_list(
    "collective",
    [],
    "Collective algorithms; each adds a mode `dgc NAME`.",
)
_SPARSITY = flags.DEFINE_float("sparsity", 0.999, "DGC's sparsity.", 0.0, 0.999999)
_OVERLAP = flags.DEFINE_boolean(
    "overlap", False, "Whether methods exchange during the backward pass."
)
_PEERS = flags.DEFINE_boolean(
    "peers", False, "Compare PyTorch too; needs a perceptron as model."
)
_STEPS = flags.DEFINE_integer("steps", 30, "Steps of a turn, at most.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of every mode.", lower_bound=1)
_SECONDS = flags.DEFINE_float(
    "seconds", 20.0, "Seconds of a mode at a rate; a turn has at least one step."
)
_THREADS = flags.DEFINE_integer(
    "threads", 1, "Intra-op threads of a worker; workers share the processors."
)
_VALUE_DTYPE = flags.DEFINE_string("value_dtype", None, "Passed to DGCOptimizer.")
_UNCOMPRESSED_DTYPE = flags.DEFINE_string(
    "uncompressed_dtype", None, "Passed to DGCOptimizer."
)
_FRESH = flags.DEFINE_boolean(
    "fresh", None, "New processes for every turn; by default only if memory is short."
)
_TIMEOUT = flags.DEFINE_float("timeout", 600.0, "Seconds that a worker has for a turn.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")
_PLOT = flags.DEFINE_string("plot", None, "A file for a picture, .svg or .png.")


def main(_):
    """Measure all modes at all rates, and report."""
    modes = _modes()
    rates = _check_choices("rate", network.RATES, _RATE.value)
    if _PLOT.value and rates == ["loopback"]:
        raise app.UsageError("--plot is of limited links. Received: --rate=loopback")
    signals.raise_on_signals()
    rows = []
    try:
        for rate in progress.track(rates, "rates", str):
            rows += measure(rate, modes)
    except (PermissionError, network.NetworkError, WorkerError) as error:
        sys.exit(f"step.py: {error}")
    except KeyboardInterrupt:
        sys.exit("step.py: interrupted")
    title = (
        f"One training step: {_MODEL.value}, {_WORKERS.value} workers, "
        f"{_LOOP.value} loop"
    )
    reporting.report(rows, COLUMNS, title, _JSON.value)
    if _PLOT.value:
        from common import step_picture

        limited = [row for row in rows if row["measured_mbit"]]
        step_picture.draw_steps(limited, _PLOT.value)


def measure(rate, modes):
    """Return one row per mode."""
    options = {"sparsity": _SPARSITY.value}
    if _VALUE_DTYPE.value:
        options["value_dtype"] = _VALUE_DTYPE.value
    if _UNCOMPRESSED_DTYPE.value:
        options["uncompressed_dtype"] = _UNCOMPRESSED_DTYPE.value
    settings = {
        "model": _MODEL.value,
        "loop": _LOOP.value,
        "threads": _THREADS.value,
        "options": options,
        "overlap": _OVERLAP.value,
    }
    fresh = _FRESH.value
    if fresh is None:
        gigabytes = _GIGABYTES[_MODEL.value] * (2 if _METHOD.value else 1)
        fresh = step_runs.memory_is_short(gigabytes, _WORKERS.value, len(modes))
    plan = step_runs.Plan(
        worker=settings,
        modes=modes,
        num_workers=_WORKERS.value,
        rate=rate,
        steps=_STEPS.value,
        rounds=_ROUNDS.value,
        seconds=_SECONDS.value,
        fresh=fresh,
        timeout=_TIMEOUT.value,
    )
    results, measured_mbit = step_runs.measure(plan, _log)
    setting = {
        **settings,
        "workers": plan.num_workers,
        "rate": rate,
        "measured_mbit": measured_mbit,
        "fresh": fresh,
    }
    rows = [{**setting, "mode": mode, **results[mode].summary()} for mode in modes]
    if "none" in modes:
        goal = rows[modes.index("none")]["median_ms"]
        for row in rows:
            row["ratio_to_none"] = row["median_ms"] / goal
    return rows


def _modes():
    """Return the modes that the flags select."""
    all_methods = list(method_settings.MODES)
    methods = []
    if _METHOD.value:
        methods = _check_choices("method", all_methods, _METHOD.value)
    modes = [mode for mode in _MODES.value if mode not in methods] + methods
    all_modes = list(dict.fromkeys([*MODES, ENGINE_MODE, *all_methods]))
    modes = _check_choices("mode", all_modes, modes)
    modes = modes + [f"dgc {name}" for name in _algorithms()]
    if _PEERS.value:
        if problem := peers.unsupported_reason(_MODEL.value, _LOOP.value):
            raise app.UsageError(f"--peers {problem}")
        modes += list(peers.MODES)
    return modes


def _algorithms():
    if not _COLLECTIVE.value:
        return []
    names = [
        name
        for name in collectives.names()
        if not collectives.get(name).is_neighbor_exchange
    ]
    return _check_choices("collective", names, _COLLECTIVE.value)


def _check_choices(noun, choices, values):
    """Return the values of a flag, or all choices for "all"."""
    if values == ["all"]:
        return list(choices)
    unknown = [value for value in values if value not in choices]
    if unknown or not values or len(set(values)) < len(values):
        raise app.UsageError(
            f"Give each {noun} once, of {', '.join(choices)}. Received: {values}"
        )
    return values


def _log(message):
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app.run(main)
