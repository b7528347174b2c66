"""The optimizers that `adam.py` compares, and its tables.

- `dgc 99 %` is the paper's recipe. Its warm-up sends most of the bytes, so that the
  total ratio of 1,500 steps is below 25.
- `dgc 89 % mxfp4` sends about 1 bit per entry from the first step on. Its total ratio
  is above 25.
- `dgc 99.9 %` has a ratio above 300 after the warm-up, uncompressed tensors excluded.
  `dgc 99.6 % mxfp4 constant` has such a ratio from the first step on, and
  `dgc 99.5 % mxfp4` has 297.
- `dgc 99.9 % constant` is `DGCOptimizer` without a schedule of sparsity.
- `dense rate warm-up` and `dgc 89 % mxfp4 rate warm-up` raise the learning rate in the
  first twentieth of the steps. They show whether dense training, which begins at the
  full rate, only lacks such a warm-up.
- `dgc for steps` is `dgc_for_steps` for the length of the run.
- `1-bit adam` is its paper's recipe. A fifth of the steps is dense, so its total ratio
  is below 5. `1-bit adam short` has a hundredth of dense steps, for a comparison at
  equal bytes. `1-bit adam growing intervals` has the dense steps of 0/1 Adam, but not
  the local steps of `0/1 adam`.
- `dense lamb` is Keras's `Lamb`, the control of 1-bit LAMB.
"""

import statistics
from typing import NamedTuple

import keras
import numpy as np
from registered import intervals
from rivals import one_bit_adam, zero_one_adam
from rivals.delay_aware_adam import DelayAwareAdam
from rivals.ef21 import EF21
from rivals.error_feedback import MomentumEF21
from rivals.micro_adam import MicroTopK, WindowAdam
from rivals.one_bit_lamb import FrozenLamb
from training import rate_search

import tf_dgc
from tf_dgc.codecs import value_types

ALMOST_NONE = 1e-9
"""Sparsity that sends all entries, but keeps error feedback enabled."""


NARROW = {"value_dtype": "mxfp4", "uncompressed_dtype": "mxint8"}
"""Dtypes of `dgc_for_steps`: 1 bit per entry at 89 %."""


class Run(NamedTuple):
    """A run's optimizer.

    Attributes:
        make: function of an `AdamW` and the number of steps that returns the optimizer.
        control: name of the run of the same update rule that sends everything.
        uncompressed_dtype: dtype of uncompressed tensors in messages.
    """

    make: object
    control: str | None = "dense"
    uncompressed_dtype: str = "float32"


