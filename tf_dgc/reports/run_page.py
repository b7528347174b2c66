"""The HTML page of `tf-dgc report`: metrics against steps, bytes and time."""

import json
from collections.abc import Iterable, Sequence

from tf_dgc.reports import page
from tf_dgc.reports.page import Bars, Curve, Panel
from tf_dgc.reports.record import EpochRecord, RunRecord, VariableRecord

_COUNTERS = (  # logs of `CompressionMonitor` that are no metrics
    "bytes_per_step",
    "dense_bytes_per_step",
    "entries_per_step",
    "compression_ratio",
    "total_bytes",
    "iterations",
    "nonfinite_gradients",
    "rounds",
    "skipped_steps",
    "consensus_distance",
    "staleness_mean",
    "staleness_p99",
    "staleness_max",
)
_AXES = (
    ("steps", "steps", ""),
    ("sent_bytes", "bytes that a worker sent", "B"),
    ("seconds", "seconds", None),
)
_MAX_LAYERS = 40  # the rest share one bar


def run_page(runs: dict[str, RunRecord]) -> str:
    """Return a page that compares runs."""
    page.check_figures()
    for name, run in runs.items():
        if not run.epochs:
            raise ValueError(f"A run must have at least one epoch. Received: {name}")
    parts = [_summary(runs), *_metrics(runs), *_ratios(runs), *_staleness(runs)]
    parts += _layers(runs)
    parts += [part for name, run in runs.items() for part in _details(name, run)]
    return page.page(_title(runs), parts)


def _title(runs: dict[str, RunRecord]) -> str:
    """Return a title with the model's name or, if Keras chose it, the runs' names."""
    models = dict.fromkeys(run.model for run in runs.values())
    named = [model for model in models if not page.is_default_name(model)]
    names = ", ".join(runs)
    if named:
        title = f"Training of {', '.join(named)}"
        return f"{title}: {names}" if len(runs) > 1 else title
    if len(runs) > 1:
        return f"Training runs: {names}"
    (run,) = runs.values()
    title = "Training run" if names == "run" else f"Training run {names}"
    methods = "; ".join(dict.fromkeys(m["name"] for m in run.methods.values()))
    return f"{title}: {methods}" if methods else title


def _summary(runs: dict[str, RunRecord]) -> str:
    columns = {name: _facts(run) for name, run in runs.items()}
    keys = dict.fromkeys(key for facts in columns.values() for key in facts)
    rows = [[key, *(f.get(key, "-") for f in columns.values())] for key in keys]
    return page.table(["", *runs], rows, wrap=True)


def _facts(run: RunRecord) -> dict[str, str]:
    last = run.epochs[-1]
    facts = {"workers": page.number(run.workers)}
    for name, method in run.methods.items():
        suffix = f" of {name}" if name else ""
        facts[f"method{suffix}"] = method["name"]
        facts[f"collective{suffix}"] = method["collective"]
    ratio = None
    if last.sent_bytes and last.dense_bytes:
        ratio = last.dense_bytes / last.sent_bytes
    facts |= {
        "epochs": page.number(last.epoch + 1),
        "steps": page.number(last.steps),
        "time": page.duration(last.seconds),
        "bytes that a worker sent": page.size(last.sent_bytes),
        "dense, in the same steps": page.size(last.dense_bytes),
        "ratio": page.number(ratio),
    }
    for key, value in last.logs.items():
        if not _is_counter(key):
            facts[f"last {key}"] = page.number(value)
    return facts | run.versions


def _is_counter(key: str) -> bool:
    return any(key == name or key.endswith(f"_{name}") for name in _COUNTERS)


def _metrics(runs: dict[str, RunRecord]) -> Iterable[str]:
    keys = [k for run in runs.values() for e in run.epochs for k in e.logs]
    metrics = dict.fromkeys(k.removeprefix("val_") for k in keys if not _is_counter(k))
    axes = [axis for axis in _AXES if any(_has(r, axis[0]) for r in runs.values())]
    axes = axes or [("epoch", "epoch", "")]
    for metric in metrics:
        panels = [
            Panel(
                label,
                metric,
                _metric_curves(runs, metric, field),
                unit,
                log="x" if field == "sent_bytes" and len(runs) > 1 else "",
            )
            for field, label, unit in axes
        ]
        yield page.heading(metric)
        against = ", ".join(label for _, label, _ in axes)
        caption = f"{metric} against {against}, per epoch"
        caption += "; dashed: validation." if f"val_{metric}" in keys else "."
        yield page.figure(page.curves(panels, f"metric {metric}"), caption)


