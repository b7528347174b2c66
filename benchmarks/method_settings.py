"""With which settings `convergence.py` trains each method, and the ablation of DGC.

A method is trained with its own defaults and the task's learning rate, momentum and
clipping, but for what is stated here. Learning rates were chosen among a third, a
tenth, a thirtieth and so on of the task's by the first seed; papers choose them too.
"""

import tf_dgc

# What differs for the inner SGD: `rate`, a factor of the task's learning rate;
# `momentum`; `global_clipnorm`.
INNER = {}


def method(name):
    """Return how the optimizer of a method is made, and what differs for its SGD."""
    if name == "dgc":
        return _dgc, {}
    return (
        lambda inner, steps: tf_dgc.CompressedOptimizer(inner, name),
        INNER.get(name, {}),
    )


def ablation(clipnorm):
    """Return (name, how the optimizer is made, what differs for its SGD).

    From sending the largest entries with nothing else but a residual, each row adds
    one thing (Lin et al., ICLR 2018, sections 3.2 and 3.3).
    """
    unclipped = {"global_clipnorm": None}
    clipped = {"global_clipnorm": clipnorm or 5.0}
    switches = [
        ("top-k alone", unclipped, {"momentum_correction": False}, False),
        ("+ momentum correction", unclipped, {"factor_masking": False}, False),
        ("+ local clipping", clipped, {"factor_masking": False}, False),
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

    def __call__(self, inner, steps):
        sparsity = 0.999
        if self._warms_up:
            sparsity = tf_dgc.schedules.WarmupSparsity(steps // 5, sparsity)
        return tf_dgc.DGCOptimizer(inner, sparsity, **self._options)


_dgc = _Dgc({}, True)
