"""Which optimizers `adam.py` trains by: stock AdamW, corrections and alternatives.

Which stands for what:

- `dgc 99 %` is the paper's recipe. The stages of its warm-up send most, so that the
  total ratio of 1,500 steps is below 25.
- `dgc 89 % mxfp4` is constant, and about 1 bit per entry from the first step on: its
  total ratio is above 25. It stands for that, and for 1 bit.
- `dgc 99.9 %` sends less than a 300th after the warm-up, exempt tensors apart, and so
  does `dgc 99.6 % mxfp4 constant`, from the first step on; `dgc 99.5 % mxfp4` a 297th.
- `dgc 99.9 % constant` is `DGCOptimizer` as it is, without a schedule of sparsity.
- `dense rate warm-up` and `dgc 89 % mxfp4 rate warm-up` begin with a twentieth of the
  steps in which the learning rate rises, and are to be compared with each other: else
  dense training, which begins at the full rate, may only lack that.
- `dgc for steps` is what `dgc_for_steps` makes for a run of that length.
- `1-bit adam` is its paper's recipe. A fifth of the steps is dense, by which the total
  ratio stays below 5; `1-bit adam short` is dense in a hundredth, to be compared at
  equal bytes; `1-bit adam growing intervals` in those of 0/1 Adam, without the local
  steps that `0/1 adam` takes.
- `dense lamb` is Keras's, to be compared with 1-bit LAMB: another rule, and better or
  worse than AdamW's by itself.
"""

import statistics
from typing import NamedTuple

import keras
import numpy as np
from registered import intervals
from rivals import onebit
from rivals.ef21 import EF21
from rivals.feedback import MomentumEF21
from rivals.lamb import FrozenLamb
from rivals.micro import MicroTopK, WindowAdam
from rivals.waiting import WaitingAdam
from rivals.zero_one import ZeroOneAdam, dense_steps, ends_of_rounds
from training import rate_search

import tf_dgc
from tf_dgc.codecs import value_types

ALMOST_NONE = 1e-9
"""Sparsity by which all is sent, and yet with an error feedback."""


NARROW = {"value_dtype": "mxfp4", "uncompressed_dtype": "mxint8"}
"""As `dgc_for_steps`: 1 bit an entry at 89 %."""


class Run(NamedTuple):
    """An optimizer to be trained by.

    Attributes:
        make: function of an `AdamW` and the number of steps.
        control: name of the run of the same rule that sends everything.
        uncompressed_dtype: type in which it sends exempt tensors.
    """

    make: object
    control: str | None = "dense"
    uncompressed_dtype: str = "float32"