def schedule(sparsity, steps):
    """Return the sparsity schedule: a warm-up of four stages in the first fifth."""
    if sparsity < 0.5:
        return sparsity
    density = 1 - sparsity
    stages = [1 - 0.25 * (density / 0.25) ** (i / 4) for i in range(4)]
    return tf_dgc.schedules.WarmupSparsity(steps // 5, sparsity, stages)


def _without_momentum(inner, _):
    inner.beta_1 = 0.0
    return inner


def _with_rate_warm_up(make):
    """Add a linear warm-up of the learning rate in the first twentieth."""

    def make_with_warm_up(inner, steps):
        rate = inner._learning_rate.initial_learning_rate
        warmup_steps = max(1, steps // 20)
        decay = keras.optimizers.schedules.CosineDecay(
            rate / warmup_steps,
            steps - warmup_steps,
            warmup_target=rate,
            warmup_steps=warmup_steps,
        )
        settings = {**_settings(inner), "learning_rate": decay}
        return make(type(inner)(**settings), steps)

    return make_with_warm_up


def _dgc(sparsity, **settings):
    return lambda inner, steps: tf_dgc.DGCOptimizer(
        inner, schedule(sparsity, steps), **settings
    )


def _constant(sparsity, **settings):
    return lambda inner, _: tf_dgc.DGCOptimizer(inner, sparsity, **settings)


def _compressed(method, **settings):
    return lambda inner, _: tf_dgc.CompressedOptimizer(inner, method, **settings)


def _local(method):
    def make(inner, steps):
        compressor = method(steps) if callable(method) else method
        return tf_dgc.LocalOptimizer(inner, 1, compressor=compressor)

    return make


def _top_k(sparsity):
    return lambda steps: tf_dgc.compressors.TopK(schedule(sparsity, steps))


def _one_bit(dense_steps, whole, rule_class):
    def make(inner, steps):
        dense = dense_steps(steps)
        rule = rule_class(dense, **_settings(inner))
        method = one_bit_adam.OneBitMomentum(dense, inner.beta_1, whole)
        return tf_dgc.CompressedOptimizer(
            rule, method, corrections=tf_dgc.Corrections(adam=False)
        )

    return make


def _zero_one(inner, steps):
    dense_steps = zero_one_adam.dense_steps(steps)
    ends_of_rounds = zero_one_adam.ends_of_rounds(steps)
    return zero_one_adam.ZeroOneAdam(inner, dense_steps, ends_of_rounds)


def _ef21(sparsity):
    return lambda inner, steps: tf_dgc.CompressedOptimizer(
        inner, EF21(schedule(sparsity, steps))
    )


def _momentum_ef21(sparsity):
    def make(inner, steps):
        rule = type(inner)(**{**_settings(inner), "beta_1": 0.0})
        method = MomentumEF21(schedule(sparsity, steps), eta=1 - inner.beta_1)
        return tf_dgc.CompressedOptimizer(rule, method)

    return make


def _micro(sparsity):
    return lambda inner, steps: tf_dgc.CompressedOptimizer(
        WindowAdam(**_settings(inner)),
        MicroTopK(schedule(sparsity, steps)),
        corrections=tf_dgc.Corrections(adam=False),
    )


def _delay_aware(sparsity, independent):
    def make(inner, steps):
        rule = DelayAwareAdam(independent, **_settings(inner))
        return tf_dgc.DGCOptimizer(
            rule, schedule(sparsity, steps), corrections=tf_dgc.Corrections(adam=False)
        )

    return make


def _settings(inner):
    """Return the arguments of an AdamW, including its schedule."""
    rule = type(inner).from_config(inner.get_config())
    return {**rule.get_config(), "learning_rate": rule._learning_rate}


def _lamb(inner, _):
    settings = _settings(inner)
    del settings["amsgrad"]
    return keras.optimizers.Lamb(**settings)


def _methods():
    """Return runs of methods with and without Adam correction."""
    return {
        f"{method}{suffix}": Run(_compressed(method, **settings), control)
        for method in ("ef_sign_sgd", "power_sgd", "uniform_8bit")
        for suffix, settings, control in (
            ("", {}, "corrected whole"),
            (" uncorrected", {"corrections": tf_dgc.Corrections(adam=False)}, "dense"),
        )
    }


def _first(fraction):
    return lambda steps: one_bit_adam.first_steps(max(1, steps // fraction))


def _one_bit_runs():
    """Return runs of 1-bit Adam and 1-bit LAMB, each with its control."""
    adam, growing_intervals = one_bit_adam.FrozenAdam, one_bit_adam.growing_intervals
    rules = (
        ("1-bit adam", _first(5), adam),
        ("1-bit adam short", _first(100), adam),
        ("1-bit adam growing intervals", growing_intervals, adam),
        ("1-bit lamb", _first(5), FrozenLamb),
        ("1-bit lamb short", _first(100), FrozenLamb),
    )
    runs = {}
    for name, dense_steps, rule_class in rules:
        control = f"{name} whole"
        runs[name] = Run(_one_bit(dense_steps, False, rule_class), control)
        runs[control] = Run(_one_bit(dense_steps, True, rule_class), control)
    return runs


def _dense(inner, _):
    return inner


RUNS = {
    "dense": Run(_dense),
    "dense rate warm-up": Run(_with_rate_warm_up(_dense), "dense rate warm-up"),
    "dense without momentum": Run(_without_momentum, "dense without momentum"),
    "dense lamb": Run(_lamb, "dense lamb"),
    # DGC's dense steps would be those of stock AdamW.
    "corrected whole": Run(
        _compressed("bfloat16", error_feedback=True), "corrected whole"
    ),
    "dgc 99 %": Run(_dgc(0.99), "corrected whole"),
    "dgc 99 % masking": Run(
        _dgc(0.99, corrections=tf_dgc.Corrections(factor_masking=True)),
        "corrected whole",
    ),
    "dgc 99 % uncorrected": Run(_dgc(0.99, corrections=tf_dgc.Corrections(adam=False))),
    "dgc 89 % mxfp4": Run(_constant(0.89, **NARROW), "corrected whole", "mxint8"),
    "dgc 89 % mxfp4 rate warm-up": Run(
        _with_rate_warm_up(_constant(0.89, **NARROW)), "dense rate warm-up", "mxint8"
    ),
    "dgc 99.2 % mxfp4": Run(_dgc(0.992, **NARROW), "corrected whole", "mxint8"),
    "dgc 99.5 % mxfp4": Run(_dgc(0.995, **NARROW), "corrected whole", "mxint8"),
    "dgc 99.6 % mxfp4 constant": Run(
        _constant(0.996, **NARROW), "corrected whole", "mxint8"
    ),
    "dgc for steps": Run(tf_dgc.dgc_for_steps, "corrected whole", "mxint8"),
    "dgc 99.9 %": Run(_dgc(0.999), "corrected whole"),
    "dgc 99.9 % constant": Run(_constant(0.999), "corrected whole"),
    "dgc 99.9 % uncorrected": Run(
        _dgc(0.999, corrections=tf_dgc.Corrections(adam=False))
    ),
    **_methods(),
    **_one_bit_runs(),
    "0/1 adam": Run(_zero_one),
    "local adam 99 %": Run(_local(_top_k(0.99)), "local adam whole"),
    "local adam 99.9 %": Run(_local(_top_k(0.999)), "local adam whole"),
    "local adam ef_sign_sgd": Run(_local("ef_sign_sgd"), "local adam whole"),
    "local adam power_sgd": Run(_local("power_sgd"), "local adam whole"),
    "local adam uniform_8bit": Run(_local("uniform_8bit"), "local adam whole"),
    "local adam whole": Run(_local(_top_k(ALMOST_NONE)), "local adam whole"),
    "ef21 99 %": Run(_ef21(0.99)),
    "ef21 99.9 %": Run(_ef21(0.999)),
    "momentum ef21 99 %": Run(_momentum_ef21(0.99), "momentum ef21 whole"),
    "momentum ef21 whole": Run(_momentum_ef21(ALMOST_NONE), "momentum ef21 whole"),
    "microadam 99 %": Run(_micro(0.99), "microadam whole"),
    "microadam whole": Run(_micro(ALMOST_NONE), "microadam whole"),
    "waiting adam 99 %": Run(_delay_aware(0.99, True)),
    "waiting adam 99 % equal": Run(_delay_aware(0.99, False)),
}


SEED_OF_RATES = 100
"""Seed of the runs that choose the learning rate; the tables leave them out."""
KEYS = ["task", "method", "rate", "steps", "workers", "batch", "seed"]


def setting(row):
    """Return the setting of a row; rows with the same setting are compared."""
    return tuple(row[name] for name in ("task", "workers", "steps", "batch"))


def summaries(rows, budgets=()):
    """Return a row per run and setting: means over seeds, and differences to controls.

    Args:
        rows: rows of `adam.py`.
        budgets: ratios to the bytes of a dense run at which losses are compared.
    """
    by_run = {}
    for row in rows:
        if row["seed"] != SEED_OF_RATES:
            by_rate = by_run.setdefault((setting(row), row["method"]), {})
            by_rate.setdefault(row["rate"], []).append(row)
    searches = _searches(rows)
    selections = {
        key: _select_rate(by_rate, searches) for key, by_rate in by_run.items()
    }
    groups = {key: group for key, (group, _) in selections.items()}
    return [
        _summary(group, search, groups, budgets)
        for group, search in selections.values()
    ]


def _summary(group, search, groups, budgets):
    first, losses = group[0], [row["value"] for row in group]
    curve = _mean_curve(group)
    run = RUNS.get(first["method"], Run(None, None))
    line = {
        **first,
        **ratios({**first, "curve": curve}, run.uncompressed_dtype),
        **search,
        "curve": curve,
        "value": statistics.mean(losses),
        "spread": (max(losses) - min(losses)) / 2,
        "minutes": statistics.mean(row["seconds"] for row in group) / 60,
        "seeds": len(group),
        "xla": {True: "yes", False: "no"}.get(first.get("jit_compile")),
    }
    for key, name in (("to_dense", "dense"), ("to_control", run.control)):
        line |= _difference(key, group, groups.get((setting(first), name)))
    dense_bytes = first["dense_bytes_per_step"] * first["steps"]
    for ratio in budgets:
        line[budget_key(ratio)] = loss_at(curve, dense_bytes / ratio)
    return line


def _difference(key, group, control):
    """Return the mean paired difference and half of its interval, if they exist."""
    if control is None or control is group:
        return {}
    difference = intervals.paired(
        [*group, *control], group[0]["method"], control[0]["method"]
    )
    return difference.as_columns(key, f"{key}_half_width")


def budget_key(ratio):
    """Return the column of the loss at a budget."""
    return f"loss_at_{ratio:g}"


def loss_at(curve, budget):
    """Return the loss when a worker had sent `budget` bytes, or the final loss.

    Interpolates linearly between points; None before the first point.

    Args:
        curve: [(steps, bytes, loss)], ascending.
        budget: number of bytes.
    """
    _, sent, losses = zip(*curve, strict=True)
    return float(np.interp(budget, sent, losses)) if budget >= sent[0] else None


def ratios(row, uncompressed_dtype="float32"):
    """Return compression ratios: in total, after warm-up, and of compressed tensors.

    Args:
        row: row of `adam.py`; its `exempt_bytes_per_step` are bytes of float32.
        uncompressed_dtype: dtype in which the method sends uncompressed tensors.
    """
    size, uncompressed = row["dense_bytes_per_step"], row["exempt_bytes_per_step"]
    steps, sent, _ = row["curve"][-1]
    first_step, first_sent, _ = next(
        point for point in row["curve"] if point[0] >= row["steps"] // 5
    )
    per_step = (sent - first_sent) / (steps - first_step)
    apart = 1
    if per_step < size:
        bits = sum(value_types.value_bits(uncompressed_dtype, uncompressed // 4))
        apart = (size - uncompressed) / (per_step - bits / 8)
    return {"ratio": size * steps / sent, "then": size / per_step, "apart": apart}


def _searches(rows):
    """Return losses of rate searches, by run, number of steps, and rate."""
    searches = {}
    for row in rows:
        if row["seed"] == SEED_OF_RATES:
            by_steps = searches.setdefault(_search_key(row), {})
            by_steps.setdefault(row["steps"], {})[row["rate"]] = row["value"]
    return searches


def _select_rate(by_rate, searches):
    """Return the runs of the best rate, and facts about its search.

    The longest search whose best rate was run decides. Without a search, the rate with
    most seeds is used, and of several the last.
    """
    most_seeds = max(reversed(by_rate.values()), key=len)
    by_steps = searches.get(_search_key(most_seeds[0]), {})
    for steps in sorted(by_steps, reverse=True):
        losses = by_steps[steps]
        rate = rate_search.rate_with_least_value(losses)
        if steps <= most_seeds[0]["steps"] and len(losses) > 1 and rate in by_rate:
            edge = rate_search.edge(rate, losses)
            return by_rate[rate], {"searched": steps, "edge": edge}
    return most_seeds, {}


def _search_key(row):
    return tuple(row[name] for name in ("task", "method", "workers", "batch"))


def _mean_curve(group):
    points = np.mean([row["curve"] for row in group], axis=0)
    return [(round(step), sent, loss) for step, sent, loss in points.tolist()]
