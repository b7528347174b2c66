"""Settings with which `study/convergence.py` trains methods, and the ablation of DGC.

A method has its own defaults and the task's learning rate, momentum and clipping,
except for the settings below: the best of a few values tried on MNIST, with one seed
and 250 steps. Papers choose their settings too.
"""

import tf_dgc
from tf_dgc import compressors

NO_PHASES = 4
"""Number of steps for which the optimizers of `method` have no phases.

`LGC` codes from its second step on, and DGC does not warm up.
"""

INNER = {
    # A majority vote has no magnitude, and Signum has its own momentum.
    "sign_sgd": {"rate": 0.03, "momentum": 0.0},
    "signum": {"rate": 0.03, "momentum": 0.0},
    "demo": {"rate": 0.03, "momentum": 0.0},
    # Momentum would amplify delayed entries, which arrive with the sum of many steps.
    "random_k": {"momentum": 0.0},
    "count_sketch": {"momentum": 0.0},
    # A skipped step repeats old gradients, which momentum would amplify tenfold.
    "laq": {"rate": 3.0, "momentum": 0.0},
    "ef_sign_sgd": {"rate": 0.3},
    "one_bit": {"rate": 0.3},
}
"""Settings of the inner SGD: `rate`, a factor of the task's learning rate; `momentum`;
`global_clipnorm`."""

DGC = {
    "dgc": {},
    "dgc bfloat16": {"value_dtype": "bfloat16"},
    "dgc mxint8": {"value_dtype": "mxint8", "uncompressed_dtype": "bfloat16"},
    "dgc mxfp4": {"value_dtype": "mxfp4", "uncompressed_dtype": "mxint8"},
}
"""Arguments of `DGCOptimizer` by name: dtypes of sent values."""

FOR_STEPS = "dgc_for_steps"
"""DGC with the package's settings for the run length."""

WHEN_SENT = " when sent"
"""Suffix of a method's name: scale by the learning rate when an entry is sent."""

NAMES = [*compressors.METHODS, *DGC, FOR_STEPS]
"""All methods."""

MODES = {"no_compression" if m == "none" else m: m for m in compressors.METHODS}
"""Methods by their mode in `step.py`, where "none" is no communication."""
NO_INNER_MOMENTUM = [
    n for n, m in compressors.METHODS.items() if m.residual_is_momentum
]
"""Methods whose inner optimizer must have no momentum."""


def parameters(name, steps):
    """Return the arguments of a compressor for a run of `steps` steps."""
    if name == "lgc":  # ends its phases within the run, and codes small tensors too
        phases = {"dense_steps": steps // 10, "learning_steps": 3 * steps // 10}
        return {"sparsity": 0.99, "channels": 8, **phases}
    return {"two_bit": {"threshold": 0.01}}.get(name, {})


def create_method(name):
    """Return a method's optimizer and the settings of its SGD, as in `INNER`.

    The optimizer is a function of the inner optimizer and the number of steps, with
    further arguments of the optimizer as keywords.
    """
    if name.endswith(WHEN_SENT):
        wrap, settings = create_method(name.removesuffix(WHEN_SENT))
        corrections = tf_dgc.Corrections(scale_before_accumulation=False)

        def wrap_when_sent(inner, steps, **options):
            return wrap(inner, steps, **{"corrections": corrections, **options})

        return wrap_when_sent, settings
    if name in DGC:
        return _Dgc(DGC[name], warmup=True), {}
    if name == FOR_STEPS:
        return tf_dgc.dgc_for_steps, {}

    def wrap(inner, steps, **options):
        compressor = compressors.METHODS[name](**parameters(name, steps))
        return tf_dgc.CompressedOptimizer(inner, compressor, **options)

    return wrap, INNER.get(name, {})


def ablation(clipnorm):
    """Return (name, optimizer, settings of its SGD) of each row; see `method`.

    The first row sends the largest entries and accumulates a residual; each further row
    adds one technique (Lin et al., ICLR 2018, sections 3.2 and 3.3).
    """
    unclipped = {"global_clipnorm": None}
    clipped = {"global_clipnorm": clipnorm or 5.0}
    no_momentum = {"corrections": tf_dgc.Corrections(momentum=False)}
    no_masking = {"corrections": tf_dgc.Corrections(factor_masking=False)}
    return [
        ("top-k alone", _Dgc(no_momentum, warmup=False), unclipped),
        ("+ momentum correction", _Dgc(no_masking, warmup=False), unclipped),
        ("+ local clipping", _Dgc(no_masking, warmup=False), clipped),
        ("+ factor masking", _Dgc({}, warmup=False), clipped),
        ("+ warm-up", _Dgc({}, warmup=True), clipped),
    ]


class _Dgc:
    """Creates a `DGCOptimizer` for an inner optimizer and a number of steps."""

    def __init__(self, options, warmup):
        self._options = options
        self._warmup = warmup

    def __call__(self, inner, steps, **options):
        sparsity = 0.999
        if self._warmup and steps >= 5:
            sparsity = tf_dgc.schedules.WarmupSparsity(steps // 5, sparsity)
        return tf_dgc.DGCOptimizer(inner, sparsity, **{**self._options, **options})
