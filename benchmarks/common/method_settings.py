"""Settings with which `study/convergence.py` trains methods, and the ablation of DGC.

A method is trained with its own defaults and the task's learning rate, momentum and
clipping, but for what is stated here: what made it train best among a few values tried
on MNIST, with one seed and 250 steps. Papers choose theirs too.
"""

import functools

import tf_dgc
from tf_dgc import compressors

NO_PHASES = 4
"""Steps for `method` that leave no phases: `LGC` codes from its second step on, and DGC
does not warm up."""

# What differs for the inner SGD: `rate`, a factor of the task's learning rate;
# `momentum`; `global_clipnorm`.
INNER = {
    # A vote has no magnitude, and Signum brings its own momentum.
    "sign_sgd": {"rate": 0.03, "momentum": 0.0},
    "signum": {"rate": 0.03, "momentum": 0.0},
    "demo": {"rate": 0.03, "momentum": 0.0},
    # What arrives late, many steps at once, is not to be multiplied by momentum.
    "random_k": {"momentum": 0.0},
    "count_sketch": {"momentum": 0.0},
    # A skipped step repeats old gradients, which momentum makes ten times as large.
    "laq": {"rate": 3.0, "momentum": 0.0},
    "ef_sign_sgd": {"rate": 0.3},
    "one_bit": {"rate": 0.3},
}


# DGC, and with values in fewer bits; those of small tensors likewise.
DGC = {
    "dgc": {},
    "dgc bfloat16": {"value_dtype": "bfloat16"},
    "dgc mxint8": {"value_dtype": "mxint8", "uncompressed_dtype": "bfloat16"},
    "dgc mxfp4": {"value_dtype": "mxfp4", "uncompressed_dtype": "mxint8"},
}

FOR_STEPS = "dgc_for_steps"
"""DGC as the package sets it for a run of so many steps."""

WHEN_SENT = " when sent"
"""Behind a method's name: with the learning rate of the step in which it is sent."""

NAMES = [*compressors.METHODS, *DGC, FOR_STEPS]
"""All methods."""

MODES = {"no_compression" if m == "none" else m: m for m in compressors.METHODS}
"""Methods as modes of `step.py`, where "none" is no communication."""
ARE_MOMENTUM = [n for n, m in compressors.METHODS.items() if m.residual_is_momentum]
"""Methods behind which there must be no other momentum."""


def parameters(name, steps):
    """Return arguments of a compressor, for a run of so many steps."""
    if name == "lgc":  # phases within the run, and tensors that are large enough
        phases = {"dense_steps": steps // 10, "learning_steps": 3 * steps // 10}
        return {"sparsity": 0.99, "channels": 8, **phases}
    return {"two_bit": {"threshold": 0.01}}.get(name, {})


def method(name):
    """Return how the optimizer of a method is made, and what differs for its SGD."""
    if name.endswith(WHEN_SENT):
        make, settings = method(name.removesuffix(WHEN_SENT))
        return functools.partial(
            make, corrections=tf_dgc.Corrections(scale_before_accumulation=False)
        ), settings
    if name in DGC:
        return _Dgc(DGC[name], warms_up=True), {}
    if name == FOR_STEPS:
        return tf_dgc.dgc_for_steps, {}

    def make(inner, steps, **options):
        compressor = compressors.METHODS[name](**parameters(name, steps))
        return tf_dgc.CompressedOptimizer(inner, compressor, **options)

    return make, INNER.get(name, {})


def ablation(clipnorm):
    """Return (name, how the optimizer is made, what differs for its SGD).

    From sending the largest entries with nothing else but a residual, each row adds
    one thing (Lin et al., ICLR 2018, sections 3.2 and 3.3).
    """
    unclipped = {"global_clipnorm": None}
    clipped = {"global_clipnorm": clipnorm or 5.0}
    switches = [
        (
            "top-k alone",
            unclipped,
            {"corrections": tf_dgc.Corrections(momentum=False)},
            False,
        ),
        (
            "+ momentum correction",
            unclipped,
            {"corrections": tf_dgc.Corrections(factor_masking=False)},
            False,
        ),
        (
            "+ local clipping",
            clipped,
            {"corrections": tf_dgc.Corrections(factor_masking=False)},
            False,
        ),
        ("+ factor masking", clipped, {}, False),
        ("+ warm-up", clipped, {}, True),
    ]
    return [
        (name, _Dgc(options, warms_up), settings)
        for name, settings, options, warms_up in switches
    ]


class _Dgc:
    def __init__(self, options, warms_up):
        self._options = options
        self._warms_up = warms_up

    def __call__(self, inner, steps, **options):
        sparsity = 0.999
        if self._warms_up and steps >= 5:
            sparsity = tf_dgc.schedules.WarmupSparsity(steps // 5, sparsity)
        return tf_dgc.DGCOptimizer(inner, sparsity, **{**self._options, **options})