def _has(run: RunRecord, field: str) -> bool:
    return all(getattr(e, field) is not None for e in run.epochs)


def _metric_curves(runs: dict[str, RunRecord], metric: str, field: str) -> list[Curve]:
    curves = []
    for color, (name, run) in enumerate(runs.items()):
        for key, style in ((metric, "-"), (f"val_{metric}", "--")):
            if _has(run, field) and any(key in e.logs for e in run.epochs):
                label = f"{name}, validation" if style == "--" else name
                curves.append(_curve(label, run.epochs, key, field, style, color))
    return curves


def _curve(
    label: str,
    epochs: Sequence[EpochRecord],
    key: str,
    field: str,
    style: str,
    color: int,
) -> Curve:
    x = [getattr(e, field) for e in epochs]
    return Curve(label, x, [e.logs.get(key) for e in epochs], style, color)


def _ratios(runs: dict[str, RunRecord]) -> Iterable[str]:
    names = {"compression_ratio": "epoch", "total_compression_ratio": "since start"}
    panels = _panels(runs, names, "dense bytes / sent bytes", "y")
    if panels:
        yield page.heading("Ratio")
        caption = "Dense bytes divided by sent bytes, per epoch."
        yield page.figure(page.curves(panels, "ratio"), caption)


def _staleness(runs: dict[str, RunRecord]) -> Iterable[str]:
    names = {f"staleness_{k}": k for k in ("mean", "p99", "max")}
    panels = _panels(runs, names, "steps since sent", "")
    if panels:
        yield page.heading("Staleness")
        caption = "Steps since entries were last sent, on the worker that logged."
        yield page.figure(page.curves(panels, "staleness"), caption)


def _panels(
    runs: dict[str, RunRecord], names: dict[str, str], y_label: str, log: str
) -> list[Panel]:
    panels = []
    for run_name, run in runs.items():
        field = "steps" if _has(run, "steps") else "epoch"
        first_name = next(iter(names))
        logged = dict.fromkeys(k for e in run.epochs for k in e.logs)
        # "total_" is not an optimizer's prefix, but part of another log's name.
        keys = [k for k in logged if k.endswith(first_name) and "total_" not in k]
        for prefix in (key.removesuffix(first_name) for key in keys):
            curves = [
                _curve(text, run.epochs, prefix + name, field, "-", i)
                for i, (name, text) in enumerate(names.items())
            ]
            head = " ".join([run_name, prefix.rstrip("_")]).strip()
            label = f"{field} ({head})" if len(runs) > 1 or prefix else field
            panels.append(Panel(label, y_label, curves, "", log=log))
    return panels


def _layers(runs: dict[str, RunRecord]) -> Iterable[str]:
    figures = [_layer_bars(name, run) for name, run in runs.items() if run.variables]
    if figures:
        yield page.heading("Bytes of each layer")
        yield page.columns(figures)


def _layer_bars(name: str, run: RunRecord) -> str:
    layers: dict[str, list[VariableRecord]] = {}
    for variable in run.variables:
        layers.setdefault(variable.layer, []).append(variable)
    rows = [
        (
            layer,
            sum(v.dense_bytes for v in variables),
            _sum_or_none([v.sent_bytes for v in variables]),
        )
        for layer, variables in layers.items()
    ]
    rows.sort(key=lambda row: -row[1])
    if rest := rows[_MAX_LAYERS:]:
        others = (
            f"{len(rest)} others",
            sum(dense for _, dense, _ in rest),
            _sum_or_none([sent for _, _, sent in rest]),
        )
        rows = [*rows[:_MAX_LAYERS], others]
    bars = page.bars(
        [label for label, _, _ in rows],
        [
            Bars("dense", [dense for _, dense, _ in rows]),
            Bars("sent", [sent for _, _, sent in rows]),
        ],
    )
    caption = f"{name}: bytes that a worker sends in the last step, as predicted."
    return page.figure(bars, caption)


def _sum_or_none(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _details(name: str, run: RunRecord) -> Iterable[str]:
    yield page.heading(f"Epochs: {name}")
    keys = dict.fromkeys(k for e in run.epochs for k in e.logs if not _is_counter(k))
    columns = ["epoch", "steps", "bytes sent", "time", *keys]
    yield page.table(
        columns,
        [
            [
                page.number(e.epoch + 1),
                page.number(e.steps),
                page.size(e.sent_bytes),
                page.duration(e.seconds),
                *(page.number(e.logs.get(k)) for k in keys),
            ]
            for e in run.epochs
        ],
    )
    for optimizer, method in run.methods.items():
        text = json.dumps(method["settings"], indent=1)
        yield page.folded(f"Settings {optimizer}".strip(), text)
