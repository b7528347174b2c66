"""The time of one training step: without communication, dense, and compressed.

    python benchmarks/step.py --workers 2
    sudo python benchmarks/step.py --rate 1gbit,100mbit --json step.json --plot step.svg
    python benchmarks/step.py --model resnet50 --loop fit     # and --loop custom
    sudo python benchmarks/step.py --rate 1gbit --method float16,power_sgd --peers
    sudo python benchmarks/step.py --rate 100mbit --workers 4 --collective gtopk,auto

Modes take step_runs within one run, so that all of them meet the same machine:

none    as many processes side by side, which do not communicate: the goal
dense   stock Keras SGD, all gradients by all-reduce
dgc     DGCOptimizer, 99.9 % of the entries not sent
dgc-tf  the same without the native operation

`--modes dgc,dgc-engine` compares DGCOptimizer's own step with the step of the native
engine, which all other methods use.

`--method` adds a mode for each method, with the settings of `method_settings.py`;
`no_compression` is the method `none`. `--collective` adds one for each exchange that
DGC's entries go by. `--peers` adds the same model, links and SGD with PyTorch's
DistributedDataParallel over gloo (`pip install '.[peers]'`): `torch` is dense, the
others have one of its communication hooks.

A rate other than loopback puts every worker into a network namespace, behind a link
of that rate; that needs root. Bytes are counted on the workers' links, protocols
included; on loopback they are all that this machine sent to itself.
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

# What a worker takes, from the largest resident size of one in mode dgc; other methods
# have more temporaries.
_GIGABYTES = {"mlp": 1.8, "cnn": 1.0, "medium": 0.8, "tiny": 0.8, "resnet50": 2.0}

_MODEL = flags.DEFINE_enum("model", "mlp", list(_GIGABYTES), "What is trained.")
_LOOP = flags.DEFINE_enum(
    "loop", "custom", ["custom", "fit"], "Whose: `strategy.run`, or Keras's."
)
_WORKERS = flags.DEFINE_integer("workers", 2, "Worker processes.", lower_bound=1)
_RATE = flags.DEFINE_list(
    "rate", ["loopback"], f"Of the links: {', '.join(network.RATES)}; or all."
)
_MODES = flags.DEFINE_list("modes", MODES, "What to compare.")
_METHOD = flags.DEFINE_list(
    "method", [], "Names of methods to compare as well; `tf-dgc methods` lists them."
)
_EXCHANGE = flags.DEFINE_list(
    "collective",
    [],
    "Collective algorithms, by each of which there is a mode `dgc NAME`.",
)
_SPARSITY = flags.DEFINE_float("sparsity", 0.999, "Of DGC's steps.", 0.0, 0.999999)
_OVERLAP = flags.DEFINE_boolean(
    "overlap", False, "Exchange during the backward pass, in the methods."
)
_PEERS = flags.DEFINE_boolean(
    "peers", False, "PyTorch's too; the model is a perceptron."
)
_STEPS = flags.DEFINE_integer("steps", 30, "Steps of a turn, at most.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of every mode.", lower_bound=1)
_SECONDS = flags.DEFINE_float(
    "seconds", 20.0, "For the steps of one mode at one rate; a turn has one at least."
)
_THREADS = flags.DEFINE_integer(
    "threads", 1, "Intra-op threads of a worker; workers share the processors."
)
_VALUE_DTYPE = flags.DEFINE_string("value_dtype", None, "Passed to DGCOptimizer.")
_EXEMPT_DTYPE = flags.DEFINE_string(
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
    rates = _chosen("rate", network.RATES, _RATE.value)
    if _PLOT.value and rates == ["loopback"]:
        raise app.UsageError("--plot is of limited links. Received: --rate=loopback")
    signals.end_orderly()
    try:
        tracked = progress.track(rates, "rates", str)
        rows = [row for rate in tracked for row in measure(rate, modes)]
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
    given = {
        "value_dtype": _VALUE_DTYPE.value,
        "uncompressed_dtype": _EXEMPT_DTYPE.value,
    }
    options = {name: value for name, value in given.items() if value}
    about = {
        "model": _MODEL.value,
        "loop": _LOOP.value,
        "threads": _THREADS.value,
        "options": {"sparsity": _SPARSITY.value, **options},
        "overlap": _OVERLAP.value,
    }
    fresh = _FRESH.value
    if fresh is None:
        gigabytes = _GIGABYTES[_MODEL.value] * (2 if _METHOD.value else 1)
        fresh = step_runs.memory_is_short(gigabytes, _WORKERS.value, len(modes))
    plan = step_runs.Plan(
        about, modes, _WORKERS.value, rate, _STEPS.value, _ROUNDS.value,
        _SECONDS.value, fresh, _TIMEOUT.value,
    )  # fmt: skip
    results, measured_mbit = step_runs.measure(plan, _say)
    about.update(
        workers=plan.num_workers, rate=rate, measured_mbit=measured_mbit, fresh=fresh
    )
    rows = [{**about, "mode": m, **results[m].summary()} for m in modes]
    if "none" in modes:
        goal = rows[modes.index("none")]["median_ms"]
        for row in rows:
            row["ratio_to_none"] = row["median_ms"] / goal
    return rows


def _modes():
    methods = list(method_settings.MODES)
    chosen = _chosen("method", methods, _METHOD.value) if _METHOD.value else []
    modes = [mode for mode in _MODES.value if mode not in chosen] + chosen
    modes = _chosen("mode", list(dict.fromkeys([*MODES, ENGINE_MODE, *methods])), modes)
    modes += [f"dgc {name}" for name in _ways()]
    if _PEERS.value and (problem := peers.problem(_MODEL.value, _LOOP.value)):
        raise app.UsageError(f"--peers {problem}")
    return modes + (list(peers.MODES) if _PEERS.value else [])


def _ways():
    known = [
        name
        for name in collectives.names()
        if not collectives.get(name).is_neighbor_exchange
    ]
    return _chosen("collective", known, _EXCHANGE.value) if _EXCHANGE.value else []


def _chosen(what, known, given):
    if given == ["all"]:
        return list(known)
    unknown = [name for name in given if name not in known]
    if unknown or not given or len(set(given)) < len(given):
        raise app.UsageError(
            f"Give each {what} once, of {', '.join(known)}. Received: {given}"
        )
    return given


def _say(message):
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app.run(main)
