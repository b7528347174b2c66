"""Which optimizers `adam.py` trains by: stock AdamW, corrections and alternatives."""

from typing import NamedTuple

import tf_dgc
from adaptive import onebit
from adaptive.ef21 import EF21
from adaptive.lamb import FrozenLamb
from adaptive.micro import MicroTopK, WindowAdam
from adaptive.waiting import WaitingAdam

ALMOST_NONE = 1e-9
"""Sparsity by which all is sent, and yet it is no dense step, which is stock Adam's."""


NARROW = {"value_dtype": "mxfp4", "exempt_dtype": "mxint8"}
"""As `dgc_for_steps`: 1 bit an entry at 89 %, a 300th of float32 at 99.2 %."""


class Run(NamedTuple):
    """An optimizer to be trained by.

    Attributes:
        make: function of an `AdamW` and the number of steps.
        control: name of the run of the same rule that sends everything.
    """

    make: object
    control: str = "dense"


def schedule(sparsity, steps):
    """Return the warm-up of all sparse runs: four stages in the first fifth."""
    if sparsity < 0.5:
        return sparsity
    density = 1 - sparsity
    stages = [1 - 0.25 * (density / 0.25) ** (i / 4) for i in range(4)]
    return tf_dgc.schedules.WarmupSparsity(steps // 5, sparsity, stages)


def _dgc(sparsity, **settings):
    return lambda inner, steps: tf_dgc.DGCOptimizer(
        inner, schedule(sparsity, steps), **settings
    )


def _constant(sparsity, **settings):
    return lambda inner, _: tf_dgc.DGCOptimizer(inner, sparsity, **settings)


def _by(method, **settings):
    return lambda inner, _: tf_dgc.CompressedOptimizer(inner, method, **settings)


def _local(sparsity=None):
    def make(inner, steps):
        top_k = tf_dgc.compressors.TopK(schedule(sparsity or 0.0, steps))
        method = "ef_sign_sgd" if sparsity is None else top_k
        return tf_dgc.LocalOptimizer(inner, 1, compressor=method)

    return make


def _one_bit(dense_steps, whole=False, kind=onebit.FrozenAdam):
    def make(inner, steps):
        dense = dense_steps(steps)
        rule = kind(dense, **_settings(inner))
        method = onebit.OneBitMomentum(dense, inner.beta_1, whole)
        return tf_dgc.CompressedOptimizer(rule, method)

    return make


def _ef21(sparsity):
    return lambda inner, steps: tf_dgc.CompressedOptimizer(
        inner, EF21(schedule(sparsity, steps))
    )


def _micro(sparsity):
    return lambda inner, steps: tf_dgc.CompressedOptimizer(
        WindowAdam(**_settings(inner)), MicroTopK(schedule(sparsity, steps))
    )


def _waiting(sparsity, independent):
    def make(inner, steps):
        rule = WaitingAdam(independent, **_settings(inner))
        return tf_dgc.DGCOptimizer(rule, schedule(sparsity, steps))

    return make


def _settings(inner):
    """Return the arguments of an AdamW, its schedule included."""
    rule = type(inner).from_config(inner.get_config())
    return {**rule.get_config(), "learning_rate": rule._learning_rate}


def _methods():
    """Return runs of methods with the correction and without."""
    return {
        f"{method}{suffix}": Run(_by(method, **settings), control)
        for method in ("ef_sign_sgd", "power_sgd", "uniform_8bit")
        for suffix, settings, control in (
            ("", {}, "corrected whole"),
            (" uncorrected", {"adam_correction": False}, "dense"),
        )
    }


def _in_first_fifth(steps):
    return onebit.first_steps(max(1, steps // 5))


RUNS = {
    "dense": Run(lambda inner, _: inner),
    "corrected whole": Run(_dgc(ALMOST_NONE), "corrected whole"),
    "dgc 99 %": Run(_dgc(0.99), "corrected whole"),
    "dgc 99 % masking": Run(_dgc(0.99, factor_masking=True), "corrected whole"),
    "dgc 99 % uncorrected": Run(_dgc(0.99, adam_correction=False)),
    "dgc 89 % mxfp4": Run(_constant(0.89, **NARROW), "corrected whole"),
    "dgc 99.2 % mxfp4": Run(_dgc(0.992, **NARROW), "corrected whole"),
    "dgc 99.9 %": Run(_dgc(0.999), "corrected whole"),
    "dgc 99.9 % uncorrected": Run(_dgc(0.999, adam_correction=False)),
    **_methods(),
    "1-bit adam": Run(_one_bit(_in_first_fifth), "1-bit adam whole"),
    "1-bit adam whole": Run(_one_bit(_in_first_fifth, True), "1-bit adam whole"),
    "0/1 adam": Run(_one_bit(onebit.growing_intervals), "0/1 adam whole"),
    "0/1 adam whole": Run(_one_bit(onebit.growing_intervals, True), "0/1 adam whole"),
    "1-bit lamb": Run(_one_bit(_in_first_fifth, kind=FrozenLamb), "1-bit lamb whole"),
    "1-bit lamb whole": Run(
        _one_bit(_in_first_fifth, True, FrozenLamb), "1-bit lamb whole"
    ),
    "local adam 99 %": Run(_local(0.99), "local adam whole"),
    "local adam 99.9 %": Run(_local(0.999), "local adam whole"),
    "local adam ef_sign_sgd": Run(_local(), "local adam whole"),
    "local adam whole": Run(_local(ALMOST_NONE), "local adam whole"),
    "ef21 99 %": Run(_ef21(0.99)),
    "microadam 99 %": Run(_micro(0.99), "microadam whole"),
    "microadam whole": Run(_micro(ALMOST_NONE), "microadam whole"),
    "waiting adam 99 %": Run(_waiting(0.99, True)),
    "waiting adam 99 % equal": Run(_waiting(0.99, False)),
}
