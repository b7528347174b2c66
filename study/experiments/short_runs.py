"""The runs of `short_runs.py`, at the bytes of DGC with its warm-up, and its tables."""

from typing import NamedTuple

import keras
import numpy as np
from common import resumable
from registered import intervals
from rivals import error_feedback, top_k_variants

import tf_dgc
from experiments import budget
from tf_dgc.compressors import GlobalTopK, TopK


class Run(NamedTuple):
    """A run's optimizer.

    Attributes:
        make: function of an SGD, a `Budget` and the task that returns the optimizer.
        purpose: the question that the run answers, in a few words.
    """

    make: object
    purpose: str


NARROW = {"value_dtype": "mxint8", "uncompressed_dtype": "mxint8"}
NARROWER = {"value_dtype": "mxfp4", "uncompressed_dtype": "mxint8"}
VALUES = {"value_dtype": "mxint8"}


def _paper(inner, run_budget, task):
    boundaries, values = budget.paper(run_budget.steps)
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity(boundaries, values)
    return tf_dgc.DGCOptimizer(inner, schedule)


def _dgc(shape, types=None, sgd=None, **options):
    types = types or {}
    options = {"corrections": tf_dgc.Corrections(factor_masking=True), **options}

    def make(inner, run_budget, task):
        inner = _sgd(task, run_budget.steps, **sgd) if sgd else inner
        schedule = run_budget.fit(shape, **types)
        return tf_dgc.DGCOptimizer(inner, schedule, **types, **options)

    return make


def _with_constant_density(method, together=False, sgd=None, **options):
    """Return a `make` for a method with a constant density within the budget."""

    def make(inner, run_budget, task):
        inner = _sgd(task, run_budget.steps, **sgd) if sgd else inner
        schedule = run_budget.fit(budget.constant, together, **VALUES)
        compressor = method(sparsity=schedule.values[0], **VALUES)
        return tf_dgc.CompressedOptimizer(inner, compressor, **options)

    return make


def _by_layer(inner, run_budget, task):
    density = 1 - run_budget.fit(budget.constant, **VALUES).values[0]
    compressor = top_k_variants.RootTopK.like(density, run_budget.compressed, **VALUES)
    return tf_dgc.CompressedOptimizer(inner, compressor, **_CORRECTED)


def _with_parameter(method, parameter):
    """Return a `make` for a method whose bytes depend on the course of the run."""

    def make(inner, run_budget, task):
        compressor = method(parameter, **VALUES)
        return tf_dgc.CompressedOptimizer(inner, compressor, **_CORRECTED)

    return make


def _sgd(task, steps, rate=1.0, momentum=0.9, warm_up=0.0):
    peak, warmup_steps = rate * task.learning_rate, round(warm_up * steps)
    decay = keras.optimizers.schedules.CosineDecay(peak, steps)
    if warmup_steps:
        decay = keras.optimizers.schedules.CosineDecay(
            0.0,
            steps - warmup_steps,
            warmup_target=peak,
            warmup_steps=warmup_steps,
        )
    return keras.optimizers.SGD(decay, momentum, global_clipnorm=task.clipnorm)


def _times(number, types=None):
    """Return a `make` for DGC that sends each entry `number` times on average."""
    types = types or NARROW

    def make(inner, run_budget, task):
        sparsity = 1 - min(0.25, number / run_budget.steps)
        return tf_dgc.DGCOptimizer(
            inner,
            sparsity,
            corrections=tf_dgc.Corrections(factor_masking=False),
            **types,
        )

    return make


_FLUSHES = {
    "at 0.5": [0.5],
    "at 0.8": [0.8],
    "at the end": [1.0],
    "at 0.5, 0.7, 0.9": [0.5, 0.7, 0.9],
}
_RATES = [  # momentum of 0.9 multiplies the rate by 10
    ("masked, half rate", True, {"rate": 0.5}),
    ("unmasked, half rate", False, {"rate": 0.5}),
    ("unmasked, quarter rate", False, {"rate": 0.25}),
    *(
        (f"without momentum, {rate:g} x rate", False, {"rate": rate, "momentum": 0.0})
        for rate in (2.5, 5.0, 10.0)
    ),
]
_CORRECTED = {"corrections": tf_dgc.Corrections(momentum=True, factor_masking=False)}
_FALLING = budget.staged((0.2, 4), (0.5, 1.5), (1, 0.75))
_RISING = budget.staged((0.5, 0.5), (0.8, 1), (1, 3))

