"""What `horizons.py` trains at the bytes of DGC's usual warm-up, and its tables."""

from typing import NamedTuple

import keras
import numpy as np
from common import resumable
from registered import intervals
from rivals import feedback, levels

import tf_dgc
from experiments import budget
from tf_dgc.compressors import GlobalTopK, TopK


class Run(NamedTuple):
    """A way to train.

    Attributes:
        make: function of an SGD, a `Budget` and the task.
        why: it is tried.
    """

    make: object
    why: str


NARROW = {"value_dtype": "mxint8", "uncompressed_dtype": "mxint8"}
NARROWER = {"value_dtype": "mxfp4", "uncompressed_dtype": "mxint8"}
VALUES = {"value_dtype": "mxint8"}


def _today(inner, spent, task):
    shape = budget.paper(spent.steps)
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity(*shape)
    return tf_dgc.DGCOptimizer(inner, schedule)


def _dgc(shape, types=None, sgd=None, **options):
    types = types or {}
    options = {"corrections": tf_dgc.Corrections(factor_masking=True), **options}

    def make(inner, spent, task):
        inner = _sgd(task, spent.steps, **sgd) if sgd else inner
        schedule = spent.fit(shape, **types)
        return tf_dgc.DGCOptimizer(inner, schedule, **types, **options)

    return make


def _by(method, together=False, sgd=None, **options):
    """Return how an optimizer of a method is made, of constant density."""

    def make(inner, spent, task):
        inner = _sgd(task, spent.steps, **sgd) if sgd else inner
        schedule = spent.fit(budget.constant, together, **VALUES)
        compressor = method(sparsity=schedule.values[0], **VALUES)
        return tf_dgc.CompressedOptimizer(inner, compressor, **options)

    return make


def _by_layer(inner, spent, task):
    density = 1 - spent.fit(budget.constant, **VALUES).values[0]
    compressor = levels.RootTopK.like(density, spent.compressed, **VALUES)
    return tf_dgc.CompressedOptimizer(inner, compressor, **_CORRECTED)


def _at(method, number):
    """Return how a method is made of a number, whose bytes are known behind a run."""

    def make(inner, spent, task):
        compressor = method(number, **VALUES)
        return tf_dgc.CompressedOptimizer(inner, compressor, **_CORRECTED)

    return make


def _sgd(task, steps, rate=1.0, momentum=0.9, warm_up=0.0):
    begin = round(warm_up * steps)
    first = {"warmup_target": rate * task.learning_rate, "warmup_steps": begin}
    decay = keras.optimizers.schedules.CosineDecay(
        0.0 if begin else rate * task.learning_rate,
        steps - begin,
        **first if begin else {},
    )
    return keras.optimizers.SGD(decay, momentum, global_clipnorm=task.clipnorm)