def schedule(sparsity, steps):
    """Return the warm-up of all sparse runs: four stages in the first fifth."""
    if sparsity < 0.5:
        return sparsity
    density = 1 - sparsity
    stages = [1 - 0.25 * (density / 0.25) ** (i / 4) for i in range(4)]
    return tf_dgc.schedules.WarmupSparsity(steps // 5, sparsity, stages)


def _without_momentum(inner, _):
    inner.beta_1 = 0.0
    return inner


def _warmed(make):
    """Return a run whose rate rises first, by equal steps, and decays afterwards."""

    def with_warm_up(inner, steps):
        rate, begin = inner._learning_rate.initial_learning_rate, max(1, steps // 20)
        warmed = keras.optimizers.schedules.CosineDecay(
            rate / begin, steps - begin, warmup_target=rate, warmup_steps=begin
        )
        settings = {**_settings(inner), "learning_rate": warmed}
        return make(type(inner)(**settings), steps)

    return with_warm_up


def _dgc(sparsity, **settings):
    return lambda inner, steps: tf_dgc.DGCOptimizer(
        inner, schedule(sparsity, steps), **settings
    )


def _constant(sparsity, **settings):
    return lambda inner, _: tf_dgc.DGCOptimizer(inner, sparsity, **settings)


def _by(method, **settings):
    return lambda inner, _: tf_dgc.CompressedOptimizer(inner, method, **settings)


def _local(method):
    def make(inner, steps):
        compressor = method(steps) if callable(method) else method
        return tf_dgc.LocalOptimizer(inner, 1, compressor=compressor)

    return make


def _top_k(sparsity):
    return lambda steps: tf_dgc.compressors.TopK(schedule(sparsity, steps))


def _one_bit(dense_steps, whole, kind):
    def make(inner, steps):
        dense = dense_steps(steps)
        rule = kind(dense, **_settings(inner))
        method = onebit.OneBitMomentum(dense, inner.beta_1, whole)
        return tf_dgc.CompressedOptimizer(
            rule, method, corrections=tf_dgc.Corrections(adam=False)
        )

    return make


def _zero_one(inner, steps):
    return ZeroOneAdam(inner, dense_steps(steps), ends_of_rounds(steps))


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


def _waiting(sparsity, independent):
    def make(inner, steps):
        rule = WaitingAdam(independent, **_settings(inner))
        return tf_dgc.DGCOptimizer(
            rule, schedule(sparsity, steps), corrections=tf_dgc.Corrections(adam=False)
        )

    return make


def _settings(inner):
    """Return the arguments of an AdamW, its schedule included."""
    rule = type(inner).from_config(inner.get_config())
    return {**rule.get_config(), "learning_rate": rule._learning_rate}


def _lamb(inner, _):
    settings = _settings(inner)
    del settings["amsgrad"]
    return keras.optimizers.Lamb(**settings)


def _methods():
    """Return runs of methods with the correction and without."""
    return {
        f"{method}{suffix}": Run(_by(method, **settings), control)
        for method in ("ef_sign_sgd", "power_sgd", "uniform_8bit")
        for suffix, settings, control in (
            ("", {}, "corrected whole"),
            (" uncorrected", {"corrections": tf_dgc.Corrections(adam=False)}, "dense"),
        )
    }


def _in_first(share):
    return lambda steps: onebit.first_steps(max(1, steps // share))


def _one_bits():
    """Return runs of 1-bit Adam and 1-bit LAMB, each with its control."""
    rules = (
        ("1-bit adam", _in_first(5), onebit.FrozenAdam),
        ("1-bit adam short", _in_first(100), onebit.FrozenAdam),
        ("1-bit adam growing intervals", onebit.growing_intervals, onebit.FrozenAdam),
        ("1-bit lamb", _in_first(5), FrozenLamb),
        ("1-bit lamb short", _in_first(100), FrozenLamb),
    )
    return {
        f"{name}{suffix}": Run(_one_bit(dense_steps, whole, kind), f"{name} whole")
        for name, dense_steps, kind in rules
        for suffix, whole in (("", False), (" whole", True))
    }


def _dense(inner, _):
    return inner


RUNS = {
    "dense": Run(_dense),
    "dense rate warm-up": Run(_warmed(_dense), "dense rate warm-up"),
    "dense without momentum": Run(_without_momentum, "dense without momentum"),
    "dense lamb": Run(_lamb, "dense lamb"),
    # A dense step of DGC would be stock AdamW's.
    "corrected whole": Run(_by("bfloat16", error_feedback=True), "corrected whole"),
    "dgc 99 %": Run(_dgc(0.99), "corrected whole"),
    "dgc 99 % masking": Run(
        _dgc(0.99, corrections=tf_dgc.Corrections(factor_masking=True)),
        "corrected whole",
    ),
    "dgc 99 % uncorrected": Run(_dgc(0.99, corrections=tf_dgc.Corrections(adam=False))),
    "dgc 89 % mxfp4": Run(_constant(0.89, **NARROW), "corrected whole", "mxint8"),
    "dgc 89 % mxfp4 rate warm-up": Run(
        _warmed(_constant(0.89, **NARROW)), "dense rate warm-up", "mxint8"
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
    **_one_bits(),
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
    "waiting adam 99 %": Run(_waiting(0.99, True)),
    "waiting adam 99 % equal": Run(_waiting(0.99, False)),
}


SEED_OF_RATES = 100
"""Seed of the runs by which the rate is chosen, no run that counts."""
KEYS = ["task", "method", "rate", "steps", "workers", "batch", "seed"]


def setting(row):
    """Return what rows that are compared have in common."""
    return tuple(row[name] for name in ("task", "workers", "steps", "batch"))


def summaries(rows, budgets=()):
    """Return a row per run and setting: means over seeds, with their distances.

    Args:
        rows: of `adam.py`.
        budgets: how many times less than a dense run methods may send, where losses are
            to be compared at equal bytes.
    """
    found = {}
    for row in rows:
        if row["seed"] != SEED_OF_RATES:
            of_run = found.setdefault((setting(row), row["method"]), {})
            of_run.setdefault(row["rate"], []).append(row)
    searched = _searched(rows)
    chosen = {key: _choice(by_rate, searched) for key, by_rate in found.items()}
    groups = {key: group for key, (group, _) in chosen.items()}
    return [_summary(*choice, groups, budgets) for choice in chosen.values()]


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
        line |= _distance(key, group, groups.get((setting(first), name)))
    whole = first["dense_bytes_per_step"] * first["steps"]
    for ratio in budgets:
        line[budget_key(ratio)] = loss_at(curve, whole / ratio)
    return line


def _distance(key, group, control):
    """Return the mean difference in pairs, and half of its interval, where known."""
    if control is None or control is group:
        return {}
    names = group[0]["method"], control[0]["method"]
    difference = intervals.paired([*group, *control], *names)
    return difference.as_columns(key, f"{key}_half_width")


def budget_key(ratio):
    """Return under which name a row has its loss at a budget."""
    return f"loss_at_{ratio:g}"


def loss_at(curve, budget):
    """Return the loss when a worker had sent so many bytes, or at the end before.

    Between two points it is linear in bytes; before the first one it is not known, and
    None.

    Args:
        curve: [(steps, bytes, loss)], ascending.
        budget: bytes.
    """
    _, sent, losses = zip(*curve, strict=True)
    return float(np.interp(budget, sent, losses)) if budget >= sent[0] else None


def ratios(row, uncompressed_dtype="float32"):
    """Return how many times less than all a worker sent: in total, then, and apart.

    Args:
        row: of `adam.py`; its bytes of exempt tensors are those of float32.
        uncompressed_dtype: type in which the method sends them.
    """
    size, uncompressed = row["dense_bytes_per_step"], row["exempt_bytes_per_step"]
    steps, sent, _ = row["curve"][-1]
    begun, before, _ = next(p for p in row["curve"] if p[0] >= row["steps"] // 5)
    per_step = (sent - before) / (steps - begun)
    apart = 1
    if per_step < size:
        others = (
            per_step
            - sum(value_types.value_bits(uncompressed_dtype, uncompressed // 4)) / 8
        )
        apart = (size - uncompressed) / others
    return {"ratio": size * steps / sent, "then": size / per_step, "apart": apart}


def _searched(rows):
    """Return losses by rate that were tried, by run and by steps of the search."""
    found = {}
    for row in rows:
        if row["seed"] == SEED_OF_RATES:
            by_steps = found.setdefault(_searched_by(row), {})
            by_steps.setdefault(row["steps"], {})[row["rate"]] = row["value"]
    return found


def _choice(by_rate, searched):
    """Return runs of the rate that was searched, and how: steps, and if at the edge.

    The longest search counts whose rate was run. Where rates were given, it is the runs
    of most seeds, and of those the last, and nothing more.
    """
    last = max(reversed(by_rate.values()), key=len)
    by_steps = searched.get(_searched_by(last[0]), {})
    for steps in sorted(by_steps, reverse=True):
        tried = by_steps[steps]
        rate = rate_search.chosen(tried)
        if steps <= last[0]["steps"] and len(tried) > 1 and rate in by_rate:
            edge = rate_search.edge(rate, tried)
            return by_rate[rate], {"searched": steps, "edge": edge}
    return last, {}


def _searched_by(row):
    return tuple(row[name] for name in ("task", "method", "workers", "batch"))


def _mean_curve(group):
    points = np.mean([row["curve"] for row in group], axis=0)
    return [(round(at), sent, loss) for at, sent, loss in points.tolist()]