RUNS = {
    "dense": Run(lambda inner, *_: inner, "the control"),
    "dgc": Run(_paper, "the paper's warm-up"),
    "constant": Run(_dgc(budget.constant), "constant density instead of a warm-up"),
    "constant mxint8": Run(_dgc(budget.constant, NARROW), "narrow values"),
    "constant mxfp4": Run(_dgc(budget.constant, NARROWER), "narrow values"),
    "warm-up mxint8": Run(_dgc(budget.warm_up, NARROW), "narrow values"),
    "falling mxint8": Run(_dgc(_FALLING, NARROW), "a short warm-up"),
    "rising mxint8": Run(_dgc(_RISING, NARROW), "more bytes at lower rates"),
    **{
        f"flush {name}": Run(
            _dgc(budget.flushed(budget.constant, *shares)), "steps that send everything"
        )
        for name, shares in _FLUSHES.items()
    },
    "flush mxint8": Run(
        _dgc(budget.flushed(budget.constant, 0.5, 0.7, 0.9), NARROW),
        "steps that send everything",
    ),
    "rate when sent mxint8": Run(
        _dgc(
            budget.constant,
            NARROW,
            corrections=tf_dgc.Corrections(
                factor_masking=False, scale_before_accumulation=False
            ),
        ),
        "delayed gradients at the learning rate of the sending step, as in the paper",
    ),
    "rate warm-up mxint8": Run(
        _dgc(
            budget.constant,
            NARROW,
            {"warm_up": 0.1},
            corrections=tf_dgc.Corrections(factor_masking=False),
        ),
        "learning-rate warm-up",
    ),
    "unmasked mxint8": Run(
        _dgc(
            budget.constant,
            NARROW,
            corrections=tf_dgc.Corrections(factor_masking=False),
        ),
        "without factor masking",
    ),
    "uncorrected mxint8": Run(
        _dgc(
            budget.constant,
            NARROW,
            corrections=tf_dgc.Corrections(momentum=False, factor_masking=True),
        ),
        "momentum afterwards",
    ),
    "unmasked": Run(
        _dgc(budget.constant, corrections=tf_dgc.Corrections(factor_masking=False)),
        "without factor masking",
    ),
    "dgc unmasked": Run(
        _dgc(budget.warm_up, corrections=tf_dgc.Corrections(factor_masking=False)),
        "the paper's warm-up without factor masking",
    ),
    **{
        f"dgc {name}": Run(
            _dgc(
                budget.warm_up,
                sgd=sgd,
                corrections=tf_dgc.Corrections(factor_masking=masked),
            ),
            "whether momentum and delayed sending together move too far",
        )
        for name, masked, sgd in _RATES
    },
    "unmasked mxfp4": Run(
        _dgc(
            budget.constant,
            NARROWER,
            corrections=tf_dgc.Corrections(factor_masking=False),
        ),
        "narrow values",
    ),
    "unmasked flush mxint8": Run(
        _dgc(
            budget.flushed(budget.constant, 0.5, 0.7, 0.9),
            NARROW,
            corrections=tf_dgc.Corrections(factor_masking=False),
        ),
        "steps that send everything",
    ),
    "unmasked falling mxint8": Run(
        _dgc(_FALLING, NARROW, corrections=tf_dgc.Corrections(factor_masking=False)),
        "a short warm-up",
    ),
    **{
        f"{number} times": Run(_times(number), "how often an entry is sent in a run")
        for number in (3, 5, 10)
    },
    **{
        f"{number} times mxfp4": Run(_times(number, NARROWER), "narrow values")
        for number in (10, 15)
    },
    "uncorrected": Run(
        _dgc(
            budget.constant,
            corrections=tf_dgc.Corrections(momentum=False, factor_masking=True),
        ),
        "momentum afterwards",
    ),
    "uncorrected mxfp4": Run(
        _dgc(
            budget.constant,
            NARROWER,
            corrections=tf_dgc.Corrections(momentum=False, factor_masking=True),
        ),
        "momentum afterwards",
    ),
    "uncorrected falling mxint8": Run(
        _dgc(
            _FALLING,
            NARROW,
            corrections=tf_dgc.Corrections(momentum=False, factor_masking=True),
        ),
        "momentum afterwards",
    ),
    "uncorrected flush mxint8": Run(
        _dgc(
            budget.flushed(budget.constant, 0.5, 0.7, 0.9),
            NARROW,
            corrections=tf_dgc.Corrections(momentum=False, factor_masking=True),
        ),
        "momentum afterwards",
    ),
    "adacomp": Run(
        lambda inner, *_: tf_dgc.CompressedOptimizer(inner, "adacomp"),
        "entries close to the largest of their chunk; half the bytes",
    ),
    # All runs below send uncompressed tensors as float32.
    "top-k": Run(
        _with_constant_density(TopK, **_CORRECTED), "the control of the runs below"
    ),
    "global": Run(
        _with_constant_density(GlobalTopK, together=True, **_CORRECTED),
        "one budget for all layers",
    ),
    "by layer": Run(_by_layer, "one budget, small tensors denser"),
    **{
        f"hard threshold {threshold:g}": Run(
            _with_parameter(top_k_variants.HardThreshold, threshold),
            "k from the number of large entries",
        )
        for threshold in (8e-4, 1e-3, 1.4e-3, 2e-3, 2.5e-3, 4e-3, 7e-3, 2e-2)
    },
    **{
        f"residual level {level:g}": Run(
            _with_parameter(top_k_variants.ResidualLevel, level),
            "k from the norm of the residual",
        )
        for level in (0.13, 0.2, 0.25, 0.3, 1, 3)
    },
    "decay 0.95": Run(
        _with_constant_density(error_feedback.DecayingTopK, **_CORRECTED),
        "residual decay",
    ),
    "momentum ef21": Run(
        _with_constant_density(
            error_feedback.MomentumEF21, sgd={"momentum": 0.0, "rate": 10.0}
        ),
        "EF21-SGDM",
    ),
    "econtrol": Run(_with_constant_density(error_feedback.EControl), "EControl"),
    "diana top-k": Run(
        _with_constant_density(error_feedback.SparseDIANA), "DIANA with top-k"
    ),
}