def _times(number, types=None):
    """Return how DGC is made that sends an entry so many times, on average."""
    types = types or NARROW

    def make(inner, spent, task):
        sparsity = 1 - min(0.25, number / spent.steps)
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
_GAINS = [  # momentum of 0.9 multiplies the rate by 10
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
    "dgc": Run(_today, "today's"),
    "constant": Run(_dgc(budget.constant), "warm-up against density"),
    "constant mxint8": Run(_dgc(budget.constant, NARROW), "narrow values"),
    "constant mxfp4": Run(_dgc(budget.constant, NARROWER), "narrow values"),
    "warm-up mxint8": Run(_dgc(budget.warm_up, NARROW), "narrow values"),
    "falling mxint8": Run(_dgc(_FALLING, NARROW), "a short warm-up"),
    "rising mxint8": Run(_dgc(_RISING, NARROW), "more as the rate falls"),
    **{
        f"flush {name}": Run(_dgc(budget.flushed(budget.constant, *at)), "all arrives")
        for name, at in _FLUSHES.items()
    },
    "flush mxint8": Run(
        _dgc(budget.flushed(budget.constant, 0.5, 0.7, 0.9), NARROW), "all arrives"
    ),
    "rate when sent mxint8": Run(
        _dgc(
            budget.constant,
            NARROW,
            corrections=tf_dgc.Corrections(
                factor_masking=False, scale_before_accumulation=False
            ),
        ),
        "the paper's: old gradients at the rate they are sent at",
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
        "momentum of what is sent",
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
        "momentum of what is sent",
    ),
    "dgc unmasked": Run(
        _dgc(budget.warm_up, corrections=tf_dgc.Corrections(factor_masking=False)),
        "today's, but for the masking",
    ),
    **{
        f"dgc {name}": Run(
            _dgc(
                budget.warm_up,
                sgd=sgd,
                corrections=tf_dgc.Corrections(factor_masking=masked),
            ),
            "waiting and momentum delay, and the gain of both may be too much",
        )
        for name, masked, sgd in _GAINS
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
        "all arrives",
    ),
    "unmasked falling mxint8": Run(
        _dgc(_FALLING, NARROW, corrections=tf_dgc.Corrections(factor_masking=False)),
        "a short warm-up",
    ),
    **{
        f"{number} times": Run(_times(number), "an entry is sent so often in a run")
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
        "entries near the largest of their neighbours; half the bytes",
    ),
    # Of these, tensors that are exempt are sent as float32: so is that of the first.
    "top-k": Run(_by(TopK, **_CORRECTED), "the control of those below"),
    "global": Run(_by(GlobalTopK, True, **_CORRECTED), "one budget for all layers"),
    "by layer": Run(_by_layer, "one budget, small tensors denser"),
    **{
        f"hard threshold {x:g}": Run(_at(levels.HardThreshold, x), "k by what is large")
        for x in (8e-4, 1e-3, 1.4e-3, 2e-3, 2.5e-3, 4e-3, 7e-3, 2e-2)
    },
    **{
        f"residual level {x:g}": Run(_at(levels.ResidualLevel, x), "k by what waits")
        for x in (0.13, 0.2, 0.25, 0.3, 1, 3)
    },
    "decay 0.95": Run(_by(feedback.ForgettingTopK, **_CORRECTED), "residual decay"),
    "momentum ef21": Run(
        _by(feedback.MomentumEF21, sgd={"momentum": 0.0, "rate": 10.0}), "EF21-SGDM"
    ),
    "econtrol": Run(_by(feedback.EControl), "EControl"),
    "diana top-k": Run(_by(feedback.SparseDIANA), "DIANA with top-k"),
}


SETTING = ["task", "steps", "workers"]
COLUMNS = [
    ("method", "method", ""),
    ("value", "reached", ".4f"),
    ("spread", "+-", ".4f"),
    ("difference", "to dense", "+.4f"),
    ("half_width", "95 %", ".4f"),
    ("bytes_per_step", "bytes/step", ",.0f"),
    ("gap", "gap", ".2f"),
]


def tables(rows):
    """Return a title, lines and columns for each setting; no column that is empty.

    Args:
        rows: of `horizons.py`.
    """
    return [
        _table(*of, group) for of, group in resumable.group_rows(rows, SETTING).items()
    ]


def _table(task, steps, workers, rows):
    lines = summaries(rows)
    title = f"{task}: {lines[0]['metric']} after {steps} steps, {workers} workers, "
    title += f"seeds: {', '.join(map(str, sorted({s['seeds'] for s in lines})))}"
    columns = [
        column for column in COLUMNS if any(s[column[0]] is not None for s in lines)
    ]
    return title, lines, columns


def summaries(rows):
    """Return a row per run: means over seeds, their deviation, and pairs with dense.

    Args:
        rows: of `horizons.py`, of one setting.
    """
    groups = resumable.group_rows(rows, ["method"]).values()
    return [_summary(group, rows) for group in sorted(groups, key=_place)]


def _place(group):
    """Return the place among all runs, or behind them, of names of earlier days."""
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
    """Return the mean difference in pairs, half of its interval, and the gap."""
    seeds = {row["seed"] for row in group}
    others = [row for row in rows if row["seed"] in seeds]
    found = intervals.paired(others, group[0]["method"])
    usual = intervals.paired(others, "dgc")
    told = found.seeds and usual.separates and not (found.failed or usual.failed)
    gap = found.mean / usual.mean if told else None
    return {**found.as_columns(), "gap": gap}