SETTING = ["task", "steps", "workers"]
COLUMNS = [
    ("method", "method", ""),
    ("value", "mean", ".4f"),
    ("spread", "std", ".4f"),
    ("difference", "vs. dense", "+.4f"),
    ("half_width", "± 95 %", ".4f"),
    ("bytes_per_step", "bytes/step", ",.0f"),
    ("gap", "gap", ".2f"),
]


def tables(rows):
    """Return a title, lines and the columns with values for each setting.

    Args:
        rows: rows of `short_runs.py`.
    """
    groups = resumable.group_rows(rows, SETTING)
    return [
        _table(task, steps, workers, group)
        for (task, steps, workers), group in groups.items()
    ]


def _table(task, steps, workers, rows):
    lines = summaries(rows)
    seeds = sorted({line["seeds"] for line in lines})
    title = f"{task}: {lines[0]['metric']} after {steps} steps, {workers} workers, "
    title += f"seeds: {', '.join(map(str, seeds))}"
    columns = [
        (key, heading, form)
        for key, heading, form in COLUMNS
        if any(line[key] is not None for line in lines)
    ]
    return title, lines, columns


def summaries(rows):
    """Return a line per run: means over seeds, and paired differences to dense.

    Args:
        rows: rows of `short_runs.py` of one setting.
    """
    groups = resumable.group_rows(rows, ["method"]).values()
    return [_summary(group, rows) for group in sorted(groups, key=_position)]


def _position(group):
    """Return the position among all runs; former runs come last."""
    order, name = list(RUNS), group[0]["method"]
    return order.index(name) if name in order else len(order)


def _summary(group, rows):
    method = group[0]["method"]
    return {
        **group[0],
        **intervals.mean_and_spread(group),
        "bytes_per_step": np.mean([row["bytes_per_step"] for row in group]),
        "seeds": len(group),
        **dict.fromkeys(("difference", "half_width", "gap")),
        **({} if method == "dense" else _to_dense(group, rows)),
    }


def _to_dense(group, rows):
    """Return the mean paired difference, half of its interval, and the gap."""
    seeds = {row["seed"] for row in group}
    rows = [row for row in rows if row["seed"] in seeds]
    difference = intervals.paired(rows, group[0]["method"])
    dgc = intervals.paired(rows, "dgc")
    failed = difference.failed or dgc.failed
    gap = None
    if difference.seeds and dgc.separates and not failed:
        gap = difference.mean / dgc.mean
    return {**difference.as_columns(), "gap": gap}
